"""What speculative decoding saves and costs: `python -m benchmarks.speculation`.

Three questions. How many passes does n-gram lookup save where answers are copied from their prompts? How much faster is
one request, with either proposer? And what do drafts cost a full batch when all of them are wrong?

The answers in `copying.py` are written by hand, so an engine has to be told its tokens. For the counts, there is
no model. For the times, GPT-2 124M computes every pass, and its tokens are replaced. Engines that are compared take
turns.
"""

import statistics
from dataclasses import dataclass

import cyclopts

from helpers import Engine, EngineConfig, SamplingParams, load_model, workloads
from helpers.engine import Chunk, EngineCore, SampledToken
from helpers.models import EMBEDDED
from helpers.simulator import Simulator

from .copying import copying
from .in_turns import TokenReplacingRunner, measured_on, seconds, small_and_large, table, take_turns

ROWS, OUTPUT_TOKENS = 16, 64


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

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def acceptance(self) -> float:
        """The accepted share of the drafts, from 0 to 1."""
        return self.accepted / max(self.drafted, 1)


class Script:
    """The prompts and answers in `copying.py` as token ids."""

    def __init__(self, tokenizer):
        self.prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in copying()]
        answers = [tokenizer(answer)["input_ids"] for _, answer in copying()]
        self.texts = [prompt + answer for prompt, answer in zip(self.prompts, answers, strict=True)]
        self.params = [SamplingParams(len(answer), ignore_eos=True) for answer in answers]

    def next_token(self, token_ids: list[int]) -> int:
        """Return what follows a prompt and a part of its answer."""
        return next(text for text in self.texts if text[: len(token_ids)] == token_ids)[len(token_ids)]

    def sample(self, chunk: Chunk) -> list[SampledToken]:
        """Return what follows a chunk: the drafts that the script confirms, and the token after them."""
        token_ids, sampled = list(chunk.sequence.token_ids), []
        for draft_token_id in [*chunk.draft_token_ids, None]:
            sampled.append(SampledToken(self.next_token(token_ids)))
            if sampled[-1].token_id != draft_token_id:
                break
            token_ids.append(draft_token_id)
        return sampled

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
    decodes = sum(step.work == "decode" for traced in trace.passes for step in traced.row_steps)
    return Counts(trace.output_tokens - len(script.texts), decodes, trace.drafted_tokens, trace.accepted_tokens)


# --- timed ------------------------------------------------------------------------------------------------------------


def copies(model, tokenizer, script: Script, rounds: int) -> dict[str, float]:
    """Time the answers, one row; return milliseconds per token without drafts and with n-gram lookup."""
    engines = {}
    for speculative in (None, "ngram"):
        config = EngineConfig(max_batch_size=1, speculative=speculative)
        engine = engines[str(speculative)] = Engine(model, tokenizer, config)
        engine.runner = TokenReplacingRunner(engine.runner, script.sample)
    tokens = sum(params.max_tokens for params in script.params)
    return median_milliseconds(engines, script.generate, rounds, tokens)


def median_milliseconds(engines: dict[str, Engine], run, rounds: int, parts: int) -> dict[str, float]:
    """Time `run` with each engine in turn; return the median milliseconds of one of its parts."""
    runs = {name: lambda engine=engine: seconds(lambda: run(engine)) for name, engine in engines.items()}
    times = take_turns(runs, rounds)
    return {name: 1000 * statistics.median(times[name]) / parts for name in engines}


