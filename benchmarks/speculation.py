"""What speculative decoding saves and costs: `python -m benchmarks.speculation`.

Three questions. How many passes does n-gram lookup save where answers are copied from their prompts? How much faster is
one request, with either proposer? And what do drafts cost a full batch when all of them are wrong?

The answers of `workloads.copying` are written by hand, so an engine has to be told its tokens. For the counts, there is
no model. For the times, GPT-2 124M computes every pass, and its tokens are replaced. Engines that are compared take
turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm.auto import tqdm

from helpers import Engine, EngineConfig, SamplingParams, load_model, workloads
from helpers.engine import Chunk, EngineCore, Plan, Runner, RunnerOutput, SampledToken, accept_drafts
from helpers.models import EMBEDDED
from helpers.simulator import Simulator

from .machine import processor
from .models import find_model

ROUNDS, ROWS, OUTPUT_TOKENS = 7, 16, 64


class AlwaysWrong:
    """Proposes the same token over and over, which the models here do not generate."""

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


class Script:
    """The prompts and answers of `workloads.copying` as token ids."""

    def __init__(self, tokenizer):
        self.prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in workloads.copying()]
        answers = [tokenizer(answer)["input_ids"] for _, answer in workloads.copying()]
        self.texts = [prompt + answer for prompt, answer in zip(self.prompts, answers, strict=True)]
        self.params = [SamplingParams(len(answer), ignore_eos=True) for answer in answers]

    def next_token(self, token_ids: list[int]) -> int:
        """Return what follows a prompt and a part of its answer."""
        return next(text for text in self.texts if text[: len(token_ids)] == token_ids)[len(token_ids)]

    def generate(self, engine: EngineCore) -> None:
        """Generate the answers one after another."""
        for prompt, params in zip(self.prompts, self.params, strict=True):
            engine.generate([prompt], params)


def count_copies(script: Script, drafts: int) -> Counts:
    """Count what one row takes to generate the answers, with at most this many drafts per pass."""
    config = EngineConfig(max_batch_size=1, speculative="ngram" if drafts else None, num_speculative_tokens=drafts or 1)
    engine = Simulator(config, next_token=script.next_token)
    script.generate(engine)
    trace = engine.trace
    decodes = sum(row.work == "decode" for one in trace.passes for row in one.row_steps)
    return Counts(trace.output_tokens - len(script.texts), decodes, trace.drafted_tokens, trace.accepted_tokens)


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


class ScriptedRunner:
    """A `Runner` that computes what another one computes, and then replaces the tokens by those of a script."""

    not_ragged_because = None

    def __init__(self, inner: Runner, script: Script):
        self.name, self.inner, self.script = inner.name, inner, script
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size

    def run(self, plan: Plan, clock) -> RunnerOutput:
        """Run a plan and replace its tokens."""
        output = self.inner.run(plan, clock)
        for done in output.passes:
            done.sampled.update({chunk.sequence: self._sample(chunk) for chunk in done.chunks if chunk.samples_token})
        return output

    def _sample(self, chunk: Chunk) -> list[SampledToken]:
        token_ids, drafts = chunk.sequence.token_ids, chunk.draft_token_ids
        return accept_drafts(drafts, lambda n: SampledToken(self.script.next_token(token_ids + drafts[:n])))


def copies(model, tokenizer, script: Script, rounds: int) -> dict[str, float]:
    """Time the answers, one row; return milliseconds per token without drafts and with n-gram lookup."""
    engines = {}
    for speculative in (None, "ngram"):
        config = EngineConfig(max_batch_size=1, speculative=speculative)
        engine = engines[str(speculative)] = Engine(model, tokenizer, config)
        engine.runner = ScriptedRunner(engine.runner, script)
    seconds = take_turns(engines, script.generate, rounds)
    tokens = sum(params.max_tokens for params in script.params)
    return {name: 1000 * statistics.median(times) / tokens for name, times in seconds.items()}


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
    assert trace.accepted_tokens == 0
    return none, drafts, trace.drafted_tokens, trace.output_tokens


# --- the report -------------------------------------------------------------------------------------------------------


def report(rounds: int, timed: bool = True) -> str:
    """Return the answers as Markdown."""
    model, tokenizer = load_model(EMBEDDED)
    script = Script(tokenizer)
    lines = ["Answers that are copied from their prompts, one row, decodes only:", ""]
    lines += [
        "| drafts per pass, at most | tokens | passes | tokens per pass | drafts | accepted |",
        "| --- " * 6 + "|",
    ]
    for drafts in (0, 2, 4, 8):
        one = count_copies(script, drafts)
        share = f"{one.accepted / one.drafted:.0%}" if one.drafted else ""
        lines.append(
            f"| {drafts} | {one.tokens} | {one.passes} | {one.tokens / one.passes:.2f} | {one.drafted} | {share} |"
        )
    if not timed:
        return "\n".join(lines)
    large, its_tokenizer = load_model(find_model("gpt2").folder)
    times = copies(large, its_tokenizer, script, rounds)
    lines += ["", f"Processor: {processor()}. Medians of {rounds} rounds. One request at a time:", ""]
    lines += [
        "| model, text | proposer | ms per token | times faster | tokens per pass | accepted |",
        "| --- " * 6 + "|",
    ]
    for name, milliseconds in times.items():
        one = count_copies(script, 4 if name == "ngram" else 0)
        counted = f"{one.tokens / one.passes:.2f} | {one.accepted / max(one.drafted, 1):.0%}"
        faster = times["None"] / milliseconds
        lines.append(f"| GPT-2 124M, copied answers | {name} | {milliseconds:.2f} | {faster:.2f} | {counted} |")
    rows = one_request(model, tokenizer, [None, "ngram", "draft"], rounds)
    for name, (milliseconds, per_pass, acceptance) in rows.items():
        faster = rows["None"][0] / milliseconds
        counted = f"{per_pass:.2f} | {acceptance:.0%}"
        lines.append(f"| embedded, stories | {name} | {milliseconds:.2f} | {faster:.2f} | {counted} |")
    models = {"GPT-2 124M": (large, its_tokenizer), "embedded": (model, tokenizer)}
    lines += ["", f"{ROWS} rows, every draft wrong:", ""]
    lines += ["| model | ms per iteration | with drafts | loss | drafts per token |", "| --- " * 5 + "|"]
    for name, pair in models.items():
        none, drafts, drafted, tokens = full_batch(*pair, rounds)
        lines.append(f"| {name} | {none:.2f} | {drafts:.2f} | {drafts / none - 1:.1%} | {drafted / tokens:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measured rounds (default {ROUNDS})")
    parser.add_argument("--count-only", action="store_true", help="count passes and time nothing")
    options = parser.parse_args()
    print(report(options.rounds, timed=not options.count_only))
