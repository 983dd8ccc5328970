"""The results of a load test: how its requests ended, how long they took, and how many met the limits.

Latencies are those of `helpers.metrics`. They cover completed requests only, and are measured from the intended send
time. Throughput and goodput refer to the time from the first intended send time to the end of the last request.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..metrics import goodput, percentile
from .client import RequestResult

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between chunks",
    "e2e": "end-to-end latency",
}
PERCENTS = (50, 95, 99)
LATE = 0.05  # seconds of lag beyond which a report warns


@dataclass
class LoadResult:
    """The results of one load test.

    Attributes:
        settings: the settings of the run: "rate", "cv" and "seed" or "users"; "url", ...
        requests: one result per request in the order of their intended send times.
        limits: see `run_load`.
    """

    settings: dict[str, Any]
    requests: list[RequestResult] = field(repr=False)
    limits: dict[str, float] = field(default_factory=dict)

    def with_status(self, status: str) -> list[RequestResult]:
        """Return the requests with this status: "ok", "refused" (429) or "failed"."""
        return [request for request in self.requests if request.status == status]

    @property
    def counts(self) -> dict[str, int]:
        """The number of requests with each status."""
        return {status: len(self.with_status(status)) for status in ("ok", "refused", "failed")}

    @property
    def ok(self) -> list[RequestResult]:
        """The completed requests."""
        return self.with_status("ok")

    @property
    def rate(self) -> float | None:
        """The offered load in requests per second; None in a closed loop."""
        return self.settings.get("rate")

    @property
    def duration(self) -> float:
        """The seconds from the first intended send time to the end of the last request."""
        return max(request.ended for request in self.requests)

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return len(self.ok) / self.duration

    @property
    def output_throughput(self) -> float:
        """Output tokens of completed requests per second."""
        return sum(request.output_tokens for request in self.ok) / self.duration

    @property
    def goodput(self) -> float:
        """Completed requests per second that met all limits."""
        return goodput(self.ok, self.duration, **self.limits)

    @property
    def lag(self) -> float:
        """The largest delay, in seconds, with which the load generator sent a request. Latencies include it."""
        return max(0.0, *(request.sent - request.arrival for request in self.requests))

    def latencies(self, name: str) -> list[float]:
        """Return all values of "ttft", "tpot", "itl" or "e2e", in seconds."""
        if name == "itl":
            return [gap for request in self.ok for gap in request.itl]
        return [value for request in self.ok if (value := getattr(request, name)) is not None]

    def percentile(self, name: str, percent: float) -> float | None:
        """Return a percentile of a latency, in seconds; None if there are no values."""
        values = self.latencies(name)
        return percentile(values, percent) if values else None

    def __str__(self) -> str:
        """Return the results as a table."""
        offered = f"{self.rate:g}/s offered" if self.rate else f"{self.settings.get('users')} users"
        ended = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        lines = [
            f"requests    {len(self.requests)}: {ended}",
            f"time        {self.duration:.2f} s, {offered}",
            f"throughput  {self.request_throughput:.2f} requests/s, {self.output_throughput:.1f} output tokens/s",
        ]
        if self.limits:
            good = self.goodput * self.duration / len(self.requests)
            stated = ", ".join(f"{name} <= {limit:g} s" for name, limit in self.limits.items())
            lines.append(f"goodput     {self.goodput:.2f} requests/s with {stated} ({good:.0%} of all)")
        lines += ["", f"{'milliseconds':26}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTS)]
        for name, meaning in LATENCIES.items():
            values = [self.percentile(name, percent) for percent in PERCENTS]
            cells = "".join(f"{'-' if value is None else f'{1000 * value:.1f}':>10}" for value in values)
            lines.append(f"{name.upper():5}{meaning:21}{cells}")
        for error, count in Counter(request.error for request in self.requests if request.error).most_common(5):
            lines.append(f"{count} not completed: {error}")
        if self.lag > LATE:
            lines.append(
                f"The load generator was up to {self.lag:.2f} s late, which the latencies include: "
                "run it on a less busy machine, or lower the rate."
            )
        return "\n".join(lines)
