"""The plan of a fleet: both numbers matter, and a failure costs requests."""

from functools import cache

import pytest

from helpers.checks import fleet_plan
from helpers.checks.fleet_plan import PAGE, REQUESTS, trace

run_plan = cache(fleet_plan.run_plan)


def test_every_trace_has_as_many_pages_and_other_requests():
    first, second = trace(0), trace(1)
    assert len(first) == len(second) == REQUESTS and first != second
    for requests in (first, second):
        assert sum(request.prompt == PAGE for request in requests) == REQUESTS // 10


@pytest.mark.parametrize("seed", [0, 1])
def test_each_number_can_break_the_promise(seed):
    good = run_plan(4, 384, seed)
    assert good.share >= 0.99 and good.late + good.slow >= REQUESTS - good.in_time
    few, large, small = run_plan(3, 384, seed), run_plan(4, 2048, seed), run_plan(4, 128, seed)
    assert max(few.share, large.share, small.share) < 0.99
    assert large.slow > large.late and small.late > small.slow


def test_a_replica_that_fails_makes_requests_late_or_slow():
    calm, hurt = run_plan(4, 384), run_plan(4, 384, failure=True)
    assert hurt.in_time < calm.in_time
    assert run_plan(5, 384, failure=True).in_time > hurt.in_time
