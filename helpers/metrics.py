"""Latency and throughput as the field defines them, computed from when each token was there.

    TTFT        first token - arrival                       time to first token
    ITL         gaps between a request's tokens             inter-token latency
    E2E         last token - arrival                        end-to-end latency
    TPOT        (E2E - TTFT) / (output tokens - 1)          time per output token, for outputs longer than one
    throughput  output tokens / duration
    goodput     requests within all limits / duration

All times are in seconds. Report medians with a tail percentile (p95, p99), never a mean alone.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .trace import Trace


@dataclass(frozen=True)
class RequestMetrics:
    """The times of one request: when it arrived and when each of its tokens was there."""

    request_id: Hashable
    arrival: float
    token_times: Sequence[float]

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """None for an output of one token, which has no time *between* tokens."""
        return (self.e2e - self.ttft) / (len(self.token_times) - 1) if len(self.token_times) > 1 else None


def request_metrics(trace: Trace, arrivals: Mapping[Hashable, float] | None = None) -> list[RequestMetrics]:
    """The metrics of a trace's requests, in the order of their first tokens; all arrived at 0 unless said otherwise."""
    arrivals = arrivals or {}
    return [RequestMetrics(id, arrivals.get(id, 0.0), times) for id, times in trace.token_times.items()]


def throughput(trace: Trace) -> float:
    """Output tokens a second, prompt tokens not counted."""
    return trace.output_tokens / trace.seconds


def goodput(
    requests: Sequence[RequestMetrics],
    seconds: float,
    ttft: float | None = None,
    tpot: float | None = None,
    e2e: float | None = None,
) -> float:
    """Requests a second that meet every stated limit (DistServe, Zhong et al. 2024): what users call fast enough.

    Args:
        requests: those with a complete answer; whoever got none is not good.
        seconds: how long the run took.
        ttft, tpot, e2e: the largest that is still good, in seconds. An output of one token has no TPOT to exceed.

    Raises:
        ValueError: a run of no length.
    """
    if seconds <= 0:
        raise ValueError(f"A run takes more than 0 seconds, not {seconds}.")
    limits = {name: limit for name, limit in {"ttft": ttft, "tpot": tpot, "e2e": e2e}.items() if limit is not None}
    good = sum(all((getattr(one, name) or 0) <= limit for name, limit in limits.items()) for one in requests)
    return good / seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed, interpolated linearly.

    Raises:
        ValueError: no values, or a percent outside 0 to 100.
    """
    if len(values) == 0:
        raise ValueError("There is no percentile of no values: let at least one request finish first.")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is between 0 and 100, not {percent}.")
    return float(np.percentile(values, percent))
