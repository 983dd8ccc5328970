"""The figures of a load test: what came of the requests, how fast, and how many were good.

Latencies are those of `helpers.metrics`, over complete answers, counted from the intended send times. Throughput and
goodput are over the time from when the first request was due until the last answer ended.
"""

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from ..metrics import goodput, percentile
from .client import Answer

LIMITS = ("ttft", "tpot", "e2e")
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between chunks",
    "e2e": "end to end",
}
PERCENTS = (50, 95, 99)
LATE = 0.05  # seconds


def _environment() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "platform": platform.platform(),
    }


@dataclass
class LoadResult:
    """One load test.

    Attributes:
        settings: how it was run: "rate", "cv" and "seed" or "users" and "think", "warm_up", "url", "model", ...
        answers: one for each request that counts, in the order in which they were due.
        limits: see `run_load`.
        environment: date and versions.
    """

    settings: dict[str, Any]
    answers: list[Answer] = field(repr=False)
    limits: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=_environment, repr=False)

    def with_status(self, status: str) -> list[Answer]:
        """The answers that are "ok", "refused" (429) or "failed"."""
        return [answer for answer in self.answers if answer.status == status]

    @property
    def counts(self) -> dict[str, int]:
        """How many answers have which status."""
        return {status: len(self.with_status(status)) for status in ("ok", "refused", "failed")}

    @property
    def ok(self) -> list[Answer]:
        return self.with_status("ok")

    @property
    def rate(self) -> float | None:
        """Requests a second that were offered; None in a closed loop."""
        return self.settings.get("rate")

    @property
    def duration(self) -> float:
        return max(answer.ended for answer in self.answers)

    @property
    def request_throughput(self) -> float:
        """Complete answers a second."""
        return len(self.ok) / self.duration

    @property
    def output_throughput(self) -> float:
        """Tokens of complete answers a second."""
        return sum(answer.output_tokens for answer in self.ok) / self.duration

    @property
    def goodput(self) -> float:
        """Complete answers a second that meet all limits."""
        return goodput(self.ok, self.duration, **self.limits)

    @property
    def lag(self) -> float:
        """Seconds by which the load generator itself was late, at worst: in the latencies, not the server's fault."""
        return max(0.0, *(answer.sent - answer.arrival for answer in self.answers))

    def latencies(self, name: str) -> list[float]:
        """All values of "ttft", "tpot", "itl" or "e2e", in seconds."""
        if name == "itl":
            return [gap for answer in self.ok for gap in answer.itl]
        return [value for answer in self.ok if (value := getattr(answer, name)) is not None]

    def percentile(self, name: str, percent: float) -> float | None:
        """Of a latency; None where there are no values."""
        values = self.latencies(name)
        return percentile(values, percent) if values else None

    def summary(self) -> dict[str, Any]:
        """All figures, by name; times in seconds."""
        names = ("duration", "request_throughput", "output_throughput", "goodput", "lag")
        percentiles = {name: {f"p{p}": self.percentile(name, p) for p in PERCENTS} for name in LATENCIES}
        return self.counts | {name: getattr(self, name) for name in names} | percentiles

    def __str__(self) -> str:
        """The figures as a table."""
        offered = f"{self.rate:g}/s offered" if self.rate else f"{self.settings.get('users')} users"
        came = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        lines = [
            f"requests    {len(self.answers)}: {came}",
            f"time        {self.duration:.2f} s, {offered}",
            f"throughput  {self.request_throughput:.2f} requests/s, {self.output_throughput:.1f} output tokens/s",
        ]
        if self.limits:
            good = self.goodput * self.duration / len(self.answers)
            stated = ", ".join(f"{name} <= {limit:g} s" for name, limit in self.limits.items())
            lines.append(f"goodput     {self.goodput:.2f} requests/s with {stated} ({good:.0%} of all)")
        lines += ["", f"{'milliseconds':26}" + "".join(f"{f'p{percent}':>10}" for percent in PERCENTS)]
        for name, meaning in LATENCIES.items():
            values = [self.percentile(name, percent) for percent in PERCENTS]
            shown = "".join(f"{'-' if value is None else f'{1000 * value:.1f}':>10}" for value in values)
            lines.append(f"{name.upper():5}{meaning:21}{shown}")
        for error, count in Counter(answer.error for answer in self.answers if answer.error).most_common(5):
            lines.append(f"{count} without an answer: {error}")
        if self.lag > LATE:
            lines.append(
                f"The load generator was up to {self.lag:.2f} s late, and that is in the latencies: "
                "give it a machine that is less busy, or a lower rate."
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, every request's times included, as JSON can hold it."""
        return {
            "settings": self.settings,
            "limits": self.limits,
            "environment": self.environment,
            "summary": self.summary(),
            "requests": [{**asdict(answer), "status": answer.status} for answer in self.answers],
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "LoadResult":
        """The inverse of `as_dict`."""
        answers = [{name: value for name, value in one.items() if name != "status"} for one in saved["requests"]]
        answers = [Answer(**one) for one in answers]
        return cls(saved["settings"], answers, saved["limits"], saved["environment"])

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "LoadResult":
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
