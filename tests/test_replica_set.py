"""Replicas of a simulated fleet fail, start and stop, and every request still gets all of its tokens."""

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_fleet import COST, stretches, workloads

from helpers.cluster.routing import FreeRowsFirst, LeastOutstandingTokens, PrefixAware, RoundRobin
from helpers.engine import EngineConfig
from helpers.simulator import (
    CostModel,
    FleetResult,
    Lifetime,
    TimedRequest,
    random_failures,
    replica_set,
    simulate_fleet,
)
from tests.support.autoscalers import with_window

SECOND = CostModel(iterations=1.0)  # per iteration


class Planned:
    """An autoscaler with the answers of a list, of which the last one is repeated."""

    interval = 1.0

    def __init__(self, *answers: int):
        self.seen, self._answers = [], iter(answers)
        self._last = 1

    def desired(self, unfinished):
        self.seen.append(unfinished)
        self._last = next(self._answers, self._last)
        return self._last


def comparable(result: FleetResult) -> tuple:
    """Return all that does not depend on the order in which replicas report finished requests."""
    requests = sorted((request.arrival, request.first_token, request.last_token) for request in result.requests)
    counts = result.iterations, result.preemptions, result.computed_tokens, result.resumed, result.lost_tokens
    return requests, counts, result.lifetimes, [round(seconds, 9) for seconds in result.busy_seconds]


@settings(max_examples=150, phases=[Phase.generate])
@given(
    workload=workloads(),
    gaps=st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.3]), st.integers(0, 2)), max_size=8),
    scale=st.booleans(),
    start_seconds=st.sampled_from([0.0, 0.05, 1.0]),
    policy=st.sampled_from([LeastOutstandingTokens, RoundRobin, PrefixAware]),
    wrap=st.sampled_from([FreeRowsFirst, lambda router: router]),
)
def test_no_token_is_lost_or_repeated_and_stretches_change_nothing(workload, gaps, scale, start_seconds, policy, wrap):
    config, requests = workload
    times = itertools.accumulate(gap for gap, _ in gaps)
    failures = [(time, place if scale else place % 2) for time, (_, place) in zip(times, gaps, strict=True)]
    results = []
    for skip in (True, False):
        autoscaler = with_window(2)(1, 3, target=2, interval=0.1) if scale else None
        options = {"failures": failures, "autoscaler": autoscaler, "start_seconds": start_seconds}
        with stretches(skip):
            results.append(simulate_fleet(requests, config, COST, 2, wrap(policy()), **options))
    assert comparable(results[0]) == comparable(results[1])
    result = results[0]
    lengths = [(len(request.prompt), request.output_tokens) for request in requests]
    assert sorted(zip(result.prompt_tokens, result.output_tokens, strict=True)) == sorted(lengths)
    assert all(request.arrival < request.first_token <= request.last_token for request in result.requests)
    assert all(started <= stopped for started, _, stopped in result.lifetimes)
    if not config.prefix_caching and not any(result.preemptions):
        needed = sum(prompt + output - 1 for prompt, output in lengths)
        assert sum(result.computed_tokens) == needed + result.lost_tokens


def test_a_request_continues_on_another_replica_after_the_iteration_in_which_its_own_failed():
    requests = [TimedRequest(0.0, 10, 6), TimedRequest(0.0, 20, 6)]
    result = simulate_fleet(requests, EngineConfig(), SECOND, 2, RoundRobin(), failures=[(2.5, 1)], start_seconds=4.0)
    # The second request has 3 tokens when its replica fails at 3.0, with the keys and values of 20 + 2 tokens.
    assert (result.resumed, result.lost_tokens) == (1, 22)
    assert result.computed_tokens == [15 + 23 + 2, 22, 0]
    assert sorted(result.last_tokens) == [6.0, 6.0]
    assert result.lifetimes == [Lifetime(0.0, 0.0, 6.0), Lifetime(0.0, 0.0, 3.0), Lifetime(3.0, 7.0, 6.0)]
    assert result.sizes == [(0.0, 2, 2), (3.0, 2, 1), (6.0, 0, 0)]
    assert (result.replica_seconds, result.mean_replicas) == (12.0, 2.0)


def test_endless_random_failures_are_read_only_as_far_as_the_run_lasts_and_are_as_frequent_as_stated():
    failures = list(itertools.takewhile(lambda failure: failure[0] < 10_000, random_failures(4, 100.0)))
    assert 350 < len(failures) < 450
    assert {place for _, place in failures} == {0, 1, 2, 3}
    requests = [TimedRequest(float(second), 1, 3) for second in range(50)]
    result = simulate_fleet(requests, EngineConfig(), COST, 4, RoundRobin(), failures=iter(failures), start_seconds=1.0)
    assert len(result.lifetimes) == 4 + sum(time < 49.5 for time, _ in failures)


