"""Every metric is computed by hand for requests that arrive and end at unequal times."""

import random

import numpy as np
import pytest
import torch

from helpers.metrics import RequestMetrics, goodput, knee, percentile, request_metrics, throughput
from helpers.trace import Trace


def test_the_four_latencies_of_a_request():
    request = RequestMetrics("x", arrival=2.0, token_times=[5.0, 5.5, 7.5, 8.0])
    assert (request.ttft, request.itl, request.e2e) == (3.0, [0.5, 2.0, 0.5], 6.0)
    assert request.tpot == 1.0  # (6 - 3) / (4 - 1)
    one_token = RequestMetrics("x", arrival=2.0, token_times=[5.0])
    assert (one_token.ttft, one_token.itl, one_token.e2e, one_token.tpot) == (3.0, [], 3.0, None)


def trace_of_two() -> Trace:
    """Request a has tokens at 1.5, 2.5 and 3.5 seconds; b has the second one only."""

    def batch(*ids):
        shape = (len(ids), 1)
        return {
            "request_ids": list(ids),
            "input_ids": torch.ones(shape, dtype=torch.long),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "tokens_remaining": [5] * len(ids),
        }

    trace = Trace(rows=2)
    for start, ids in [(1.0, "a"), (2.0, "ab"), (3.0, "a")]:
        trace.record_pass(batch(*ids), batch(*ids), start, seconds=0.5)
    return trace


def test_the_requests_of_a_trace_arrived_at_0_unless_said_otherwise():
    assert request_metrics(trace_of_two()) == [
        RequestMetrics("a", 0.0, [1.5, 2.5, 3.5]),
        RequestMetrics("b", 0.0, [2.5]),
    ]
    a, b = request_metrics(trace_of_two(), {"b": 2.0})
    assert (a.ttft, a.e2e) == (1.5, 3.5)
    assert (b.ttft, b.e2e) == (0.5, 0.5)


def test_throughput_counts_output_tokens_over_the_whole_run():
    assert throughput(trace_of_two()) == 4 / 3.5


def test_goodput_counts_the_requests_that_meet_every_limit():
    requests = [
        RequestMetrics("fast", 0.0, [1.0, 2.0, 3.0]),  # TTFT 1, TPOT 1, E2E 3
        RequestMetrics("late", 0.0, [4.0, 4.5]),  # TTFT 4, TPOT 0.5, E2E 4.5
        RequestMetrics("slow", 5.0, [6.0, 9.0]),  # TTFT 1, TPOT 3, E2E 4
        RequestMetrics("short", 8.0, [10.0]),  # TTFT 2, no TPOT, E2E 2
    ]
    assert goodput(requests, 8.0) == 4 / 8
    assert goodput(requests, 8.0, ttft=2) == 3 / 8  # a TTFT of 2 still meets the limit
    assert goodput(requests, 8.0, tpot=1) == 3 / 8
    assert goodput(requests, 8.0, e2e=4) == 3 / 8
    assert goodput(requests, 8.0, ttft=2, tpot=1) == 2 / 8
    assert goodput(requests, 8.0, ttft=0.5) == goodput([], 8.0) == 0
    with pytest.raises(ValueError, match="more than 0 seconds"):
        goodput(requests, 0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 101])
def test_percentiles_are_those_of_numpy(count):
    draw = random.Random(count)
    values = [draw.expovariate(1) for _ in range(count)]
    for percent in (0, 0.1, 1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100, *(draw.uniform(0, 100) for _ in range(50))):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-14)


@pytest.mark.parametrize("percent", [-1, 100.5, float("nan")])
def test_a_percent_outside_0_to_100_and_a_percentile_of_nothing_are_refused(percent):
    with pytest.raises(ValueError, match="percent is between 0 and 100"):
        percentile([1, 2, 3], percent)
    with pytest.raises(ValueError, match="no percentile of no values"):
        percentile([], 50)


def test_the_knee_is_where_throughput_over_latency_is_greatest():
    # Power: 1, 1.9, 3.6, 4, 1.7
    assert knee([(1, 1), (2, 1.05), (4, 1.1), (6, 1.5), (6.8, 4)]) == 3
    assert knee([(5, 0.5)]) == 0
    with pytest.raises(ValueError, match="no knee of no points"):
        knee([])
