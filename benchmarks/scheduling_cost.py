"""What an iteration costs besides its forward pass: `python -m benchmarks.scheduling_cost`.

The claim: an iteration costs what its rows cost, however many requests wait and however many blocks there are. Engines
that differ only in the length of the queue, or in the number of blocks, take turns. Each is measured with the embedded
model, and without a model, where a difference of microseconds is not hidden in the noise of a forward pass.
"""

import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cyclopts

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.base_engine import BaseEngine
from helpers.engine import (
    POLICIES,
    Chunk,
    EngineCore,
    ForwardPass,
    ModelInfo,
    Plan,
    RunnerOutput,
    SampledToken,
)
from helpers.engine import Sequence as EngineSequence
from helpers.models import EMBEDDED

from .in_turns import TokenReplacingRunner, iteration_times, measured_on, random_prompts, table, take_turns

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 16, 16
MAX_TOKENS, PRIORITIES = range(OUTPUT_TOKENS + 1, 129), range(10)  # what requests ask for; all outputs end sooner
MANY_WAITING, FEW_BLOCKS, MANY_BLOCKS = 10_000, 1_000, 100_000


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


class NoModel:
    """A runner that computes nothing."""

    name, not_ragged_because = "no model", None

    def __init__(self, case: Case):
        self.num_blocks, self.block_size = case.num_blocks, case.block_size

    def run(self, plan: Plan, clock) -> RunnerOutput:
        """Return a pass without tokens."""
        return RunnerOutput([ForwardPass(plan.chunks, [0] * len(plan.chunks), {}, clock(), 0.0)])


def make_engine(case: Case, model, tokenizer) -> EngineCore:
    """Return an engine whose outputs all end after `OUTPUT_TOKENS` tokens; one without a model if that is None."""
    config = EngineConfig(
        max_batch_size=ROWS,
        policy=case.policy,
        num_blocks=case.num_blocks,
        block_size=case.block_size,
        trace_length=100,
    )
    eos = tokenizer.eos_token_id

    def next_token(chunk: Chunk) -> list[SampledToken]:
        return [SampledToken(eos if chunk.sequence.generated + 1 == OUTPUT_TOKENS else 1)]

    if model is None:
        info = ModelInfo(len(tokenizer), eos_token_ids=frozenset([eos]))
        engine = BaseEngine(NoModel(case), tokenizer, info, config)
    else:
        engine = Engine(model, tokenizer, config)
    engine.runner = TokenReplacingRunner(engine.runner, next_token)
    return engine


def batches(case: Case, model, tokenizer) -> Callable[[], list[float]]:
    """Return a function that serves a full batch while the queue keeps its length.

    It returns the milliseconds of `OUTPUT_TOKENS` iterations, of which the first admits a request into every row.
    """
    engine, prompts, draw = (
        make_engine(case, model, tokenizer),
        random_prompts(len(tokenizer), PROMPT_TOKENS),
        random.Random(0),
    )

    def add(count: int) -> None:
        for _ in range(count):
            params = SamplingParams(max_tokens=draw.choice(MAX_TOKENS))
            priority = draw.choice(PRIORITIES) if case.policy == "priority" else 0
            engine.add_request(next(prompts), params, priority=priority)

    def serve() -> list[float]:
        add(ROWS)
        milliseconds = iteration_times(engine, OUTPUT_TOKENS)
        assert (engine.num_running, engine.num_waiting) == (0, case.waiting)
        return milliseconds

    add(case.waiting)
    if case.cached:
        fill_cache(engine)
    return serve


def fill_cache(engine: EngineCore) -> None:
    """Allocate all blocks to a long prompt that nothing else begins like, and free them: they stay cached."""
    manager = engine.block_manager
    tokens = manager.num_blocks * manager.block_size
    sequence = EngineSequence("earlier", [0] * tokens, 1)
    manager.allocate(sequence, tokens)
    sequence.computed = tokens
    manager.free(sequence)
    assert manager.cached == manager.num_blocks


def measure(model, tokenizer, cases: Sequence[Case] = CASES, rounds: int = 9) -> dict[Case, list[list[float]]]:
    """Return the milliseconds of each case's batches, iteration by iteration; the cases take turns."""
    runs = {case: batches(case, model, tokenizer) for case in cases}
    gc.collect()
    gc.freeze()  # otherwise every collection visits the queues of all the other engines
    times = take_turns(runs, rounds, warm_up=2)
    gc.unfreeze()
    return times


def report(results: dict[str, dict[Case, list[list[float]]]]) -> str:
    """Return the medians as a Markdown table, from the results with and without a model."""
    columns = []
    for times in results.values():
        decodes = [[milliseconds for batch in batches for milliseconds in batch[1:]] for batches in times.values()]
        admits = [[batch[0] for batch in batches] for batches in times.values()]
        columns += [list(map(statistics.median, decodes)), list(map(statistics.median, admits))]
    header = ["", *(f"{name}, {kind}" for name in results for kind in ("decode", "admit"))]
    rows = [
        [case, *(f"{column[number]:.3f}" for column in columns)]
        for number, case in enumerate(next(iter(results.values())))
    ]
    return (
        f"{measured_on()} Milliseconds per iteration of {ROWS} rows (medians). decode: every row decodes. admit: every "
        f"row admits a request and prefills its {PROMPT_TOKENS} tokens.\n\n{table(header, rows)}"
    )


def main(*, rounds: int = 9) -> None:
    """Measure what an iteration costs besides its forward pass.

    Args:
        rounds: how many batches of each case are measured.
    """
    model, tokenizer = load_model(EMBEDDED)
    models = {"no model": None, "embedded model": model}
    print(report({name: measure(model, tokenizer, rounds=rounds) for name, model in models.items()}))


if __name__ == "__main__":
    cyclopts.run(main)
