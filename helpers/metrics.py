"""Latency and throughput as the field defines them, computed from the times at which tokens were available.

    TTFT        first token - arrival                       time to first token
    ITL         gaps between a request's tokens             inter-token latency
    E2E         last token - arrival                        end-to-end latency
    TPOT        (E2E - TTFT) / (output tokens - 1)          time per output token, for outputs longer than one token
    throughput  output tokens / duration
    goodput     requests within all limits / duration

All times are in seconds. Report medians with a tail percentile (p95, p99), never a mean alone.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .trace import Trace

LIMITS = ("ttft", "tpot", "e2e")  # the latencies that can have one


@dataclass(frozen=True)
class RequestMetrics:
    """The times of one request, in seconds on one clock: its arrival, and when each of its tokens was available."""

    request_id: Hashable
    arrival: float
    token_times: Sequence[float]

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.token_times[0] - self.arrival

    @property
    def e2e(self) -> float:
        """End-to-end latency: seconds from the arrival to the last token."""
        return self.token_times[-1] - self.arrival

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between consecutive tokens, in seconds; one fewer than tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def output_tokens(self) -> int:
        """The number of output tokens."""
        return len(self.token_times)

    @property
    def tpot(self) -> float | None:
        """Time per output token, in seconds; None for an output of one token, which has no time *between* tokens."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def request_metrics(trace: Trace, arrivals: Mapping[Hashable, float] | None = None) -> list[RequestMetrics]:
    """Return the metrics of a trace's requests, in the order of their first tokens.

    Args:
        trace: the run.
        arrivals: the arrival times by request id. A request that is not listed arrived at 0.
    """
    arrivals = arrivals or {}
    return [RequestMetrics(id, arrivals.get(id, 0.0), times) for id, times in trace.token_times.items()]


def throughput(trace: Trace) -> float:
    """Return the output tokens per second of a run, prompt tokens not counted."""
    return trace.output_tokens / trace.seconds


def goodput(
    requests: Sequence[RequestMetrics],
    seconds: float,
    ttft: float | None = None,
    tpot: float | None = None,
    e2e: float | None = None,
) -> float:
    """Return the requests per second that meet every stated limit (DistServe, Zhong et al. 2024).

    Args:
        requests: the requests with a complete output. Leave out the others: they meet no limit.
        seconds: the duration of the run.
        ttft, tpot, e2e: the limits, in seconds; a latency equal to its limit meets it. An output of one token has no
            TPOT and meets any limit on it.

    Raises:
        ValueError: `seconds` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"A run takes more than 0 seconds, not {seconds}.")
    return count_within(requests, ttft, tpot, e2e) / seconds


def count_within(
    requests: Iterable[RequestMetrics], ttft: float | None = None, tpot: float | None = None, e2e: float | None = None
) -> int:
    """Return how many requests meet every stated limit; see `goodput`."""
    limits = {name: limit for name, limit in {"ttft": ttft, "tpot": tpot, "e2e": e2e}.items() if limit is not None}
    return sum(all((getattr(request, name) or 0) <= limit for name, limit in limits.items()) for request in requests)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` percent of the values do not exceed, interpolated linearly.

    Raises:
        ValueError: there are no values, or `percent` is outside 0 to 100.
    """
    if len(values) == 0:
        raise ValueError("There is no percentile of no values: let at least one request finish first.")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is between 0 and 100, not {percent}.")
    ordered = sorted(values)
    position = (len(ordered) - 1) * (percent / 100)
    below = int(position)
    fraction = position - below
    if fraction == 0:
        return float(ordered[below])
    lower, upper = ordered[below : below + 2]
    # Interpolate from the nearer value, as numpy does: rounding then cannot leave the interval.
    step = upper - lower
    return float(lower + step * fraction if fraction < 0.5 else upper - step * (1 - fraction))


def knee(points: Sequence[tuple[float, float]]) -> int:
    """Return the index of the point with the greatest *power*: throughput divided by latency.

    Below the knee, one percent more throughput costs less than one percent more latency; beyond the knee, it costs more
    (Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer communications", 1979).
    Power needs no threshold, so there is none to choose. It is nearly flat around the knee: two sweeps of one server
    may disagree by one step.

    Args:
        points: throughput and latency at each load.

    Raises:
        ValueError: there are no points.
    """
    if len(points) == 0:
        raise ValueError("There is no knee of no points: measure at least one load.")
    powers = [throughput / latency for throughput, latency in points]
    return powers.index(max(powers))
