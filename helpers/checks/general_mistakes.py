"""Mistakes that any task invites: parts in another order, a value left out, numbers off by one or by a factor.

They are derived from a task's right results, so that no task has to declare them. One is reported if it explains all
results of a function, after the task's own misconceptions: its message says what the results have in common.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, permutations
from math import ceil

import torch

from .comparing import difference, is_number

Change = tuple[str, Callable]  # the message, and a function from a right result to the wrong one

NUMBERS: list[Change] = [
    ("one too large in every case", lambda x: x + 1), ("one too small in every case", lambda x: x - 1),
    ("twice the right value in every case", lambda x: x * 2),
    ("half of the right value in every case", lambda x: x / 2), ("of the wrong sign in every case", lambda x: -x),
    ("the inverse of the right value: what is divided by what?", lambda x: 1 / x if x else x),
    ("cut off to whole numbers, and the fraction counts", int),
    ("rounded to whole numbers, and the fraction counts", round),
    ("rounded up to whole numbers, and the fraction counts", ceil),
    *[(f"{n:,} times the right value in every case", lambda x, n=n: x * n) for n in (8, 100, 1000)],
    *[(f"a part in {n:,} of the right value in every case", lambda x, n=n: x / n) for n in (8, 100, 1000)],
]  # fmt: skip
LISTS: list[Change] = [
    ("in the reverse order", lambda values: values[::-1]), ("sorted, and their order has a meaning", sorted),
    ("sorted from the largest, and their order has a meaning", lambda values: sorted(values, reverse=True)),
    ("without the first one", lambda values: values[1:]), ("without the last one", lambda values: values[:-1]),
    ("without those that occur twice: equal values count, too", lambda values: list(dict.fromkeys(values))),
    ("added up to a single number", sum), ("counted: the task asks for the values themselves", len),
    ("in lists of their own, one each", lambda values: [[value] for value in values]),
    ("as running totals", lambda values: list(accumulate(values))),
]  # fmt: skip
TENSORS: list[Change] = [
    ("with the rows in the reverse order", lambda tensor: tensor.flip(0)),
    ("with the columns in the reverse order", lambda tensor: tensor.flip(-1)),
    ("with rows and columns swapped", lambda tensor: tensor.T if tensor.dim() == 2 else tensor),
    ("one too large everywhere", lambda tensor: tensor + 1), ("one too small everywhere", lambda tensor: tensor - 1),
]  # fmt: skip


def general_mistakes(results: list, names: tuple[str, ...] = ()) -> list[Change]:
    """Return the changes that make at least two of a task's right results wrong.

    Args:
        results: the right results; None is left as it is.
        names: of the parts of results that are tuples.
    """
    results = [result for result in results if result is not None]
    return [(message, _safe(change)) for message, change in _changes(results, names) if _spoils(change, results)]


def _changes(results: list, names: tuple[str, ...], what: str = "its results") -> Iterator[Change]:
    def told(changes: list[Change]) -> Iterator[Change]:
        yield from ((f"returns {what} {message}.", change) for message, change in changes)

    if all(isinstance(result, tuple) for result in results):
        count = len(names)
        if not count or any(len(result) != count for result in results):
            return
        for place, other in permutations(range(count), 2):
            message = f"returns {names[other]} as {names[place]}."
            yield message, lambda result, n=place, m=other: (*result[:n], result[m], *result[n + 1 :])
        for order in list(permutations(range(count)))[1:]:
            wanted = ", then ".join(names)
            message = f"returns its results in the wrong order: the task asks for {wanted}."
            yield message, lambda result, order=order: tuple(result[place] for place in order)
        for place, name in enumerate(names):
            yield f"returns only {name}: the task asks for {count} results.", lambda result, n=place: result[n]
            for message, change in _changes([result[place] for result in results], (), name):
                yield message, lambda result, n=place, change=change: (*result[:n], change(result[n]), *result[n + 1 :])
    elif all(is_number(result) for result in results):
        yield from told(NUMBERS)
    elif all(isinstance(result, list) for result in results):
        yield from told(LISTS)
        if all(is_number(value) for result in results for value in result):
            yield from told([(m, lambda values, c=change: [c(value) for value in values]) for m, change in NUMBERS])
    elif all(isinstance(result, torch.Tensor) and result.dim() and result.dtype == torch.int64 for result in results):
        yield from told(TENSORS)


def _safe(change: Callable) -> Callable:
    """Return a change that leaves alone what it cannot change."""

    def changed(result):
        try:
            return result if result is None else change(result)
        except Exception:  # a list of texts has no sum
            return result

    return changed


def _spoils(change: Callable, results: list) -> bool:
    change = _safe(change)
    return sum(difference(change(result), result, strict=False) is not None for result in results) > 1
