"""Lesson 9's queue under load: rows are full and never more than full, and a bound changes what is in time."""

import math
from itertools import accumulate
from random import Random

import pytest
from answers import solutions

from helpers.checks import simulate_queue


def test_rows_behind_a_queue_are_full_and_never_more_than_full():
    draw = Random(3)
    arrivals = list(accumulate(draw.expovariate(5) for _ in range(300)))
    requests = simulate_queue(solutions.BoundedQueue(4, 6, 1.0), arrivals)
    running = [(times[0] - 0.05 + 1e-9, times[-1]) for _, times in requests if times]
    assert [sent for sent, _ in requests] == arrivals
    assert all(len(times) in (0, 20) and all(time > sent for time in times) for sent, times in requests)
    assert max(sum(begin <= now < end for begin, end in running) for now, _ in running) == 4
    waits = [times[0] - 0.05 - sent for sent, times in requests if times]
    assert min(waits) == pytest.approx(0, abs=1e-9)
    assert 1 < max(waits) < 2 + 1e-9, "the sixth request in the queue waits for two ends of a row at most"
    assert any(not times for _, times in requests)


def test_a_long_queue_serves_as_many_and_hardly_any_in_time():
    draw = Random(7)
    arrivals, served, in_time = list(accumulate(draw.expovariate(10) for _ in range(600))), {}, {}
    for max_queue in (0, 4, 64, 600):
        results = simulate_queue(solutions.BoundedQueue(8, max_queue, 1.0), arrivals)
        requests = [(sent, times) for sent, times in results if times]
        seconds = max(times[-1] for _, times in requests)
        served[max_queue] = len(requests) / seconds
        in_time[max_queue] = sum(times[0] - sent <= 1 for sent, times in requests) / seconds
    assert served[0] < 7 < 7.5 < served[4] < served[64] < served[600] < 8
    assert math.isclose(in_time[4], served[4]) and math.isclose(in_time[0], served[0])
    assert in_time[64] < 0.5 and in_time[600] < 0.5
