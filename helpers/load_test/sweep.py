"""A series of load tests at increasing rates, from idle to overloaded, and the knee between the two.

The knee is the rate of the greatest *power*: completed requests per second divided by the median end-to-end latency
(see `helpers.metrics.knee`).
"""

from collections.abc import Callable, Sequence

from ..metrics import knee
from ..request import Request
from .client import Prompt
from .load import run_load
from .report import LoadResult

Requests = Sequence[Request | tuple[Prompt, int]]


def sweep(url: str, rates: Sequence[float] | None, requests: Callable[[int], Requests], **settings) -> list[LoadResult]:
    """Run one load test per rate, in ascending order.

    Args:
        url: the address of the server.
        rates: requests per second. None stands for seven rates, from a quarter of the server's `capacity` to twice it.
        requests: returns the requests of a test, given the number of the test. Each test needs new prompts of the same
            lengths, because repeated prompts would make a server with a prefix cache look faster. It also needs enough
            requests: overload shows only in a test that lasts several times as long as a response.
        settings: see `run_load`.

    Raises:
        ConnectionError, PermissionError, ValueError: see `run_load` and `capacity`.
    """
    if rates is None:
        most = capacity(url, requests, **settings)
        rates = [most * 2 ** (step / 2) for step in range(-4, 3)]
    return [run_load(url, requests(number), float(rate), **settings) for number, rate in enumerate(sorted(rates))]


def capacity(url: str, requests: Callable[[int], Requests], **settings) -> float:
    """Measure the requests per second that the server completes under constant load.

    The load comes from closed loops with 4, 8, 16, ... users. The measurement ends when doubling the number of users
    adds less than a tenth to the throughput, when the server refuses requests, or when there are as many users as
    requests.

    Raises:
        ValueError: no request was completed.
    """
    settings = {name: value for name, value in settings.items() if name not in ("cv", "seed")}
    best, users = 0.0, 4
    while True:
        result = run_load(url, requests(100 + users), users=users, **settings)  # test numbers that no sweep uses
        before, best = best, max(best, result.request_throughput)
        if not best:
            raise ValueError(f"No request was completed, so there is no capacity: {result.requests[0].error}")
        if best < 1.1 * before or result.with_status("refused") or users >= len(result.requests):
            return best
        users *= 2


def knee_of(completed: Sequence[LoadResult]) -> int:
    """Return the index of the result at the knee."""
    return knee([(result.request_throughput, result.percentile("e2e", 50)) for result in completed])


def table(results: Sequence[LoadResult]) -> str:
    """Return a table with one line per rate and a mark at the knee."""
    heads = ["offered/s", "done/s", "tokens/s", "good/s", "TTFT p50", "p99", "E2E p50", "p99 (ms)", "refused", "failed"]
    completed = [result for result in results if result.ok]
    best = completed[knee_of(completed)] if completed else None
    lines = ["".join(f"{head:>11}" for head in heads)]
    for result in results:
        latencies = [result.percentile(name, percent) for name in ("ttft", "e2e") for percent in (50, 99)]
        rates = result.rate, result.request_throughput, result.output_throughput, result.goodput
        counts = result.counts["refused"], result.counts["failed"]
        cells = [f"{rate:.4g}" for rate in rates]
        cells += ["-" if value is None else f"{1000 * value:.1f}" for value in latencies]
        line = "".join(f"{value:>11}" for value in [*cells, *counts])
        lines.append(line + "  <- knee" * (result is best))
    return "\n".join(lines)
