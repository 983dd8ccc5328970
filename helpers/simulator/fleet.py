"""A fleet: simulated replicas behind a router, and a trace of requests that arrive one after another.

The replicas may fail, and an autoscaler may start and stop them (`replica_set.py`). On an AMD EPYC (Zen 5, 2 cores)
beside other work, a million requests of `synthetic_trace("conversation")` at 1,500 per second over 100 replicas took
473 s of processor time and at most 128 MiB. The result took 38 MiB of these: 40 bytes per request.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from typing import Any, NamedTuple

from ..cluster.routing import Router
from ..engine import EngineConfig, Sequence
from .cost_model import CostModel
from .fleet_result import FleetResult
from .replica_set import ReplicaSet
from .simulated_replica import SimulatedReplica


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


class AdaptedRequest(NamedTuple):
    """A request of a trace that runs with an adapter, and shares cached blocks with others of the same adapter only.

    Attributes:
        arrival, prompt, output_tokens: as for `TimedRequest`.
        adapter: its name.
    """

    arrival: float
    prompt: list[int] | int
    output_tokens: int
    adapter: str


def simulate_fleet(
    requests: Iterable[TimedRequest | AdaptedRequest],
    config: EngineConfig,
    cost: CostModel,
    replicas: int,
    router: Router,
    *,
    failures: Iterable[tuple[float, int]] = (),
    autoscaler: Any = None,
    start_seconds: float = 60.0,
) -> FleetResult:
    """Run a trace on equal replicas.

    Args:
        requests: in order of arrival; they may be generated as they are read.
        config: the settings of each replica. If prompts are numbers of tokens, `prefix_caching` must be off.
        cost: the seconds of an iteration.
        replicas: how many there are when the first request arrives.
        router: chooses the replica of each request.
        failures: (seconds, place) of each failure, in order of time; read only as far as the run lasts. Places count
            from 0, and each has at most one replica. A failure at an empty place has no effect.
        autoscaler: decides the number of replicas at regular intervals after the first arrival, such as a
            `cluster.autoscaling.QueueLengthAutoscaler`; None for no change.
        start_seconds: how long a replica takes from its start until it is ready. If none is ready, requests wait.

    Raises:
        ValueError: there is no replica or no request, requests or failures are not in order of time, a request can
            never run, prefix caching is on for prompts without token ids, a setting is outside its range, or replicas
            fail so often that no request finishes.
    """
    result = FleetResult()
    make_replica = partial(SimulatedReplica, config, cost)
    fleet = ReplicaSet(make_replica, replicas, router, result.add, start_seconds, failures, autoscaler)
    for _ in fleet.run(check_trace(requests, config, fleet.check)):
        pass
    fleet.report(result)
    return result


def check_trace(
    requests: Iterable[TimedRequest | AdaptedRequest], config: EngineConfig, check: Callable[[int, int], None]
) -> Iterator[tuple[float, Sequence]]:
    """Yield the arrival and the sequence of each request; requests are numbered from 0.

    Args:
        requests: the trace.
        config: the settings of the replicas that compute the prompts.
        check: raises a ValueError for the lengths of a request that can never run.

    Raises:
        ValueError: see `simulate_fleet`.
    """
    latest = -inf
    for number, request in enumerate(requests):
        arrival, prompt, output_tokens, *adapter = request
        if not 0 <= arrival < inf:
            raise ValueError(
                f"Request {number} arrives at {arrival}, which is not a finite number of seconds of at least 0."
            )
        if arrival < latest:
            raise ValueError(f"Request {number} arrives at {arrival}, before the one ahead of it: sort the trace.")
        latest = arrival
        check(prompt if isinstance(prompt, int) else len(prompt), output_tokens)
        shared = {"notes": {"adapters": adapter[0]}, "salt": adapter[0].encode()} if adapter else {}
        yield arrival, Sequence(number, _token_ids(prompt, config), output_tokens, arrival=arrival, **shared)
    if latest == -inf:
        raise ValueError("The trace has no requests.")


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


def random_failures(places: int, mean_seconds: float, seed: int = 0) -> Iterator[tuple[float, int]]:
    """Yield failures without end, for `simulate_fleet`: on average, each place has one in `mean_seconds`.

    Args:
        places: how many places there are.
        mean_seconds: the mean time from one failure of a place to the next.
        seed: the same seed gives the same failures.

    Raises:
        ValueError: there is no place, or the mean is not positive.
    """
    if places < 1 or not 0 < mean_seconds < inf:
        raise ValueError(f"Failures need at least 1 place and a mean time above 0, not {places} and {mean_seconds}.")
    draw, time = random.Random(seed), 0.0
    while True:
        time += draw.expovariate(places / mean_seconds)
        yield time, draw.randrange(places)
