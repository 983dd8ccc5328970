"""Which replica is started or drained next, and how many there should be: the rules alone, without processes."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.cluster.autoscaling import QueueLengthAutoscaler
from helpers.cluster.lifecycle import DRAINING, READY, STARTING, Drain, Member, Start, next_change
from tests.support.autoscalers import with_window

MOST = 4


class Replicas:
    """Replicas that exist on paper: they do what the rules say, and get ready, lost or empty when a test says so."""

    def __init__(self, wanted: int):
        self.members: list[Member] = []
        self.wanted, self.generation, self.loads = wanted, 0, {}
        self.change()

    def change(self) -> None:
        """Follow the rules until there is nothing to do."""
        for _ in range(4 * MOST):
            change = next_change(self.members, self.wanted, self.generation, self.load)
            if change is None:
                return
            if isinstance(change, Start):
                self.members.append(Member(change.place, self.generation))
            elif change.member.state == STARTING:
                self.members.remove(change.member)
            else:
                change.member.state = DRAINING
        raise AssertionError("the rules do not come to an end")

    def load(self, member: Member) -> int:
        return self.loads.get(member, 0)

    def in_state(self, state: str) -> list[Member]:
        return [one for one in self.members if one.state == state]

    def get_ready(self) -> None:
        for one in self.in_state(STARTING)[:1]:
            one.state = READY

    def lose(self, index: int) -> None:
        if self.members:
            self.members.pop(index % len(self.members))

    def end_draining(self) -> None:
        for one in self.in_state(DRAINING)[:1]:
            self.members.remove(one)

    def settle(self) -> None:
        """Let every replica that starts get ready, and every one that drains end."""
        steps = {STARTING: self.get_ready, DRAINING: self.end_draining}
        while state := next((state for state in steps if self.in_state(state)), None):
            steps[state]()
            self.change()


events = st.lists(
    st.one_of(
        st.just(("get_ready",)),
        st.just(("end_draining",)),
        st.tuples(st.just("lose"), st.integers(0, MOST)),
        st.tuples(st.just("want"), st.integers(1, MOST)),
        st.just(("restart",)),
    ),
    max_size=30,
)


@settings(max_examples=400, phases=[Phase.generate])
@given(events=events)
def test_whatever_happens_the_replicas_that_are_wanted_are_there_in_the_end(events):
    replicas = Replicas(wanted=2)
    for name, *arguments in events:
        if name == "want":
            replicas.wanted = arguments[0]
        elif name == "restart":
            replicas.generation += 1
        else:
            getattr(replicas, name)(*arguments)
        replicas.change()
        active = [one for one in replicas.members if one.state != DRAINING]
        assert len(active) == replicas.wanted
    replicas.settle()
    assert [one.state for one in replicas.members] == [READY] * replicas.wanted
    assert {one.generation for one in replicas.members} == {replicas.generation}
    assert len({one.place for one in replicas.members}) == replicas.wanted
    assert all(0 <= one.place < MOST for one in replicas.members)


def test_the_replica_with_the_least_work_drains_first_and_the_newest_of_equal_ones():
    replicas = Replicas(wanted=3)
    replicas.settle()
    first, second, third = replicas.members
    replicas.loads = {first: 2, second: 1, third: 1}
    assert next_change(replicas.members, 2, 0, replicas.load) == Drain(third)


def test_a_replica_that_starts_and_is_not_wanted_any_more_never_gets_ready():
    replicas = Replicas(wanted=2)
    replicas.settle()
    replicas.wanted = 3
    replicas.change()
    assert len(replicas.in_state(STARTING)) == 1
    replicas.wanted = 2
    replicas.change()
    assert [one.state for one in replicas.members] == [READY, READY]


def test_a_replica_that_drains_is_not_wanted_again():
    replicas = Replicas(wanted=2)
    replicas.settle()
    for replicas.wanted in (1, 2):
        replicas.change()
    assert [one.state for one in replicas.members] == [READY, DRAINING, STARTING]


# --- how many there should be ---------------------------------------------------------------------------------------


def test_there_are_as_many_replicas_as_the_unfinished_requests_need_within_the_limits():
    autoscaler = with_window(1)(2, 5, target=10)
    answers = [autoscaler.desired(unfinished) for unfinished in (0, 20, 21, 30, 50, 51, 1000)]
    assert answers == [2, 2, 3, 3, 5, 5, 5]


def test_replicas_stop_only_after_as_many_decisions_in_a_row_as_the_window():
    autoscaler = with_window(3)(1, 8, target=10)
    answers = [autoscaler.desired(unfinished) for unfinished in (80, 10, 10, 40, 10, 10, 10, 10)]
    assert answers == [8, 8, 8, 4, 4, 4, 1, 1]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"least": 0}, "at least 1 replica and at most `most`, not 0 to 4"),
        ({"least": 5}, "not 5 to 4"),
        ({"target": 0}, "above 0, not 0 and 10.0"),
        ({"interval": float("nan")}, "above 0, not 8 and nan"),
    ],
)
def test_an_autoscaler_says_which_setting_is_out_of_range(settings, reason):
    with pytest.raises(ValueError, match=reason):
        QueueLengthAutoscaler(**{"least": 1, "most": 4, "target": 8} | settings)
