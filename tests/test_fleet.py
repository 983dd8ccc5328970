"""Stretches change nothing but the time that a simulation takes, and a fleet is what its replicas are alone."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_lockstep import generate

from helpers.cluster.lockstep import LockstepReplicas
from helpers.cluster.routing import FreeRowsFirst, LeastOutstandingTokens, PrefixAware, RoundRobin, Router
from helpers.engine import POLICIES, EngineConfig, SamplingParams, Scheduler
from helpers.metrics import request_metrics
from helpers.simulator import (
    AdaptedRequest,
    CostModel,
    SimulatedReplica,
    Simulator,
    TimedRequest,
    simulate,
    simulate_fleet,
    simulated_replica,
)
from helpers.simulator.fleet import check_trace
from helpers.simulator.stretch import find_stretch

COST = CostModel(iterations=0.01, prefills=0.001, tokens=0.0002, sequences=0.0001, keys=1e-6, pairs=1e-8, adapters=2e-4)


@st.composite
def workloads(draw) -> tuple[EngineConfig, list[TimedRequest]]:
    """Draw the settings of a replica, and requests that it accepts: some have the same beginning."""
    rows = draw(st.integers(1, 6))
    config = EngineConfig(
        max_batch_size=rows,
        max_tokens_per_step=draw(st.integers(rows, 60)),
        num_blocks=draw(st.sampled_from([None, 28, 40])),
        block_size=4,
        policy=draw(st.sampled_from(sorted(POLICIES))),
        mixed_batches=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
    )
    gaps = draw(st.lists(st.sampled_from([0.0, 0.005, 0.02, 0.3]), min_size=1, max_size=25))
    requests = []
    for arrival in itertools.accumulate(gaps):
        own = draw(st.integers(1, 40))
        prompt = [draw(st.integers(1, 2))] * draw(st.sampled_from([0, 8])) + list(range(100, 100 + own))
        request = TimedRequest(arrival, prompt, draw(st.integers(1, 60)))
        adapter = draw(st.sampled_from([None, "a", "b"]))
        requests.append(request if adapter is None else AdaptedRequest(*request, adapter))
    return config, requests


@contextmanager
def stretches(skip: bool, one_by_one: Scheduler | None = None) -> Iterator[None]:
    """Let replicas run stretches in one step, except for those of a scheduler; or let them plan every iteration."""

    def find(scheduler, *others):
        return find_stretch(scheduler, *others) if skip and scheduler is not one_by_one else None

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(simulated_replica, "find_stretch", find)
        yield


def state(replica: SimulatedReplica) -> tuple:
    """Return everything that later plans depend on, and what is counted."""
    scheduler = replica.scheduler
    running = [
        (sequence.request_id, sequence.computed, sequence.token_ids, sequence.token_times)
        for sequence in scheduler.running
    ]
    waiting = [(sequence.request_id, sequence.waited) for sequence in scheduler.waiting]
    return running, waiting, scheduler.waiting.step, replica.time, replica.iterations, replica.preemptions


@settings(max_examples=150, phases=[Phase.generate])
@given(workloads())
def test_a_stretch_leaves_what_its_iterations_would_leave_one_by_one(workload):
    config, requests = workload
    replicas = [SimulatedReplica(config, COST) for _ in range(2)]
    arrivals = (check_trace(requests, config, replica.check) for replica in replicas)
    with stretches(True, one_by_one=replicas[1].scheduler):
        for pair in zip(*arrivals, strict=True):
            for replica, (arrival, sequence) in zip(replicas, pair, strict=True):
                replica.add(sequence, arrival)
            assert state(replicas[0]) == state(replicas[1])
        for replica in replicas:
            replica.advance()
    assert state(replicas[0]) == state(replicas[1])
    assert replicas[0].finished == replicas[1].finished
    assert [replica.outstanding_tokens for replica in replicas] == [0, 0]


@settings(max_examples=40, phases=[Phase.generate])
@given(workloads())
def test_a_replica_has_the_times_of_the_simulator(workload):
    config, requests = workload
    requests = [TimedRequest(*request[:3]) for request in requests]
    result = simulate_fleet(requests, config, COST, 1, RoundRobin())
    arrivals = [request.arrival for request in requests]
    trace = simulate([request[1:3] for request in requests], config, arrivals, COST)
    expected = request_metrics(trace, dict(enumerate(arrivals)))
    times = (
        sorted((request.ttft, request.e2e, request.tpot or 0.0) for request in run)
        for run in (result.requests, expected)
    )
    assert next(times) == next(times)
    assert result.iterations == [trace.steps]


def test_requests_share_prefixes_and_replicas_within_an_adapter_and_each_adapter_is_read_once():
    prompt, rows = list(range(100)), EngineConfig(num_blocks=64, block_size=4, max_batch_size=8)
    requests = [
        AdaptedRequest(time, prompt, 1, adapter) for time, adapter in zip((0.0, 0.0, 9.0, 20.0), "abba", strict=True)
    ]
    result = simulate_fleet(requests, rows, COST, 2, PrefixAware())
    assert result.computed_tokens == [100 + 4, 100 + 4]  # all but the last block of a prompt was cached
    assert simulate_fleet(requests, rows, COST, 1, PrefixAware()).computed_tokens == [2 * (100 + 4)]
    cost = CostModel(iterations=1.0, adapters=0.25)
    together = [AdaptedRequest(0.0, [number], 3, adapter) for number, adapter in enumerate("aba")]
    assert simulate_fleet([*together, TimedRequest(0.0, [9], 3)], rows, cost, 1, RoundRobin()).busy_seconds == [3 * 1.5]


class Watching:
    """A router that keeps what it sees of the replicas."""

    def __init__(self, router: Router):
        self.router, self.loads, self.free_rows, self.choices = router, [], [], []

    def choose(self, prompt_token_ids, replicas):
        self.loads.append([replica.outstanding_tokens for replica in replicas])
        self.free_rows.append([replica.free_rows for replica in replicas])
        self.choices.append(self.router.choose(prompt_token_ids, replicas))
        return self.choices[-1]


@settings(max_examples=60, phases=[Phase.generate])
@given(workloads(), st.sampled_from([RoundRobin, LeastOutstandingTokens]))
def test_a_simulated_fleet_routes_as_replicas_in_lock_step_do(workload, router):
    """Both count time in iterations, so their routers see the same."""
    config, requests = workload
    config = replace(config, num_blocks=None, prefix_caching=False)
    steps = [int(100 * request.arrival) for request in requests]
    fleet, lockstep = Watching(FreeRowsFirst(router())), Watching(FreeRowsFirst(router()))
    at_steps = [request._replace(arrival=float(step)) for request, step in zip(requests, steps, strict=True)]
    simulate_fleet(at_steps, config, CostModel(iterations=1.0), 2, fleet)
    replicas = LockstepReplicas([Simulator(config) for _ in range(2)], lockstep)
    prompts = [request.prompt for request in requests]
    params = [SamplingParams(request.output_tokens) for request in requests]
    generate(replicas, prompts, params, steps)
    assert fleet.free_rows == lockstep.free_rows
    assert fleet.loads == lockstep.loads
    assert fleet.choices == lockstep.choices


def test_goodput_counts_the_requests_within_all_limits():
    config, cost = EngineConfig(max_batch_size=1), CostModel(iterations=1.0)
    result = simulate_fleet([TimedRequest(0.0, 1, 4), TimedRequest(1.0, 1, 1)], config, cost, 1, RoundRobin())
    times = [(request.ttft, request.tpot, request.e2e) for request in result.requests]
    assert times == [(1.0, 1.0, 4.0), (4.0, None, 4.0)]
    assert result.seconds == 5.0
    assert result.goodput(ttft=1.0) == result.goodput(ttft=1.0, tpot=1.0) == 1 / 5
    assert result.within(ttft=4.0) == 1.0
    assert result.percentile("tpot", 99) == 1.0
    assert result.utilization == 1.0


@pytest.mark.parametrize(
    "requests, settings, reason",
    [
        ([(1.0, 3, 3), (0.5, 3, 3)], {}, r"Request 1 arrives at 0\.5, before the one ahead of it: sort the trace"),
        *(([(time, 3, 3)], {}, f"Request 0 arrives at {time}, which is not a finite") for time in (nan, inf, -1.0)),
        ([(1.0, 0, 3)], {}, "at least 1 prompt token and 1 output token, not 0 and 3"),
        ([(1.0, 7, 10**13)], {}, "at most 10000000 prompt tokens and output tokens, not 7 and 10000000000000"),
        ([(0.0, 100, 3)], {"num_blocks": 4, "prefix_caching": False}, "7 blocks of 16 tokens, and this engine has 4"),
        ([(0.0, 3, 3)], {"speculative": "ngram"}, "use speculative=None"),
    ],
)
def test_a_fleet_says_what_is_wrong_with_a_trace(requests, settings, reason):
    trace = [TimedRequest(*request) for request in requests]
    with pytest.raises(ValueError, match=reason):
        simulate_fleet(trace, EngineConfig(**settings), COST, 1, RoundRobin())
