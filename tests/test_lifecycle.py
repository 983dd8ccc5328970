"""Which replica is started or drained next, and how many there should be: the rules alone, without processes."""

import pytest

from helpers.cluster.lifecycle import DRAINING, READY, STARTING, Drain, Member, Start, next_change
from tests.support.autoscalers import with_window


@pytest.mark.parametrize(
    "states, wanted, change",
    [
        ([], 1, Start(0)),
        ([READY], 3, Start(1)),
        ([READY, STARTING], 2, None),
        ([READY, READY, STARTING], 2, 2),  # the one that is not ready yet
        ([READY, READY, READY], 2, 1),  # the one with the least work
        ([READY, DRAINING], 2, Start(1)),  # the one that drains is not wanted again
        ([READY, DRAINING], 1, None),
    ],
)
def test_replicas_are_started_and_drained_until_as_many_are_ready_as_are_wanted(states, wanted, change):
    members = [Member(place, 0, state=state) for place, state in enumerate(states)]
    load = {member: number for member, number in zip(members, (2, 0, 1), strict=False)}
    expected = Drain(members[change]) if isinstance(change, int) else change
    assert next_change(members, wanted, 0, load.get) == expected


def test_of_replicas_with_equal_work_the_newest_drains():
    members = [Member(place, 0, state=READY) for place in range(3)]
    assert next_change(members, 2, 0, lambda member: 0) == Drain(members[2])


def test_in_a_rolling_restart_a_replica_drains_only_while_all_others_are_ready():
    old, other, new = Member(0, 0, state=READY), Member(1, 0, state=READY), Member(0, 1, state=STARTING)
    assert next_change([old, other], 2, 1, None) == Drain(old)
    old.state = DRAINING
    assert next_change([old, other], 2, 1, None) == Start(0)
    assert next_change([other, old, new], 2, 1, None) is None
    assert next_change([other, new], 2, 1, None) is None
    new.state = READY
    assert next_change([other, old, new], 2, 1, None) is None
    assert next_change([other, new], 2, 1, None) == Drain(other)
    assert next_change([new, Member(1, 1, state=READY)], 2, 1, None) is None


# --- how many there should be ---------------------------------------------------------------------------------------


def test_there_are_as_many_replicas_as_the_unfinished_requests_need_within_the_limits():
    autoscaler = with_window(1)(2, 5, target=10)
    answers = [autoscaler.desired(unfinished) for unfinished in (0, 20, 21, 30, 50, 51, 1000)]
    assert answers == [2, 2, 3, 3, 5, 5, 5]


def test_replicas_stop_only_after_as_many_decisions_in_a_row_as_the_window():
    autoscaler = with_window(3)(1, 8, target=10)
    answers = [autoscaler.desired(unfinished) for unfinished in (80, 10, 10, 40, 10, 10, 10, 10)]
    assert answers == [8, 8, 8, 4, 4, 4, 1, 1]
