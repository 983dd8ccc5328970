"""Every metric computed by hand, on requests that arrive and end at unequal times."""

import pytest
import torch

from helpers.metrics import RequestMetrics, percentile, request_metrics, throughput
from helpers.trace import Trace


def test_the_four_latencies_of_a_request():
    request = RequestMetrics("x", arrival=2.0, token_times=[5.0, 5.5, 7.5, 8.0])
    assert request.ttft == 3.0
    assert request.itl == [0.5, 2.0, 0.5]
    assert request.e2e == 6.0
    assert request.tpot == 1.0  # (6 - 3) / (4 - 1)


def test_one_token_has_no_time_between_tokens():
    request = RequestMetrics("x", arrival=2.0, token_times=[5.0])
    assert request.ttft == request.e2e == 3.0
    assert request.itl == []
    assert request.tpot is None


def trace_of_two() -> Trace:
    """Request a: tokens at 1.5, 2.5 and 3.5 seconds; b: only the second."""

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
        trace.record(batch(*ids), batch(*ids), start, seconds=0.5)
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


def test_percentiles_are_interpolated():
    values = [40, 10, 30, 20]  # unsorted
    assert percentile(values, 0) == 10
    assert percentile(values, 50) == 25
    assert percentile(values, 95) == pytest.approx(38.5)
    assert percentile(values, 100) == 40
    assert percentile([7], 99) == 7


def test_a_percentile_of_nothing_says_what_is_missing():
    with pytest.raises(ValueError, match="no percentile of no values"):
        percentile([], 50)


@pytest.mark.parametrize("percent", [-1, 100.5, float("nan")])
def test_a_percent_outside_0_to_100_is_refused(percent):
    with pytest.raises(ValueError, match="percent is between 0 and 100"):
        percentile([1, 2, 3], percent)
