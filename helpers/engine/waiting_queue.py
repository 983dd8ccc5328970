"""The queue of sequences without a row: in order of arrival, and grouped by the attribute that a policy ranks.

A long queue must not slow down an iteration, so an iteration does not visit all waiting sequences. A policy compares
groups (of equal `max_tokens` or of equal `priority`), each in order of arrival, and takes the first sequence of the
best group.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from .sequence import Sequence

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
        place = bisect_left(self._in_order, sequence.number, key=_number)
        return place < len(self._in_order) and self._in_order[place] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        return map(self._counted, self._in_order)

    def register(self, sequence: Sequence) -> None:
        """Start counting a sequence's waiting time, even if it joins the queue later."""
        self._added_at[sequence] = self.step

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order of arrival: a preempted one comes before later arrivals."""
        self._added_at.setdefault(sequence, self.step)
        insort(self._in_order, sequence, key=_number)
        for attribute in self._groups:
            self._add_to_group(attribute, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a row or has finished."""
        del self._in_order[bisect_left(self._in_order, sequence.number, key=_number)]
        for attribute, groups in self._groups.items():
            value = getattr(sequence, attribute)
            group, values = groups[value], self._values[attribute]
            del group[bisect_left(group, sequence.number, key=_number)]
            if not group:
                del groups[value], values[bisect_left(values, value)]

    def forget(self, sequence: Sequence) -> None:
        """Stop counting the waiting time of a sequence that has finished."""
        self._added_at.pop(sequence, None)

    def clear(self, unfinished: Iterable[Sequence]) -> None:
        """Remove all sequences, and go on counting the waiting time of those that have not finished."""
        self._in_order, self._groups, self._values = [], {}, {}
        self._added_at = {sequence: self._added_at.get(sequence, self.step) for sequence in unfinished}

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
