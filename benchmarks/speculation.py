"""What speculative decoding saves and costs: `python -m benchmarks.speculation`.

Three questions. How many passes does n-gram lookup save where answers are copied from their prompts? How much faster is
one request, with either proposer? And what do drafts cost a full batch when all of them are wrong? The first is counted
in a simulator, which generates the written answers of `workloads.copying`. The others are timed; the engines that are
compared take turns, prompt by prompt or round by round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm.auto import tqdm

from helpers import Engine, EngineConfig, SamplingParams, load_model, workloads
from helpers.models import EMBEDDED
from helpers.simulator import Simulator

from .machine import processor
from .models import find_model

ROUNDS, ROWS, OUTPUT_TOKENS = 7, 16, 64


class AlwaysWrong:
    """Proposes tokens that a model hardly ever generates: EOS is ignored, so it is wrong wherever it is not best."""

    def __init__(self, token_id: int):
        self.token_id = token_id

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """Return `k` times the token."""
        return [self.token_id] * k


# --- counted ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """The decodes of some answers: tokens, forward passes and drafts; prefills are not counted."""

    tokens: int
    passes: int
    drafted: int
    accepted: int


def count_copies(tokenizer, speculative, num_speculative_tokens: int = 4) -> Counts:
    """Count what one row takes to generate the answers of `workloads.copying`, one after another."""
    texts = []
    for prompt, answer in workloads.copying():
        ids = tokenizer(prompt)["input_ids"]
        texts.append((ids, ids + tokenizer(answer)["input_ids"]))

    def next_token(token_ids: list[int]) -> int:
        return next(text for _, text in texts if text[: len(token_ids)] == token_ids)[len(token_ids)]

    config = EngineConfig(
        max_batch_size=1, speculative=speculative, num_speculative_tokens=num_speculative_tokens, prefix_caching=False
    )
    engine = Simulator(config, next_token=next_token)
    for ids, text in texts:
        engine.generate([ids], SamplingParams(len(text) - len(ids)))
    trace = engine.trace
    assert trace.output_tokens == sum(len(text) - len(ids) for ids, text in texts)
    decodes = sum(row.work == "decode" for one in trace.passes for row in one.row_steps)
    return Counts(trace.output_tokens - len(texts), decodes, trace.drafted_tokens, trace.accepted_tokens)


# --- timed ------------------------------------------------------------------------------------------------------------


def take_turns(engines: dict[str, Engine], run: Callable[[Engine], None], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of `run` with each engine, in rounds after one that warms up."""
    seconds = {name: [] for name in engines}
    for number in tqdm(range(rounds + 1), unit="round", leave=False):
        for name, engine in engines.items():
            start = time.perf_counter()
            run(engine)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def one_request(model, tokenizer, proposers: list, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Time stories of one row; return milliseconds per token, tokens per pass and acceptance for each proposer."""
    engines = {
        str(name): Engine(model, tokenizer, EngineConfig(max_batch_size=1, speculative=name, prefix_caching=False))
        for name in proposers
    }
    prompts = [request.prompt for request in workloads.race(6)]
    tokens: dict[str, list] = {name: [] for name in engines}
    names = {id(engine): name for name, engine in engines.items()}

    def run(engine: Engine) -> None:
        outputs = [engine.generate([prompt], SamplingParams(128))[0] for prompt in prompts]
        tokens[names[id(engine)]] = [output.token_ids for output in outputs]

    seconds = take_turns(engines, run, rounds)
    expected = tokens[str(proposers[0])]
    assert all(one == expected for one in tokens.values()), "the tokens differ"
    count = sum(map(len, expected))
    return {
        name: (
            1000 * statistics.median(seconds[name]) / count,
            engine.trace.output_tokens / engine.trace.forward_passes,
            engine.trace.acceptance or 0.0,
        )
        for name, engine in engines.items()
    }


def full_batch(model, tokenizer, rounds: int) -> tuple[float, float, int, int]:
    """Time full batches with wrong drafts and without drafts.

    Returns:
        Milliseconds per iteration without and with drafts, and how many drafts and output tokens there were.
    """
    wrong = AlwaysWrong(len(tokenizer) - 1)
    engines = {
        "none": Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS)),
        "wrong": Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS, speculative=wrong)),
    }
    prompts = [request.prompt for request in workloads.race(ROWS)]

    def run(engine: Engine) -> None:
        engine.generate(prompts, SamplingParams(OUTPUT_TOKENS, ignore_eos=True))

    seconds = take_turns(engines, run, rounds)
    none, drafts = (1000 * statistics.median(seconds[name]) / OUTPUT_TOKENS for name in engines)
    trace = engines["wrong"].trace
    return none, drafts, trace.drafted_tokens, trace.output_tokens


def pass_times(model, tokenizer, counts: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Return the median milliseconds of an iteration in which this many rows decode."""
    milliseconds = {}
    for rows in counts:
        engine = Engine(model, tokenizer, EngineConfig(max_batch_size=rows))
        for request in workloads.race(rows):
            engine.add_request(request.prompt, SamplingParams(6 + 4 * rounds, ignore_eos=True))
        for _ in range(5):
            engine.step()
        times = []
        for _ in range(4 * rounds):
            start = time.perf_counter()
            engine.step()
            times.append(1000 * (time.perf_counter() - start))
        milliseconds[rows] = statistics.median(times)
    return milliseconds


# --- the report -------------------------------------------------------------------------------------------------------


def report(rounds: int, timed: bool = True, gpt2: bool = True) -> str:
    """Return the answers as Markdown."""
    model, tokenizer = load_model(EMBEDDED)
    lines = ["Answers that are copied from their prompts, one row, decodes only:", ""]
    lines += ["| drafts at most | tokens | passes | tokens per pass | drafts | accepted |", "| --- " * 6 + "|"]
    for drafts in (0, 2, 4, 8):
        one = count_copies(tokenizer, "ngram" if drafts else None, drafts or 1)
        share = f"{one.accepted / one.drafted:.0%}" if one.drafted else ""
        lines.append(
            f"| {drafts} | {one.tokens} | {one.passes} | {one.tokens / one.passes:.2f} | {one.drafted} | {share} |"
        )
    if not timed:
        return "\n".join(lines)
    lines += [
        "",
        f"Processor: {processor()}. Medians of {rounds} rounds. The embedded model, one request at a time:",
        "",
    ]
    lines += ["| proposer | ms per token | times faster | tokens per pass | accepted |", "| --- " * 5 + "|"]
    rows = one_request(model, tokenizer, [None, "ngram", "draft"], rounds)
    for name, (milliseconds, per_pass, acceptance) in rows.items():
        faster = rows["None"][0] / milliseconds
        lines.append(f"| {name} | {milliseconds:.3f} | {faster:.2f} | {per_pass:.2f} | {acceptance:.0%} |")
    models = {"embedded": (model, tokenizer)}
    if gpt2:
        models["GPT-2 124M"] = load_model(find_model("gpt2").folder)
    lines += ["", f"{ROWS} rows, every draft wrong:", ""]
    lines += ["| model | ms per iteration | with drafts | loss | drafts per token |", "| --- " * 5 + "|"]
    for name, pair in models.items():
        none, drafts, drafted, tokens = full_batch(*pair, rounds)
        lines.append(f"| {name} | {none:.2f} | {drafts:.2f} | {drafts / none - 1:.1%} | {drafted / tokens:.1%} |")
    lines += ["", "Milliseconds of an iteration by its rows:", ""]
    counts = (1, 2, 4, 8, 16, 32)
    lines += ["| model | " + " | ".join(map(str, counts)) + " |", "| --- " * (len(counts) + 1) + "|"]
    for name, pair in models.items():
        times = pass_times(*pair, counts, rounds)
        lines.append(f"| {name} | " + " | ".join(f"{times[count]:.2f}" for count in counts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measured rounds (default {ROUNDS})")
    parser.add_argument("--count-only", action="store_true", help="count passes and time nothing")
    options = parser.parse_args()
    print(report(options.rounds, timed=not options.count_only))
