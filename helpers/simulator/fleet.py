"""A fleet: replicas of the simulated engine behind a router, and a trace of requests that arrive one after another.

Replicas affect each other only through the router, which compares them. So each replica keeps its own clock, which
advances only when the replica's state is read or changes. Of a finished request, only five numbers remain: its arrival,
the times of its first and last token, and its two lengths. A million requests over 100 replicas took 124 MB and 4:22
minutes on one core of an AMD EPYC (Zen 4).
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import NamedTuple, Protocol

from ..engine import EngineConfig
from ..metrics import count_within, goodput, percentile
from .cost_model import CostModel
from .replica import FinishedRequest, FleetClock, SimulatedReplica


class TimedRequest(NamedTuple):
    """A request of a trace.

    Attributes:
        arrival: when it arrives, in seconds.
        prompt: its token ids, or their number if they are unknown.
        output_tokens: the number of tokens to generate.
    """

    arrival: float
    prompt: list[int] | int
    output_tokens: int


class RoutingPolicy(Protocol):
    """Chooses a replica; `cluster.routing` has several routers."""

    def choose(self, prompt_token_ids: list[int], replicas: list[SimulatedReplica]) -> int:
        """Return the index of the replica that gets a request."""


@dataclass
class FleetResult:
    """The times of all requests, in the order in which they finished, and what each replica did.

    Attributes:
        arrivals, first_tokens, last_tokens: in simulated seconds.
        prompt_tokens, output_tokens: the lengths.
        iterations, preemptions, busy_seconds: for each replica.
    """

    arrivals: array = field(default_factory=lambda: array("d"), repr=False)
    first_tokens: array = field(default_factory=lambda: array("d"), repr=False)
    last_tokens: array = field(default_factory=lambda: array("d"), repr=False)
    prompt_tokens: array = field(default_factory=lambda: array("l"), repr=False)
    output_tokens: array = field(default_factory=lambda: array("l"), repr=False)
    iterations: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)

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
        return (FinishedRequest(number, *one) for number, one in enumerate(zip(*columns, strict=True)))

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
        values = [value for one in self.requests if (value := getattr(one, name)) is not None]
        return percentile(values, percent) if values else None

    @property
    def utilization(self) -> float:
        """The share of the time in which a replica computes, over all replicas."""
        return sum(self.busy_seconds) / (len(self.busy_seconds) * self.seconds)


def simulate_fleet(
    requests: Iterable[TimedRequest],
    config: EngineConfig,
    cost: CostModel,
    replicas: int,
    router: RoutingPolicy,
    skip: bool = True,
) -> FleetResult:
    """Run a trace on a number of equal replicas.

    Args:
        requests: in order of arrival; they may be generated as they are read.
        config: the settings of each replica. If prompts are numbers of tokens, `prefix_caching` must be off.
        cost: the seconds of an iteration.
        replicas: how many.
        router: chooses the replica of each request.
        skip: as for `SimulatedReplica`.

    Raises:
        ValueError: there is no replica or no request, requests are not in order of arrival, a request can never run,
            or prefix caching is on for prompts without token ids.
    """
    if replicas < 1:
        raise ValueError(f"A fleet needs at least 1 replica, not {replicas}.")
    clock, result = FleetClock(-inf), FleetResult()
    fleet = [SimulatedReplica(config, cost, clock, skip) for _ in range(replicas)]
    due: list[tuple[float, int]] = []  # a heap; an entry is out of date if its replica is busy until another time
    for number, (arrival, prompt, output_tokens) in enumerate(requests):
        if not isfinite(arrival):
            raise ValueError(f"Request {number} arrives at {arrival}, which is not a finite number of seconds.")
        if arrival < clock.now:
            raise ValueError(f"Request {number} arrives at {arrival}, before the one ahead of it: sort the trace.")
        clock.now = arrival
        fleet[0].check(prompt if isinstance(prompt, int) else len(prompt), output_tokens)
        token_ids = _token_ids(prompt, config)
        while due and due[0][0] < arrival:
            until, index = heapq.heappop(due)
            if until == fleet[index].busy_until:
                _advance(fleet[index], arrival, result)
                if fleet[index].busy_until < inf:  # it is still busy
                    heapq.heappush(due, (fleet[index].busy_until, index))
        index = router.choose(token_ids, fleet)
        fleet[index].add(number, arrival, token_ids, output_tokens)
        heapq.heappush(due, (fleet[index].busy_until, index))
    for replica in fleet:
        _advance(replica, inf, result)
    if not len(result):
        raise ValueError("The trace has no requests.")
    result.iterations = [replica.iterations for replica in fleet]
    result.preemptions = [replica.preemptions for replica in fleet]
    result.busy_seconds = [replica.busy_seconds for replica in fleet]
    return result


def _advance(replica: SimulatedReplica, time: float, result: FleetResult) -> None:
    """Run a replica up to a time, and move the requests that it has finished into the result."""
    replica.advance(time)
    for finished in replica.finished:
        result.add(finished)
    replica.finished.clear()


def _token_ids(prompt: list[int] | int, config: EngineConfig) -> list[int]:
    """Return a list of token ids that belongs to the caller."""
    if not isinstance(prompt, int):
        return list(prompt)
    if config.prefix_caching and config.num_blocks is not None:
        raise ValueError(
            "The contents of the prompts are unknown, so it is unknown which blocks they share: "
            "set prefix_caching=False."
        )
    return [0] * prompt
