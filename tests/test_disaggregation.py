"""Prefill and decode on separate replicas: every token is computed once, and on the right kind of replica."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_fleet import COST, stretches, workloads
from test_replica_set import comparable

from helpers.cluster.routing import FreeRowsFirst, LeastOutstandingTokens, RoundRobin
from helpers.engine import EngineConfig
from helpers.simulator import CostModel, TimedRequest, simulate_disaggregated

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
    wrap=st.sampled_from([FreeRowsFirst, lambda router: router]),
)
def test_each_token_is_computed_once_by_the_right_kind_of_replica(workload, numbers, seconds_per_token, wrap):
    config, requests = workload
    results = []
    for skip in (True, False):
        with stretches(skip):
            results.append(disaggregated(requests, config, COST, *numbers, seconds_per_token, wrap=wrap))
    result, planned = results
    assert comparable(result) == comparable(planned)
    lengths = [(len(request.prompt), request.output_tokens) for request in requests]
    assert sorted(zip(result.prompt_tokens, result.output_tokens, strict=True)) == sorted(lengths)
    for request in result.requests:
        moved = request.prompt_tokens * (request.output_tokens > 1)
        assert request.arrival < request.first_token <= request.last_token - moved * seconds_per_token + 1e-9
    assert len(result.iterations) == sum(numbers)
    if not any(result.preemptions):
        assert sum(result.computed_tokens[numbers[0] :]) == sum(output - 1 for _, output in lengths)
        if not config.prefix_caching:
            assert sum(result.computed_tokens) == sum(prompt + output - 1 for prompt, output in lengths)


def test_the_times_of_one_prefill_replica_and_one_decode_replica_are_those_computed_by_hand():
    requests = [TimedRequest(0.0, 10, 3), TimedRequest(0.5, 20, 2), TimedRequest(0.5, 30, 1)]
    config = EngineConfig(max_batch_size=4, max_tokens_per_step=30)
    free = disaggregated(requests, config, PER_TOKEN)
    slow = disaggregated(requests, config, PER_TOKEN, seconds_per_token=0.2)
    # Prefill: 10 tokens until 2.0, then 20 + 10 until 6.0, then 20 until 9.0. Decode: 1.1 s for one row.
    assert {request.prompt_tokens: request.first_token for request in free.requests} == {10: 2.0, 20: 6.0, 30: 9.0}
    ends = {request.prompt_tokens: request.last_token for request in free.requests}
    assert ends == pytest.approx({10: 4.2, 20: 7.1, 30: 9.0})
    # The transfers end at 2.0 + 2.0 and 6.0 + 4.0.
    ends = {request.prompt_tokens: request.last_token for request in slow.requests}
    assert ends == pytest.approx({10: 6.2, 20: 11.1, 30: 9.0})
    assert free.computed_tokens == slow.computed_tokens == [60, 3]


def test_a_request_that_fits_no_decode_replica_is_refused():
    decodes = EngineConfig(num_blocks=4)
    with pytest.raises(ValueError, match="7 blocks of 16 tokens, and this engine has 4"):
        disaggregated([TimedRequest(0.0, 100, 3)], EngineConfig(), COST, decode_config=decodes)
    with pytest.raises(ValueError, match="at least 0, not nan"):
        disaggregated([TimedRequest(0.0, 100, 3)], EngineConfig(), COST, seconds_per_token=float("nan"))
