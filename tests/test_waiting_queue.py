"""The waiting queue: whatever joins, leaves and returns, its orders are those of a plain list, sorted."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.engine import POLICIES, Priority, Sequence
from helpers.engine.policies import WaitingQueue, merged
from tests.simulation import KEYS

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
