"""One rate after the other, from idle to overloaded, and the knee between the two.

The knee is the rate of the greatest *power*, which is throughput divided by latency: completed requests a second, over
the median end-to-end latency (Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
communications", 1979). Below the knee a percent more throughput costs less than a percent of latency; beyond it, more.
It needs no threshold that somebody would have to choose. Around the knee power is nearly flat, so two sweeps may well
disagree by one step of the grid.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..batching import Request
from .client import Prompt
from .load import run_load
from .report import LoadResult

Requests = Sequence[Request | tuple[Prompt, int]]


def sweep(url: str, rates: Sequence[float] | None, requests: Callable[[int], Requests], **settings) -> list[LoadResult]:
    """A load test for each rate, in order.

    Args:
        url: the server's.
        rates: requests a second. None takes seven, from a quarter of the server's `capacity` to twice as much.
        requests: gives those of the test with this number. With prompts that were seen before, a server that keeps
            their beginnings would look faster from rate to rate: make new ones, of equal lengths. And make enough:
            overload shows only in a test that lasts several times as long as an answer.
        settings: see `run_load`.

    Raises:
        ConnectionError, PermissionError, ValueError: see `run_load` and `capacity`.
    """
    if rates is None:
        rates = np.geomspace(1 / 4, 2, 7) * capacity(url, requests, **settings)
    return [run_load(url, requests(number), float(rate), **settings) for number, rate in enumerate(sorted(rates))]


def capacity(url: str, requests: Callable[[int], Requests], **settings) -> float:
    """Requests a second that the server completes when it always has enough to do.

    Measured in closed loops with 4, 8, 16, ... users, until twice as many bring less than a tenth more, or refusals.

    Raises:
        ValueError: no request was answered.
    """
    settings = {name: value for name, value in settings.items() if name not in ("cv", "seed")}
    best, users = 0.0, 4
    while True:
        result = run_load(url, requests(100 + users), users=users, **settings)  # none that the sweep has, too
        before, best = best, max(best, result.request_throughput)
        if not best:
            raise ValueError(f"No request was answered, so there is no capacity: {result.answers[0].error}")
        if best < 1.1 * before or result.with_status("refused") or users >= len(result.answers):
            return best
        users *= 2


def power(result: LoadResult) -> float:
    """Completed requests a second, divided by the median latency; 0 if none was completed."""
    return result.request_throughput / result.percentile("e2e", 50) if result.ok else 0.0


def knee(results: Sequence[LoadResult]) -> LoadResult:
    """The result of the greatest power.

    Raises:
        ValueError: no request of any result was answered.
    """
    if not any(result.ok for result in results):
        raise ValueError("There is no knee where no request was answered.")
    return max(results, key=power)


def table(results: Sequence[LoadResult]) -> str:
    """A line for each rate, with the knee marked."""
    heads = ["offered/s", "done/s", "tokens/s", "good/s", "TTFT p50", "p99", "E2E p50", "p99 (ms)", "refused", "failed"]
    lines = ["".join(f"{head:>11}" for head in heads)]
    for result in results:
        latencies = [result.percentile(name, percent) for name in ("ttft", "e2e") for percent in (50, 99)]
        speeds = result.rate, result.request_throughput, result.output_throughput, result.goodput
        counts = result.counts["refused"], result.counts["failed"]
        shown = [f"{speed:.4g}" for speed in speeds]
        shown += ["-" if value is None else f"{1000 * value:.1f}" for value in latencies]
        line = "".join(f"{value:>11}" for value in [*shown, *counts])
        lines.append(line + "  <- knee" * (any(one.ok for one in results) and result is knee(results)))
    return "\n".join(lines)
