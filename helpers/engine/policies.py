"""Policies: the order in which waiting requests are admitted. A policy is an object with a method `order`.

A policy decides nothing else. The scheduler admits sequences in this order until one does not fit. It never skips that
one, so smaller sequences cannot keep overtaking a large one.

A long queue must not slow down an iteration, so an iteration does not visit all waiting sequences. The queue is in
order of arrival, and grouped by the attribute that a policy ranks. The policy compares groups (of equal `max_tokens` or
of equal `priority`), each in order of arrival, and takes the first sequence of the best group.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from .sequence import Sequence


class Policy:
    """The base of all policies: they differ in `order` alone."""

    def order(self, waiting: "WaitingQueue", running: Seq[Sequence]) -> Iterable[Sequence]:
        """Return the sequences that may be admitted now, in the order in which to admit them.

        Args:
            waiting: sequences without a row; iterates in order of arrival, and can be grouped.
            running: sequences with a row, in the order in which they got it.
        """
        raise NotImplementedError


class FirstComeFirstServed(Policy):
    """Admits sequences in order of arrival."""

    def order(self, waiting, running):
        return waiting


class Static(Policy):
    """Static batching as a policy: admits sequences only when all rows are free."""

    def order(self, waiting, running):
        return () if running else waiting


class LongestFirst(Policy):
    """Admits the longest outputs first, in three classes (ColossalAI's request handler keeps three such queues).

    Every output token takes an iteration, so a long request that starts last finishes alone. The classes are thirds of
    the largest `max_tokens` in the queue. Within a class, requests keep their order of arrival. `max_tokens` is a
    limit, not a length: EOS may come sooner. Short requests may wait for as long as longer ones keep arriving.
    """

    def order(self, waiting, running):
        longest = next((limit for limit, _ in waiting.grouped_by("max_tokens", descending=True)), 0)
        groups = waiting.grouped_by("max_tokens", descending=True)
        classes = groupby(groups, key=lambda group: 3 * group[0] // (longest + 1))
        return chain.from_iterable(merged(group for _, group in groups) for _, groups in classes)


class ShortestFirst(Policy):
    """Admits the smallest `max_tokens` first: the lowest mean latency, at the expense of long requests."""

    def order(self, waiting, running):
        return chain.from_iterable(group for _, group in waiting.grouped_by("max_tokens"))


class Priority(Policy):
    """Admits the most urgent requests first: those with the smallest number, which waiting lowers, so none starves."""

    aging = 50  # the number of iterations since its arrival that make a request more urgent by 1

    def order(self, waiting, running):
        groups = (group for _, group in waiting.grouped_by("priority"))
        return merged(groups, key=lambda sequence: sequence.priority - sequence.waited // self.aging)


class Balanced(Policy):
    """Lets running requests decode undisturbed until enough requests wait to justify an interruption.

    Both limits are text-generation-inference's.
    """

    waiting_served_ratio = 0.3  # admit once the waiting requests divided by the running ones reach this
    max_waiting_tokens = 20  # admit, too, once the first request in the queue has waited this many iterations

    def order(self, waiting, running):
        enough = len(waiting) >= self.waiting_served_ratio * len(running)
        overdue = len(waiting) > 0 and next(iter(waiting)).waited >= self.max_waiting_tokens
        return waiting if enough or overdue else ()


POLICIES = {
    "static": Static,
    "fcfs": FirstComeFirstServed,
    "longest_first": LongestFirst,
    "shortest_first": ShortestFirst,
    "priority": Priority,
    "balanced": Balanced,
}


def make_policy(policy: str | Policy) -> Policy:
    """Return the policy of this name; an object with a method `order` is returned as it is.

    Raises:
        ValueError: no policy has that name, or the object is a class or has no method `order`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"There is no policy {policy!r}: choose one of {', '.join(POLICIES)}.")
        return POLICIES[policy]()
    if isinstance(policy, type):
        raise ValueError(f"{policy.__name__} is a class: give an object, such as {policy.__name__}().")
    if not callable(getattr(policy, "order", None)):
        raise ValueError(f"A policy is a name or an object with a method `order(waiting, running)`, not {policy!r}.")
    return policy


_number = attrgetter("number")


class WaitingQueue:
    """A queue of sequences that wait for a row; iterates in order of arrival.

    Attributes:
        step: the number of the current iteration. An iterator sets the `waited` of each sequence that it yields.
    """

    def __init__(self):
        self.step = 0
        self._in_order: list[Sequence] = []
        self._groups: dict[str, dict[Any, list[Sequence]]] = {}  # by attribute, then by its value
        self._values: dict[str, list] = {}  # the values of each attribute, ascending
        self._added_at: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._in_order, sequence.number, key=_number)
        return index < len(self._in_order) and self._in_order[index] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        return map(self._counted, self._in_order)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order of arrival: a preempted one comes before later arrivals."""
        self._added_at.setdefault(sequence, self.step)
        insort(self._in_order, sequence, key=_number)
        for attribute in self._groups:
            self._add_to_group(attribute, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a row or has finished."""
        del self._in_order[bisect_left(self._in_order, sequence.number, key=_number)]
        for attribute in self._groups:
            self._remove_from_group(attribute, sequence)

    def forget(self, sequence: Sequence) -> None:
        """Stop counting the waiting time of a sequence that has finished."""
        self._added_at.pop(sequence, None)

    def grouped_by(self, attribute: str, descending: bool = False) -> Iterator[tuple[Any, Iterator[Sequence]]]:
        """Yield the values of an attribute, each with the sequences that have it, in order of arrival.

        Only the first call with an attribute visits all sequences.
        """
        if attribute not in self._groups:
            self._groups[attribute], self._values[attribute] = {}, []
            for sequence in self._in_order:
                self._add_to_group(attribute, sequence)
        groups, values = self._groups[attribute], self._values[attribute]
        return ((value, map(self._counted, groups[value])) for value in (reversed(values) if descending else values))

    def _add_to_group(self, attribute: str, sequence: Sequence) -> None:
        groups, value = self._groups[attribute], getattr(sequence, attribute)
        if value not in groups:
            groups[value] = []
            insort(self._values[attribute], value)
        insort(groups[value], sequence, key=_number)

    def _remove_from_group(self, attribute: str, sequence: Sequence) -> None:
        groups, value = self._groups[attribute], getattr(sequence, attribute)
        group, values = groups[value], self._values[attribute]
        del group[bisect_left(group, sequence.number, key=_number)]
        if not group:
            del groups[value], values[bisect_left(values, value)]

    def _counted(self, sequence: Sequence) -> Sequence:
        sequence.waited = self.step - self._added_at[sequence]
        return sequence


def merged(groups: Iterable[Iterable[Sequence]], key: Callable[[Sequence], Any] = lambda _: 0) -> Iterator[Sequence]:
    """Yield the sequences of several groups, smallest key first, equal keys in order of arrival.

    Args:
        groups: each one already in this order. They are read lazily, so no group is read further than needed.
        key: ranks the sequences; by default, only the order of arrival counts.
    """
    return heapq.merge(*groups, key=lambda sequence: (key(sequence), sequence.number))
