"""Time iterations of an engine, with plans that are chosen rather than waited for.

A fit needs iterations with few rows and many, short contexts and long ones, decodes alone and beside prompts. Traffic
would take long to produce them all. Here, most iterations before the one in question are planned but not computed: the
values of keys do not change how long it takes to read them. Only one decode of the same contexts is computed. Without
it, the timed iteration would find less in the processor's caches than an iteration that follows others.

Each situation is timed in several rounds through all of them. So a disturbance affects one round of many situations,
and hardly changes the medians.
"""

import itertools
import math
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from ..engine import EngineConfig, EngineCore, Plan, Runner, RunnerOutput, SamplingParams, Scheduler
from ..engine.runner import Clock
from .cost_model import features
from .simulator import SimulatedRunner

Counts = tuple[float, ...]  # of a plan, in the order of FEATURES


class _Recording(Scheduler):
    """The engine's scheduler, which keeps its last plan."""

    plan: Plan

    def schedule(self) -> Plan:
        self.plan = super().schedule()
        return self.plan


def recording(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose engine can be timed: it keeps its plans, and no prompt finds cached blocks."""
    return replace(config, scheduler_cls=_Recording, prefix_caching=False, speculative=None, trace_length=1)


def timed_step(engine: EngineCore) -> tuple[Counts, float, list]:
    """Run an iteration of an engine with a `recording` configuration; return its counts, seconds and outputs."""
    start = time.perf_counter()
    outputs = engine.step()
    seconds = time.perf_counter() - start
    return features(engine.scheduler.plan), seconds, outputs


def add(engine: EngineCore, prompt: list[int], output_tokens: int) -> int:
    """Add a request that generates exactly this many tokens; return its id."""
    return engine.add_request(prompt, SamplingParams(output_tokens, ignore_eos=True))


@dataclass(frozen=True)
class Situation:
    """What leads to the iteration that is timed.

    Attributes:
        contexts: the prompt lengths of the sequences that decode.
        prompts: the lengths of the prompts that arrive once all of those decode.
        earlier: how many iterations compute parts of these prompts before the timed one.
    """

    contexts: tuple[int, ...]
    prompts: tuple[int, ...] = ()
    earlier: int = 0


def draw_situations(number: int, rows: int, budget: int, context: int, seed: int = 0) -> Iterator[Situation]:
    """Yield situations, every other one without prompts: few rows and many, all lengths of contexts and prompts.

    Args:
        number: how many.
        rows, budget: the engine's rows and its tokens per iteration.
        context: the most tokens of a request.
        seed: of all choices.
    """
    draw, longest = random.Random(seed), max(1, context * 3 // 4)
    for place in range(number):
        new = draw.choice([1, 1, 2, 3]) if place % 2 else 0
        prompts = tuple(round(longest ** draw.random()) for _ in range(min(new, rows)))
        decodes = draw.randint(0, rows - len(prompts)) if prompts else 1 + place // 2 % rows
        level = longest * draw.choice([0.02, 0.1, 0.3, 0.7])
        contexts = tuple(max(1, round(level * draw.uniform(0.6, 1.4))) for _ in range(decodes))
        iterations = math.ceil(sum(prompts) / max(1, budget - decodes))
        earlier = min(iterations, context - max(contexts, default=0) - 3)  # each adds a token to every context
        yield Situation(contexts, prompts, draw.randrange(max(1, earlier)))


def time_rounds(engine: EngineCore, situations: Seq[Situation], rounds: int = 3) -> list[tuple[Counts, list[float]]]:
    """Return, for each situation, the counts of its iteration and the seconds in each round.

    Args:
        engine: made with a `recording` configuration, without requests.
        situations: what to time.
        rounds: how often each is timed, after a round that warms up.
    """
    runner, timed = engine.runner, [[] for _ in situations]
    engine.runner = _Skipping(runner)
    try:
        _touch_memory(engine)
        for _ in tqdm(range(1 + rounds), unit="round", leave=False, disable=None):
            for times, situation in zip(timed, situations, strict=True):
                times.append(_time(engine, situation))
    finally:
        engine.runner = runner
    return [(times[0][0], [seconds for _, seconds in times[1:]]) for times in timed]


def _time(engine: EngineCore, situation: Situation) -> tuple[Counts, float]:
    """Bring the engine into a situation, time one iteration, and abort all requests."""
    scheduler, budget = engine.scheduler, engine.scheduler.max_tokens_per_step
    engine.runner.skips = True
    for length in situation.contexts:
        add(engine, [0] * length, 3 + situation.earlier)
    scheduler.max_tokens_per_step = budget + sum(situation.contexts)
    engine.step()
    scheduler.max_tokens_per_step = budget
    engine.runner.skips = False
    engine.step()
    engine.runner.skips = True
    for length in situation.prompts:
        add(engine, [0] * length, 2)
    for _ in range(situation.earlier):
        engine.step()
    engine.runner.skips = False
    counts, seconds, _ = timed_step(engine)
    for request_id in list(scheduler.requests):
        engine.abort_request(request_id)
    engine.step()
    return counts, seconds


class _Skipping:
    """A runner that can skip iterations: it then computes nothing, and every new token is the same.

    Only a runner whose memory is a pool of blocks can do that. A padded one needs the results of earlier iterations.
    """

    def __init__(self, runner: Runner):
        self.runner, self.skips = runner, False
        self.pool = getattr(runner, "pool", None)
        self._skipped = SimulatedRunner()

    def __getattr__(self, name: str):
        return getattr(self.runner, name)

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        return (self._skipped if self.skips and self.pool is not None else self.runner).run(plan, clock)


def _touch_memory(engine: EngineCore) -> None:
    """Write to all blocks: memory that has never been written to is read faster."""
    add(engine, [0], 1)
    engine.step()
    if engine.runner.pool is not None:
        with torch.inference_mode():
            for tensor in itertools.chain.from_iterable(engine.runner.pool.layers.values()):
                tensor.fill_(0.5)
