"""What each policy prefers, and that none lets a request starve; the waiting queue orders as a sorted list does."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.engine import POLICIES, Balanced, Priority, Sequence
from helpers.engine.policies import WaitingQueue, make_policy, merged
from tests.simulation import KEYS, Simulation, queue_of

REQUESTS = [("a", 4, 0), ("b", 9, 2), ("c", 1, 1), ("d", 8, -1), ("e", 2, 0)]  # name, max_tokens, priority


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", "abcde"),
        ("static", "abcde"),
        ("balanced", "abcde"),
        # The largest limit is 9, so 7 to 9 are long and 4 to 6 medium. Of the long ones, b arrived first. When only c
        # and e are left, e is long.
        ("longest_first", "bdaec"),
        ("shortest_first", "ceadb"),
        ("priority", "daecb"),
    ],
)
def test_the_order_in_which_requests_get_the_only_row(policy, expected):
    simulation = Simulation(policy, rows=1)
    for number, (name, max_tokens, priority) in enumerate(REQUESTS):
        simulation.add(3 + number, max_tokens, name, priority)
    assert "".join(simulation.run()) == expected


def test_balanced_admits_when_enough_requests_wait_or_the_first_has_waited_too_long():
    def admits(waiting: int, running: int, waited: int) -> bool:
        queue = queue_of(Sequence(n, [0] * 3, 5) for n in range(waiting))
        queue.step = waited
        rows = [Sequence(-n, [0] * 4, 5) for n in range(1, running + 1)]
        order = list(Balanced().order(queue, rows))
        assert order in (list(queue), [])
        return bool(order)

    assert admits(1, 0, 0)  # no running request is interrupted
    assert not admits(1, 4, 0) and admits(2, 4, 0)  # 0.3 * 4 = 1.2
    assert admits(3, 10, 0) and not admits(2, 10, 0)
    assert not admits(1, 8, 19) and admits(1, 8, 20)
    assert not admits(0, 8, 0), "an empty queue has no first"


# --- the queue --------------------------------------------------------------------------------------------------------


def aging_policy(iterations: int) -> Priority:
    """Return the policy with another number of iterations for a level."""
    policy = Priority()
    policy.aging = iterations
    return policy


ORDERS = [(policy(), KEYS[name]) for name, policy in POLICIES.items()]

ORDERS += [(aging_policy(n), lambda sequence, _, n=n: sequence.priority - sequence.waited // n) for n in (1, 3)]


def check_queue(queue: WaitingQueue, expected: list[Sequence], added_at: dict[Sequence, int]) -> None:
    """Compare every question that a queue answers with the answer of a plain list."""
    expected = sorted(expected, key=lambda sequence: sequence.number)
    assert list(queue) == expected and len(queue) == len(expected)
    assert all((sequence in queue) == (sequence in expected) for sequence in added_at)
    for sequence in queue:
        assert sequence.waited == queue.step - added_at[sequence]
    for attribute in ("max_tokens", "priority"):
        groups = {value: list(group) for value, group in queue.grouped_by(attribute)}
        values = {getattr(sequence, attribute) for sequence in expected}
        assert groups == {
            value: [sequence for sequence in expected if getattr(sequence, attribute) == value] for value in values
        }
        assert list(merged(groups.values())) == expected
    longest = max((sequence.max_tokens for sequence in expected), default=0)
    for policy, key in ORDERS:
        assert list(policy.order(queue, [])) == sorted(expected, key=lambda sequence, key=key: key(sequence, longest))


@settings(max_examples=300, phases=[Phase.generate])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(1, 9), st.integers(-2, 2)), max_size=40))
def test_every_order_is_that_of_sorting_the_whole_list(actions):
    queue, waiting, running, added_at = WaitingQueue(), [], [], {}
    for index, (action, which, max_tokens, priority) in enumerate(actions):
        if action <= 1:  # a request arrives
            new = Sequence(len(added_at), [0], max_tokens, priority=priority)
            new.number = len(added_at)
            queue.add(new)
            waiting.append(new)
            added_at[new] = queue.step
        elif action == 2 and waiting:  # one is admitted, wherever it is in the queue
            running.append(waiting.pop(which % len(waiting)))
            queue.remove(running[-1])
        elif action == 3 and running:  # one is preempted
            waiting.append(running.pop(which % len(running)))
            queue.add(waiting[-1])
        elif action == 4 and running:  # one ends
            queue.forget(running.pop(which % len(running)))
        else:
            queue.step += which
        if index % 7 == 6 or index == len(actions) - 1:  # not at first: a queue may be grouped when it is full
            check_queue(queue, waiting, added_at)


# --- starvation -------------------------------------------------------------------------------------------------------


def iterations_until_finished(policy, level: int) -> int:
    """Run a request of a priority on one row, while a more urgent one (0) of one token arrives in every iteration."""
    simulation = Simulation(policy, rows=1, tokens=8)
    simulation.add(2, 1, "urgent", 0)
    patient = simulation.add(3, 1, "patient", level)
    for iteration in range(100):
        simulation.step()
        if patient in simulation.finished:
            return iteration
        simulation.add(2, 1, f"urgent {iteration}", 0)
    pytest.fail("it starves")


@pytest.mark.parametrize("aging", [1, 3, 10])
@pytest.mark.parametrize("level", [1, 2, 5])
def test_a_waiting_request_becomes_more_urgent_so_that_none_starves(aging, level):
    # Every `aging` iterations count as a level. After aging * level of them, the request is as urgent as new ones and
    # arrived before them. At most one request of its level arrived earlier, since one arrives and one ends at a time.
    assert aging * (level - 1) < iterations_until_finished(aging_policy(aging), level) <= aging * level + 1


# --- names and objects ------------------------------------------------------------------------------------------------


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"no policy 'sjf': choose one of static, fcfs"):
        make_policy("sjf")
    with pytest.raises(ValueError, match=r"an object with a method `order\(waiting, running\)`, not 7"):
        make_policy(7)
    with pytest.raises(ValueError, match=r"LongestFirst is a class: give an object, such as LongestFirst\(\)"):
        make_policy(POLICIES["longest_first"])
