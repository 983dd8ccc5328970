"""What a simulated fleet did: the times of all requests, and how long each replica existed and computed.

Of a finished request, only five numbers remain: its arrival, the times of its first and last token, and its two
lengths.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

from ..metrics import count_within, goodput, percentile
from .simulated_replica import FinishedRequest


class Lifetime(NamedTuple):
    """When a replica was started, when it was ready to take requests, and when it stopped; in simulated seconds.

    The time from `started` to `stopped` is paid for. A replica that stopped or failed before it was ready has
    `ready > stopped`.
    """

    started: float
    ready: float
    stopped: float


@dataclass
class FleetResult:
    """The times of all requests, in the order in which they finished, and what each replica did.

    Attributes:
        arrivals, first_tokens, last_tokens: in simulated seconds.
        prompt_tokens, output_tokens: the lengths.
        iterations, preemptions, busy_seconds, computed_tokens: for each replica, in the order in which they started.
        lifetimes: for each replica; those that ran to the end stop with the last token.
        resumed: how often a request moved to another replica because its own had failed.
        lost_tokens: how many tokens of these requests were computed by then, and their keys and values lost.
    """

    arrivals: array = field(default_factory=lambda: array("d"), repr=False)
    first_tokens: array = field(default_factory=lambda: array("d"), repr=False)
    last_tokens: array = field(default_factory=lambda: array("d"), repr=False)
    prompt_tokens: array = field(default_factory=lambda: array("l"), repr=False)
    output_tokens: array = field(default_factory=lambda: array("l"), repr=False)
    iterations: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)
    lifetimes: list[Lifetime] = field(default_factory=list)
    resumed: int = 0
    lost_tokens: int = 0

    def add(self, finished: FinishedRequest) -> None:
        """Add a finished request."""
        self.arrivals.append(finished.arrival)
        self.first_tokens.append(finished.first_token)
        self.last_tokens.append(finished.last_token)
        self.prompt_tokens.append(finished.prompt_tokens)
        self.output_tokens.append(finished.output_tokens)

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def requests(self) -> Iterator[FinishedRequest]:
        """The requests, numbered in the order in which they finished."""
        columns = self.arrivals, self.first_tokens, self.last_tokens, self.prompt_tokens, self.output_tokens
        return (FinishedRequest(number, *values) for number, values in enumerate(zip(*columns, strict=True)))

    @property
    def seconds(self) -> float:
        """The seconds from the first arrival to the last token."""
        return max(self.last_tokens) - min(self.arrivals)

    def goodput(self, **limits: float) -> float:
        """Return the requests per second that meet all limits: "ttft", "tpot" and "e2e", in seconds."""
        return goodput(self.requests, self.seconds, **limits)

    def within(self, **limits: float) -> float:
        """Return the share of requests that meet all limits."""
        return count_within(self.requests, **limits) / len(self)  # goodput * seconds could round below 1

    def percentile(self, name: str, percent: float) -> float | None:
        """Return a percentile of "ttft", "tpot" or "e2e", in seconds; None if no request has such a time."""
        values = [value for request in self.requests if (value := getattr(request, name)) is not None]
        return percentile(values, percent) if values else None

    @property
    def replica_seconds(self) -> float:
        """The seconds for which replicas existed, added over all replicas: what is paid for."""
        return sum(stopped - started for started, _, stopped in self.lifetimes)

    @property
    def mean_replicas(self) -> float:
        """The mean number of replicas that existed at a time."""
        return self.replica_seconds / self.seconds

    @property
    def utilization(self) -> float:
        """The share of the replica-seconds in which replicas compute."""
        return sum(self.busy_seconds) / self.replica_seconds

    @property
    def sizes(self) -> list[tuple[float, int, int]]:
        """The number of replicas over time: (time, how many exist from then on, how many of them are ready)."""
        changes = []
        for started, ready, stopped in self.lifetimes:
            changes += [(started, 1, 0), (stopped, -1, -1 if ready < stopped else 0)]
            changes += [(ready, 0, 1)] if ready < stopped else []
        moments = groupby(sorted(changes), key=lambda change: change[0])
        sums = [(time, *map(sum, zip(*(change[1:] for change in changes), strict=True))) for time, changes in moments]
        return list(accumulate(sums, lambda before, now: (now[0], before[1] + now[1], before[2] + now[2])))
