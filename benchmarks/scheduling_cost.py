"""What an iteration costs besides its forward pass: `python -m benchmarks.scheduling_cost`.

The claim: an iteration costs what its rows cost, however many requests wait and however many blocks there are. Engines
that differ only in the length of the queue, or in the number of blocks, take turns. Each is measured with the embedded
model, and without a model, where a difference of microseconds is not hidden in the noise of a forward pass.
"""

import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.engine import (
    POLICIES,
    EngineCore,
    ForwardPass,
    ModelInfo,
    Plan,
    Runner,
    RunnerOutput,
    SampledToken,
    Sequence,
)
from helpers.models import EMBEDDED

from .machine import processor

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 16
MAX_TOKENS, PRIORITIES = range(OUTPUT_TOKENS + 1, 129), range(10)  # what requests ask for; all outputs end sooner
MANY_WAITING, FEW_BLOCKS, MANY_BLOCKS = 10_000, 1_000, 100_000
WARM_UP, ROUNDS = 2, 9


@dataclass(frozen=True)
class Case:
    """What two measurements may differ in.

    Attributes:
        policy: a name in `POLICIES`.
        waiting: how many requests remain in the queue once all rows are taken.
        num_blocks, block_size: the KV cache.
        cached: whether earlier prompts fill all blocks, so that every allocation evicts one.
    """

    policy: str = "fcfs"
    waiting: int = 0
    num_blocks: int = FEW_BLOCKS
    block_size: int = 16
    cached: bool = False

    def __str__(self) -> str:
        if self.cached:
            return f"{self.num_blocks:,} blocks, all cached"
        return f"{self.policy}, {self.waiting:,} waiting"


# With one token per block, every row needs a new block in every iteration.
CASES = [Case(policy, waiting) for policy in POLICIES for waiting in (0, MANY_WAITING)]
CASES += [Case(num_blocks=count, block_size=1, cached=True) for count in (FEW_BLOCKS, MANY_BLOCKS)]


class FixedLengthRunner:
    """Ends every output after `OUTPUT_TOKENS` tokens, so that all rows of all engines begin and end together.

    Args:
        inner: the runner that computes the plans; None computes nothing, and every token is token 1.
        eos: the token that ends an output.
        case: the blocks.
    """

    name, not_ragged_because = "fixed length", None

    def __init__(self, inner: Runner | None, eos: int, case: Case):
        self.inner, self.eos = inner, eos
        self.num_blocks, self.block_size = case.num_blocks, case.block_size

    def run(self, plan: Plan, clock) -> RunnerOutput:
        """Run a plan, and replace the sampled tokens."""
        sampled = {chunk.sequence: self._token(chunk.sequence) for chunk in plan.chunks}
        if self.inner is None:
            return RunnerOutput([ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, clock(), 0.0)])
        output = self.inner.run(plan, clock)
        for done in output.passes:
            done.sampled.update(sampled)
        return output

    def _token(self, sequence: Sequence) -> list[SampledToken]:
        return [SampledToken(self.eos if sequence.generated + 1 == OUTPUT_TOKENS else 1)]


@dataclass
class Measurement:
    """Milliseconds of single iterations.

    Attributes:
        admit: iterations that admit a request into every row.
        decode: iterations in which every row decodes.
    """

    admit: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


class Bench:
    """An engine that serves one full batch after another from a queue of constant length.

    Args:
        case: what is measured.
        model: None for a runner that computes nothing.
        tokenizer: the model's, which is needed for text in both cases.
    """

    def __init__(self, case: Case, model, tokenizer):
        config = EngineConfig(
            max_batch_size=ROWS,
            policy=case.policy,
            num_blocks=case.num_blocks,
            block_size=case.block_size,
            trace_length=100,
        )
        eos = tokenizer.eos_token_id
        if model is None:
            info = ModelInfo(len(tokenizer), eos_token_ids=frozenset([eos]))
            self.engine = EngineCore(FixedLengthRunner(None, eos, case), tokenizer, info, config)
        else:
            self.engine = Engine(model, tokenizer, config)
            self.engine.runner = FixedLengthRunner(self.engine.runner, eos, case)
        self.case, self.measurement = case, Measurement()
        self._requests = _requests(len(tokenizer), case.policy == "priority")
        self._add(case.waiting)
        if case.cached:
            _fill_cache(self.engine)

    def round(self, record: bool) -> None:
        """Serve one batch: `OUTPUT_TOKENS` iterations, of which the first admits a request into every row."""
        self._add(ROWS)
        milliseconds = []
        for _ in range(OUTPUT_TOKENS):
            start = time.perf_counter()
            self.engine.step()
            milliseconds.append(1000 * (time.perf_counter() - start))
        assert (self.engine.num_running, self.engine.num_waiting) == (0, self.case.waiting)
        if record:
            self.measurement.admit.append(milliseconds[0])
            self.measurement.decode += milliseconds[1:]

    def _add(self, count: int) -> None:
        for prompt, params, priority in itertools.islice(self._requests, count):
            self.engine.add_request(prompt, params, priority=priority)


def _requests(vocabulary: int, with_priorities: bool) -> Iterator[tuple[list[int], SamplingParams, int]]:
    draw = random.Random(0)
    while True:
        prompt = [draw.randrange(1, vocabulary) for _ in range(PROMPT_TOKENS)]
        priority = draw.choice(PRIORITIES) if with_priorities else 0
        yield prompt, SamplingParams(max_tokens=draw.choice(MAX_TOKENS)), priority


def _fill_cache(engine: EngineCore) -> None:
    """Allocate all blocks to a long prompt that nothing else begins like, and free them: they stay cached."""
    manager = engine.block_manager
    tokens = manager.num_blocks * manager.block_size
    sequence = Sequence("earlier", [0] * tokens, 1)
    manager.allocate(sequence, tokens)
    sequence.computed = tokens
    manager.free(sequence)
    assert manager.cached == manager.num_blocks


def measure(model, tokenizer, cases: list[Case] = CASES, rounds: int = ROUNDS) -> dict[str, dict[Case, Measurement]]:
    """Measure every case without the model and with it; the cases take turns, round by round."""
    results = {}
    for name, one in (("no model", None), ("embedded model", model)):
        benches = [Bench(case, one, tokenizer) for case in cases]
        gc.collect()
        gc.freeze()  # otherwise every collection visits the queues of all the other engines
        for number in tqdm(range(WARM_UP + rounds), desc=name, unit="round", leave=False):
            for bench in benches:
                bench.round(record=number >= WARM_UP)
        gc.unfreeze()
        results[name] = {bench.case: bench.measurement for bench in benches}
    return results


def table(results: dict[str, dict[Case, Measurement]]) -> str:
    """Return the medians as a Markdown table."""
    kinds = [(name, kind) for name in results for kind in ("decode", "admit")]
    lines = [
        f"Processor: {processor()}. Milliseconds per iteration of {ROWS} rows (medians). decode: every row decodes. "
        f"admit: every row admits a request and prefills its {PROMPT_TOKENS} tokens.",
        "",
        "| | " + " | ".join(f"{name}, {kind}" for name, kind in kinds) + " |",
        "| --- |" + " --- |" * len(kinds),
    ]
    for case in next(iter(results.values())):
        medians = [statistics.median(getattr(results[name][case], kind)) for name, kind in kinds]
        lines.append(f"| {case} | " + " | ".join(f"{median:.3f}" for median in medians) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure(*load_model(EMBEDDED))))
