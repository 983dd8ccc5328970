"""A replica in simulated time: the engine's scheduler on the simulator's runner, which computes nothing.

It leaves out the engine's texts, outputs and trace, which take most of the time of a simulation. Its plans are the same.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass

from helpers.engine import EngineConfig, Plan, Scheduler, Sequence
from helpers.metrics import RequestMetrics
from helpers.simulator import SimulatedRunner

NO_LIMIT = 10**9  # tokens per iteration


@dataclass(frozen=True)
class Figure:
    """One line of the table: what a paper published, what this course counts, and why the two differ."""

    quantity: str
    published: str
    ours: str
    why: str


def make_sequences(prompts: Seq[int], outputs: Seq[int], arrivals: Seq[float] | None = None) -> list[Sequence]:
    """Return a sequence for each request; prompts and outputs are lengths in tokens, arrivals are in seconds."""
    arrivals = [0.0] * len(prompts) if arrivals is None else arrivals
    requests = zip(prompts, outputs, arrivals, strict=True)
    return [Sequence(number, [0] * prompt, output, arrival=at) for number, (prompt, output, at) in enumerate(requests)]


def run(
    sequences: Seq[Sequence], scheduler: Scheduler | EngineConfig, seconds: Callable[[Plan], float] = lambda plan: 1.0
) -> Iterator[Plan]:
    """Run sequences to their end, and yield each iteration's plan once it is applied.

    Args:
        sequences: in order of arrival. Afterwards, `token_times` has the time of every token.
        scheduler: plans the iterations; a config stands for the engine's scheduler without a limit on memory.
        seconds: returns the simulated seconds of an iteration; 1 by default, so that times count iterations.
    """
    scheduler = Scheduler(scheduler) if isinstance(scheduler, EngineConfig) else scheduler
    runner, arriving = SimulatedRunner(seconds=seconds), deque(sequences)
    while arriving or scheduler.unfinished:
        if not scheduler.unfinished:
            runner.time = max(runner.time, arriving[0].arrival)
        while arriving and arriving[0].arrival <= runner.time:
            scheduler.add(arriving.popleft())
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan, lambda: runner.time))
        yield plan


def metrics(sequences: Seq[Sequence]) -> list[RequestMetrics]:
    """Return the times of sequences that have run."""
    return [RequestMetrics(one.request_id, one.arrival, one.token_times) for one in sequences]


def poisson(count: int, rate: float, seed: int = 0) -> list[float]:
    """Return the arrival times of a Poisson process, scaled so that the mean gap is exactly 1 / rate."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(1) for _ in range(count)]
    scale = count / rate / sum(gaps)
    return [scale * sum(gaps[:number]) for number in range(count)]


def highest_rate(is_met: Callable[[float], bool], low: float, high: float, halvings: int = 7) -> float:
    """Return the highest rate that meets a limit, by bisection between one that does and one that does not."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
