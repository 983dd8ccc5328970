"""Prefill and decode on separate replicas: every token is computed once, and on the right kind of replica."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_fleet import COST, workloads

from helpers.cluster.routing import LeastOutstandingTokens, RoundRobin
from helpers.engine import EngineConfig
from helpers.simulator import CostModel, TimedRequest, simulate_disaggregated

PER_TOKEN = CostModel(iterations=1.0, tokens=0.1)


def disaggregated(requests, config, cost, prefills=1, decodes=1, seconds_per_token=0.0, **options):
    routers = RoundRobin(), LeastOutstandingTokens()
    return simulate_disaggregated(
        requests, config, cost, prefills, decodes, *routers, seconds_per_token=seconds_per_token, **options
    )


@settings(derandomize=True, deadline=None, max_examples=80, phases=[Phase.generate])
@given(workloads(), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 1e-4, 0.1]))
def test_prompts_are_computed_by_prefill_replicas_and_all_other_tokens_by_decode_replicas(
    workload, prefills, decodes, seconds_per_token
):
    config, requests = workload
    result, planned = (
        disaggregated(requests, config, COST, prefills, decodes, seconds_per_token, skip=skip) for skip in (True, False)
    )

    times = (
        sorted((one.arrival, one.first_token, one.last_token) for one in run.requests) for run in (result, planned)
    )
    assert next(times) == next(times)
    assert (result.iterations, result.computed_tokens) == (planned.iterations, planned.computed_tokens)
    lengths = [(len(request.prompt), request.output_tokens) for request in requests]
    assert sorted(zip(result.prompt_tokens, result.output_tokens, strict=True)) == sorted(lengths)
    for one in result.requests:
        moved = one.prompt_tokens * (one.output_tokens > 1)
        assert one.last_token - one.first_token >= moved * seconds_per_token
    if not any(result.preemptions):
        assert sum(result.computed_tokens[prefills:]) == sum(output - 1 for _, output in lengths)
        if not config.prefix_caching:
            assert sum(result.computed_tokens[:prefills]) == sum(prompt for prompt, _ in lengths)


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


def test_a_sequence_that_is_preempted_on_a_decode_replica_is_computed_again_there():
    requests = [TimedRequest(0.0, 8, 9), TimedRequest(0.0, 8, 9)]
    config = EngineConfig(max_batch_size=2, max_tokens_per_step=64, num_blocks=6, block_size=4, prefix_caching=False)

    result = disaggregated(requests, config, PER_TOKEN)

    # With 12 tokens each, both have all 6 blocks. The second one waits until the first one has finished.
    assert result.preemptions == [0, 1]
    assert result.computed_tokens == [16, 8 + 4 + 13 + 3]
    assert sorted(result.output_tokens) == [9, 9]


def test_only_output_tokens_are_outstanding_on_a_decode_replica():
    seen = []

    class Watching(RoundRobin):
        def choose(self, prompt_token_ids, replicas):
            seen.append([replica.outstanding_tokens for replica in replicas])
            return super().choose(prompt_token_ids, replicas)

    requests = [TimedRequest(arrival, 10, 9) for arrival in (0.0, 2.0, 5.0, 50.0)]
    config, cost = EngineConfig(max_batch_size=1), CostModel(iterations=1.0)
    simulate_disaggregated(requests, config, cost, 1, 1, RoundRobin(), Watching(), seconds_per_token=0.0)

    assert seen == [[0], [6], [3 + 8], [0]]  # at 1.0, 3.0, 6.0 and 51.0


def test_a_request_that_fits_no_decode_replica_is_refused():
    decodes = EngineConfig(num_blocks=4)
    with pytest.raises(ValueError, match="7 blocks of 16 tokens, and this engine has 4"):
        disaggregated([TimedRequest(0.0, 100, 3)], EngineConfig(), COST, decode_config=decodes)
    with pytest.raises(ValueError, match="at least 0, not nan"):
        disaggregated([TimedRequest(0.0, 100, 3)], EngineConfig(), COST, seconds_per_token=float("nan"))
    with pytest.raises(ValueError, match="1 prompt token and 1 output token, not 5 and 0"):
        disaggregated([TimedRequest(0.0, 5, 0)], EngineConfig(), COST)
