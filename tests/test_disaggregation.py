"""Prefill and decode on separate replicas: every token is computed once, and on the right kind of replica."""

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_fleet import COST, stretches, workloads
from test_replica_set import SECOND, Planned, comparable

from helpers.cluster.routing import FreeRowsFirst, LeastOutstandingTokens, RoundRobin
from helpers.engine import EngineConfig
from helpers.simulator import CostModel, Lifetime, TimedRequest, simulate_disaggregated
from tests.support.autoscalers import with_window

PER_TOKEN = CostModel(iterations=1.0, tokens=0.1)


def disaggregated(
    requests, config, cost, prefills=1, decodes=1, seconds_per_token=0.0, wrap=lambda router: router, **options
):
    routers = wrap(RoundRobin()), wrap(LeastOutstandingTokens())
    return simulate_disaggregated(
        requests, config, cost, prefills, decodes, *routers, seconds_per_token=seconds_per_token, **options
    )


@settings(max_examples=150, phases=[Phase.generate])
@given(
    workload=workloads(),
    numbers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seconds_per_token=st.sampled_from([0.0, 1e-4, 0.1]),
    gaps=st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.3]), st.integers(0, 2)), max_size=8),
    scales=st.tuples(st.booleans(), st.booleans()),
    start_seconds=st.sampled_from([0.0, 0.05, 1.0]),
    wrap=st.sampled_from([FreeRowsFirst, lambda router: router]),
)
def test_each_token_is_computed_once_by_the_right_kind_of_replica_and_again_only_if_a_replica_fails(
    workload, numbers, seconds_per_token, gaps, scales, start_seconds, wrap
):
    config, requests = workload
    times = itertools.accumulate(gap for gap, _ in gaps)
    failures = [(time, place % numbers[1]) for time, (_, place) in zip(times, gaps, strict=True)]
    results = []
    for skip in (True, False):
        scalers = [with_window(2)(1, 3, target=2, interval=0.1) if one else None for one in scales]
        options = {"prefill_autoscaler": scalers[0], "decode_autoscaler": scalers[1], "decode_failures": failures}
        options |= {"wrap": wrap, "start_seconds": start_seconds}
        with stretches(skip):
            results.append(disaggregated(requests, config, COST, *numbers, seconds_per_token, **options))

    result, planned = results
    assert comparable(result) == comparable(planned)
    prefills = result.prefill_replicas
    lengths = [(len(request.prompt), request.output_tokens) for request in requests]
    assert sorted(zip(result.prompt_tokens, result.output_tokens, strict=True)) == sorted(lengths)
    for one in result.requests:
        moved = one.prompt_tokens * (one.output_tokens > 1)
        assert one.arrival < one.first_token <= one.last_token - moved * seconds_per_token + 1e-9
    if not gaps and not any(scales):
        assert (prefills, len(result.iterations)) == (numbers[0], sum(numbers))
    if not any(result.preemptions):
        if not gaps:
            assert sum(result.computed_tokens[prefills:]) == sum(output - 1 for _, output in lengths)
        if not config.prefix_caching:
            needed = sum(prompt + output - 1 for prompt, output in lengths)
            assert sum(result.computed_tokens) == needed + result.lost_tokens


def test_the_keys_and_values_on_a_decode_replica_that_fails_are_computed_again_on_another_one():
    requests = [TimedRequest(0.0, 10, 6), TimedRequest(0.0, 20, 6), TimedRequest(0.0, 30, 2)]
    config = EngineConfig(max_batch_size=1)
    result = disaggregated(requests, config, SECOND, 3, 2, decode_failures=[(3.5, 0)], start_seconds=9.0)
    # The first and the third request share a row: the third one has not been computed on the replica that fails at 4.0.
    assert result.computed_tokens[:3] == [10, 20, 30]
    assert (result.resumed, result.lost_tokens) == (2, 10 + 3 + 30)
    assert result.computed_tokens[3:] == [3, 5 + 14 + 1 + 31, 0]
    assert sorted(zip(result.prompt_tokens, result.last_tokens, strict=True)) == [(10, 8.0), (20, 6.0), (30, 9.0)]
    assert result.lifetimes[3:] == [Lifetime(0.0, 0.0, 4.0), Lifetime(0.0, 0.0, 9.0), Lifetime(4.0, 13.0, 9.0)]


def test_each_kind_of_replica_grows_with_its_own_requests():
    requests = [TimedRequest(0.0, 1, 4) for _ in range(3)]
    prefills, decodes = Planned(2, 1), Planned(2)
    result = disaggregated(
        requests,
        EngineConfig(max_batch_size=1),
        SECOND,
        prefill_autoscaler=prefills,
        decode_autoscaler=decodes,
        start_seconds=1.5,
    )
    # The prompts end at 1.0, 2.0 and 3.0. The decode replica, which has a row, ends outputs at 4.0, 7.0 and 10.0.
    assert sorted(result.last_tokens) == [4.0, 7.0, 10.0]
    assert prefills.seen[:4] == [2, 1, 0, 0] and decodes.seen[:4] == [1, 2, 2, 2]
    assert result.lifetimes == [
        Lifetime(0.0, 0.0, 10.0), Lifetime(1.0, 2.5, 2.0), Lifetime(0.0, 0.0, 10.0), Lifetime(2.0, 3.5, 10.0),
    ]  # fmt: skip


def test_the_times_of_one_prefill_replica_and_one_decode_replica_are_those_computed_by_hand():
    requests = [TimedRequest(0.0, 10, 3), TimedRequest(0.5, 20, 2), TimedRequest(0.5, 30, 1)]
    config = EngineConfig(max_batch_size=4, max_tokens_per_step=30)
    free = disaggregated(requests, config, PER_TOKEN)
    slow = disaggregated(requests, config, PER_TOKEN, seconds_per_token=0.2)
    # Prefill: 10 tokens until 2.0, then 20 + 10 until 6.0, then 20 until 9.0. Decode: 1.1 s for one row.
    assert {one.prompt_tokens: one.first_token for one in free.requests} == {10: 2.0, 20: 6.0, 30: 9.0}
    assert {one.prompt_tokens: one.last_token for one in free.requests} == pytest.approx({10: 4.2, 20: 7.1, 30: 9.0})
    # The transfers end at 2.0 + 2.0 and 6.0 + 4.0.
    assert {one.prompt_tokens: one.last_token for one in slow.requests} == pytest.approx({10: 6.2, 20: 11.1, 30: 9.0})
    assert free.computed_tokens == slow.computed_tokens == [60, 3]


def test_a_request_that_fits_no_decode_replica_is_refused():
    decodes = EngineConfig(num_blocks=4)
    with pytest.raises(ValueError, match="7 blocks of 16 tokens, and this engine has 4"):
        disaggregated([TimedRequest(0.0, 100, 3)], EngineConfig(), COST, decode_config=decodes)
    with pytest.raises(ValueError, match="at least 0, not nan"):
        disaggregated([TimedRequest(0.0, 100, 3)], EngineConfig(), COST, seconds_per_token=float("nan"))
    with pytest.raises(ValueError, match="1 prompt token and 1 output token, not 5 and 0"):
        disaggregated([TimedRequest(0.0, 5, 0)], EngineConfig(), COST)
