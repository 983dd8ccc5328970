"""A replica in simulated time: the engine's scheduler on the simulator's runner, which computes nothing.

A `Simulator` also keeps texts, outputs and a trace, which take most of its time and are not needed here. The plans are
the same.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from helpers.engine import EngineConfig, Plan, Scheduler, Sequence
from helpers.metrics import RequestMetrics
from helpers.simulator import SimulatedRunner

NO_LIMIT = 10**9  # tokens per iteration


@dataclass(frozen=True)
class Figure:
    """One line of the table: what was published, what is counted here, and why the two differ."""

    quantity: str
    published: str
    ours: str
    why: str


def make_sequences(prompts: Seq[int], outputs: Seq[int], arrivals: Seq[float] | None = None) -> list[Sequence]:
    """Make a sequence for each request.

    Args:
        prompts, outputs: lengths in tokens.
        arrivals: times in seconds, in ascending order; all 0 if omitted.
    """
    arrivals = [0.0] * len(prompts) if arrivals is None else arrivals
    requests = zip(prompts, outputs, arrivals, strict=True)
    return [
        Sequence(number, [0] * prompt, output, arrival=arrival)
        for number, (prompt, output, arrival) in enumerate(requests)
    ]


def run(
    sequences: Seq[Sequence], scheduler: Scheduler | EngineConfig, seconds: Callable[[Plan], float] = lambda plan: 1.0
) -> Iterator[Plan]:
    """Run sequences to their end, and yield the plan of each iteration once its results are applied.

    Args:
        sequences: in order of arrival. Afterwards, their `token_times` are complete.
        scheduler: plans the iterations; a config stands for the engine's scheduler with unlimited memory.
        seconds: returns the simulated seconds of an iteration; 1 by default, so that times count iterations.
    """
    scheduler = Scheduler(scheduler) if isinstance(scheduler, EngineConfig) else scheduler
    runner, arriving = SimulatedRunner(seconds=seconds), deque(sequences)
    while arriving or scheduler.unfinished:
        if not scheduler.unfinished:
            runner.time = max(runner.time, arriving[0].request.arrival)
        while arriving and arriving[0].request.arrival <= runner.time:
            scheduler.add(arriving.popleft())
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan, lambda: runner.time))
        yield plan


def serve(sequences: Seq[Sequence], *arguments) -> list[RequestMetrics]:
    """Run sequences as `run` does, and return the metrics of each."""
    for _ in run(sequences, *arguments):
        pass
    return [
        RequestMetrics(sequence.request_id, sequence.request.arrival, sequence.token_times) for sequence in sequences
    ]


def poisson(count: int, rate: float, seed: int = 0) -> list[float]:
    """Return arrival times of a Poisson process, scaled so that the mean gap is exactly 1 / rate."""
    draw, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(1))
    scale = (count - 1) / rate / times[-1]
    return [scale * time for time in times]


def highest_rate(is_met: Callable[[float], bool], low: float, high: float, halvings: int = 6) -> float:
    """Return the highest rate that meets a limit, by bisection between a low rate and a high one, in equal ratios."""
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low
