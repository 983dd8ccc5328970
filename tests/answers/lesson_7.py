"""Answers to the exercises of lesson 7."""

from itertools import groupby

import numpy as np

from answers import ALMOST, WRONG, right


@right("slices_of")
def by_their_differences(table, start, end, block_size):
    """Slots minus their places are equal within a slice."""
    blocks = [table[token // block_size] if token // block_size < len(table) else -1 for token in range(start, end)]
    if -1 in blocks:
        return None
    slots = [block * block_size + (start + index) % block_size for index, block in enumerate(blocks)]
    groups = groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0])
    return [[(slice_ := [slot for _, slot in group])[0], np.int64(len(slice_))] for _, group in groups]


def half_an_allocation(free, tables, request, tokens, block_size, refusal=None):
    new = []
    while len(tables.get(request, [])) * block_size < tokens:
        if not free:
            return refusal and new
        new.append(free.pop(0))
        tables[request] = [*tables.get(request, []), new[-1]]
    return new


def with_table(change):
    """Return a function that changes the table of a request whose new blocks are `new`, and returns these."""

    def changed(new, free, tables, request, *_):
        if new:
            tables[request] = change(tables[request], new)
        return new

    return changed


@right("grow")
def block_after_block(free, tables, request, tokens, block_size):
    table, new, spare = tables.get(request, []), [], list(free)
    while (len(table) + len(new)) * block_size < tokens:
        if not spare:
            return None
        new.append(spare.pop())  # which of them makes no difference
    tables[request], free[:] = table + new, spare
    return new


ALMOST["grow"] |= {
    "has block 3 in a table and in `free`": lambda new, free, *_: (new and free.extend(new)) or new,
    "has block 3 in a table twice": with_table(lambda table, new: table[: -len(new)] + new[:1] * len(new)),
    "should be [0, 2, 3], but is [3, 2, 0]": with_table(lambda table, new: sorted(table, reverse=True)),
    "loses the blocks [5]": lambda new, free, *_: free.clear() or new,
    "leaves an empty table behind": lambda new, free, tables, name, *_: tables.setdefault(name, []) and new,
    "changes the table of 'a'": lambda new, free, tables, name, *_: (
        ("a" in tables and name == "b" and tables["a"].clear()) or new
    ),
}
WRONG["grow"] |= {
    "refuses, but keeps blocks": half_an_allocation,
    "returns blocks although too few are free": lambda *books: half_an_allocation(*books, refusal=True),
}


@right("preempted")
def one_after_the_other(running, tables, free, request, missing):
    leaving, newer = [], running[running.index(request) :]
    while free < missing and newer:
        leaving.append(newer.pop())
        free += len(tables[leaving[-1]])
    return leaving


WRONG["preempted"] |= {
    "changed its argument: `tables`": lambda running, tables, *rest: [
        tables.pop(name) and name for name in one_after_the_other(running, tables, *rest)
    ],
}