def test_replicas_that_fail_before_they_finish_anything_are_an_error_instead_of_an_endless_run(monkeypatch):
    monkeypatch.setattr(replica_set, "MOST_FAILURES", 100)
    failing = {"failures": ((number / 10, 0) for number in itertools.count()), "start_seconds": 100.0}
    with pytest.raises(ValueError, match=r"100 times, .* fail less often, or start sooner \(start_seconds is 100\)"):
        simulate_fleet([TimedRequest(0.0, 3, 3)], EngineConfig(), SECOND, 1, RoundRobin(), **failing)
    failing = {"failures": ((2.5 * number, 0) for number in itertools.count(1)), "start_seconds": 0.0}
    long = TimedRequest(0.0, 40, 1)  # never more than 30 of its tokens are computed before the next failure
    with pytest.raises(ValueError, match=r"up to 252\.5 s, while no request finished"):
        simulate_fleet([long], EngineConfig(8, max_tokens_per_step=10), SECOND, 1, RoundRobin(), **failing)


def test_an_autoscaler_sees_all_unfinished_requests_and_pays_for_replicas_from_their_start():
    requests = [TimedRequest(0.0, 1, 4) for _ in range(3)] + [TimedRequest(3.0, 1, 2)]
    autoscaler = Planned(2)
    result = simulate_fleet(
        requests, EngineConfig(max_batch_size=1), SECOND, 1, RoundRobin(), autoscaler=autoscaler, start_seconds=1.5
    )
    # Two replicas from 1.0 on, the second of which is ready at 2.5; round robin sends the last request to it.
    assert sorted(zip(result.arrivals, result.last_tokens, strict=True)) == [(0, 4), (0, 8), (0, 12), (3, 5)]
    assert autoscaler.seen == [3, 3, 3, 3, 2, 2, 2, 1, 1, 1, 1]
    assert result.sizes == [(0.0, 1, 1), (1.0, 2, 1), (2.5, 2, 2), (12.0, 0, 0)]
    assert (result.replica_seconds, result.utilization) == (12 + 11, 14 / 23)


@pytest.mark.parametrize(
    "requests, replicas, events, lifetimes",
    [
        pytest.param(  # drained at 1.0; when three are wanted, two start at 2.0, one of which stops before it is ready
            [(0.0, 1, 9), (0.0, 1, 9)], 2, {"autoscaler": (1, 3, 2), "start_seconds": 3.0},
            [(0.0, 0.0, 9.0), (0.0, 0.0, 9.0), (2.0, 5.0, 9.0), (2.0, 5.0, 3.0)],
            id="one that drains is not wanted again: new ones start",
        ),
        pytest.param(
            [(0.0, 1, 9), (0.0, 1, 9)], 2, {"autoscaler": (1,), "failures": [(2.5, 1)]},
            [(0.0, 0.0, 9.0), (0.0, 0.0, 3.0)],
            id="one that fails while it drains is not replaced",
        ),
    ],
)  # fmt: skip
def test_replicas_start_and_stop_at_these_times(requests, replicas, events, lifetimes):
    if "autoscaler" in events:
        events = events | {"autoscaler": Planned(*events["autoscaler"])}
    requests = [TimedRequest(*request) for request in requests]
    result = simulate_fleet(requests, EngineConfig(), SECOND, replicas, LeastOutstandingTokens(), **events)
    assert result.lifetimes == lifetimes


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"replicas": 0}, "at least 1 replica, not 0"),
        ({"failures": [(1.0, 2)]}, "no place 2 that could fail: the 2 places count from 0"),
        ({"failures": [(1.0, 0), (0.5, 0)]}, r"A failure at 0\.5 follows one at 1\.0: give finite times, sorted"),
        ({"failures": [(float("nan"), 0)]}, "A failure at nan"),
        ({"autoscaler": type("Never", (Planned,), {"interval": 0.0})()}, r"above 0, not 0\.0"),
    ],
)
def test_a_fleet_says_what_is_wrong_with_its_replicas_and_events(options, reason):
    options = {"replicas": 2, "router": RoundRobin()} | options
    with pytest.raises(ValueError, match=reason):
        simulate_fleet([TimedRequest(3.0, 3, 3)], EngineConfig(), COST, **options)
