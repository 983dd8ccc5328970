"""The waiting queue: whatever joins, leaves and returns, its orders are those of a plain list, sorted."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.engine import POLICIES, Priority, Sequence
from helpers.engine.policies import WaitingQueue, merged
from tests.simulation import KEYS, operations, queue_of

ORDERS = [(policy(), KEYS[name]) for name, policy in POLICIES.items()]
ORDERS += [(Priority(aging=n), lambda one, _, n=n: one.priority - one.waited // n) for n in (1, 3)]


def sequence(number: int, max_tokens: int = 4, priority: int = 0) -> Sequence:
    one = Sequence(number, [0], max_tokens, priority=priority)
    one.number = number
    return one


def check(queue: WaitingQueue, expected: list[Sequence], added_at: dict[Sequence, int]) -> None:
    """Compare every question that a queue answers with the answer of a plain list."""
    expected = sorted(expected, key=lambda one: one.number)
    assert list(queue) == expected and len(queue) == len(expected)
    assert all((one in queue) == (one in expected) for one in added_at)
    for one in queue:
        assert one.waited == queue.step - added_at[one]
    for attribute in ("max_tokens", "priority"):
        groups = {value: list(group) for value, group in queue.grouped_by(attribute)}
        values = {getattr(one, attribute) for one in expected}
        assert groups == {value: [one for one in expected if getattr(one, attribute) == value] for value in values}
        assert list(merged(groups.values())) == expected
    longest = max((one.max_tokens for one in expected), default=0)
    for policy, key in ORDERS:
        assert list(policy.order(queue, [])) == sorted(expected, key=lambda one, key=key: key(one, longest))


@settings(max_examples=300, phases=[Phase.generate])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(1, 9), st.integers(-2, 2)), max_size=40))
def test_every_order_is_that_of_sorting_the_whole_list(actions):
    queue, waiting, running, added_at = WaitingQueue(), [], [], {}
    for place, (action, which, max_tokens, priority) in enumerate(actions):
        if action <= 1:  # a request arrives
            new = sequence(len(added_at), max_tokens, priority)
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
        if place % 7 == 6 or place == len(actions) - 1:  # not at first: a queue may be grouped when it is full
            check(queue, waiting, added_at)


def test_a_sequence_that_has_ended_leaves_nothing_behind():
    queue = WaitingQueue()
    queue.grouped_by("max_tokens")
    for number in range(3):
        queue.add(one := sequence(number, max_tokens=number + 1))
        queue.remove(one)
        queue.forget(one)
    assert not queue._added_at and not queue._in_order and not any(queue._groups.values())


# --- costs ------------------------------------------------------------------------------------------------------------


def full_queue(count: int) -> WaitingQueue:
    """Return a queue with five limits and two priorities, grouped by both."""
    queue = queue_of(sequence(number, 1 + number % 5, number % 2) for number in range(count))
    queue.grouped_by("max_tokens"), queue.grouped_by("priority")
    return queue


@pytest.mark.parametrize("taken", [1, 3])
def test_the_best_are_found_by_comparing_the_first_of_each_group(taken):
    evaluated = []

    def key(one: Sequence) -> int:
        evaluated.append(one)
        return one.max_tokens

    ranked = merged((group for _, group in full_queue(10_000).grouped_by("max_tokens")), key)
    assert not evaluated, "an order of which nothing is taken costs nothing"
    assert [next(ranked).number for _ in range(taken)] == [0, 5, 10][:taken]
    assert len(evaluated) <= 5 + taken


def in_the_middle(count: int) -> Callable[[], None]:
    queue = full_queue(count)
    one = list(queue)[count // 2]

    def work():
        queue.remove(one)
        assert one not in queue
        queue.add(one)
        assert next(iter(queue)).number == 0

    return work


def test_joining_and_leaving_cost_a_few_binary_searches_in_a_queue_of_ten_thousand():
    costs = [operations(in_the_middle(count)) for count in (100, 10_000)]
    assert costs[1] <= 2 * costs[0], "a binary search takes twice the steps for the square of the length"