def one_request(model, tokenizer, proposers: list, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Time stories of one row; return milliseconds per token, tokens per pass and acceptance for each proposer."""
    engines = {
        str(name): Engine(model, tokenizer, EngineConfig(max_batch_size=1, speculative=name, prefix_caching=False))
        for name in proposers
    }
    prompts = [request.prompt for request in workloads.race(6)]
    tokens: dict[Engine, list] = {}

    def run(engine: Engine) -> None:
        tokens[engine] = [engine.generate([prompt], SamplingParams(128))[0].token_ids for prompt in prompts]

    run(engines[str(proposers[0])])
    expected = next(iter(tokens.values()))
    times = median_milliseconds(engines, run, rounds, sum(map(len, expected)))
    assert all(token_ids == expected for token_ids in tokens.values()), "the tokens differ"
    return {
        name: (times[name], engine.trace.output_tokens / engine.trace.forward_passes, engine.trace.acceptance or 0.0)
        for name, engine in engines.items()
    }


def full_batch(model, tokenizer, rounds: int) -> tuple[float, float, float]:
    """Time full batches with wrong drafts and without drafts.

    Returns:
        Milliseconds per iteration without and with drafts, and the drafts per output token.
    """
    wrong = AlwaysWrong(len(tokenizer) - 1)
    engines = {
        "none": Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS)),
        "wrong": Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS, speculative=wrong)),
    }
    prompts = [request.prompt for request in workloads.race(ROWS)]

    def run(engine: Engine) -> None:
        engine.generate(prompts, SamplingParams(OUTPUT_TOKENS, ignore_eos=True))

    times = median_milliseconds(engines, run, rounds, OUTPUT_TOKENS)
    trace = engines["wrong"].trace
    assert trace.accepted_tokens == 0
    return times["none"], times["wrong"], trace.drafted_tokens / trace.output_tokens


# --- the report -------------------------------------------------------------------------------------------------------


def counted_table(script: Script) -> str:
    """Return what the answers take with up to 8 drafts per pass, as Markdown."""
    header = ["drafts per pass, at most", "tokens", "passes", "tokens per pass", "drafts", "accepted"]
    rows = []
    for drafts in (0, 2, 4, 8):
        counts = count_copies(script, drafts)
        share = f"{counts.acceptance:.0%}" if counts.drafted else ""
        rows.append([drafts, counts.tokens, counts.passes, f"{counts.tokens_per_pass:.2f}", counts.drafted, share])
    return table(header, rows)


def single_rows_table(models: dict[str, tuple], script: Script, rounds: int) -> str:
    """Return the times of one request at a time, as Markdown."""
    rows = []

    def add(text: str, name: str, milliseconds: float, without: float, per_pass: float, acceptance: float) -> None:
        cells = f"{milliseconds:.2f}", f"{without / milliseconds:.2f}", f"{per_pass:.2f}", f"{acceptance:.0%}"
        rows.append([text, name, *cells])

    times = copies(*models["GPT-2 124M"], script, rounds)
    for name, milliseconds in times.items():
        counts = count_copies(script, 4 if name == "ngram" else 0)
        saved = counts.tokens_per_pass, counts.acceptance
        add("GPT-2 124M, copied answers", name, milliseconds, times["None"], *saved)
    stories = one_request(*models["embedded model"], [None, "ngram", "draft"], rounds)
    for name, (milliseconds, *saved) in stories.items():
        add("embedded model, stories", name, milliseconds, stories["None"][0], *saved)
    return table(["model, text", "proposer", "ms per token", "times faster", "tokens per pass", "accepted"], rows)


def full_batches_table(models: dict[str, tuple], rounds: int) -> str:
    """Return what wrong drafts cost full batches, as Markdown."""
    rows = []
    for name, pair in models.items():
        without, wrong, per_token = full_batch(*pair, rounds)
        rows.append([name, f"{without:.2f}", f"{wrong:.2f}", f"{wrong / without - 1:.1%}", f"{per_token:.1%}"])
    return table(["model", "ms per iteration", "with drafts", "loss", "drafts per token"], rows)


def main(*, rounds: int = 7, count_only: bool = False) -> None:
    """Measure what speculative decoding saves and costs.

    Args:
        rounds: how often each engine is measured.
        count_only: count passes and time nothing.
    """
    script = Script(load_model(EMBEDDED)[1])
    print(f"Answers that are copied from their prompts, one row, decodes only:\n\n{counted_table(script)}")
    if not count_only:
        models = small_and_large()
        print(f"\n{measured_on()} Medians of {rounds} rounds. One request at a time:\n")
        print(single_rows_table(models, script, rounds))
        print(f"\n{ROWS} rows, every draft wrong:\n\n{full_batches_table(models, rounds)}")


if __name__ == "__main__":
    cyclopts.run(main)
