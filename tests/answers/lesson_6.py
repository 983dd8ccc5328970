"""Answers to the exercises of lesson 6."""

import math
from collections import Counter
from hashlib import sha256

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right
from helpers.checks.exercises.lesson_6 import chain, unless_used

RIGHT["unused_room"] |= {
    "with_ceil": lambda lengths, size: sum(math.ceil(length / size) for length in lengths) * size - sum(lengths),
    "in_numpy": lambda lengths, size: (-np.array(lengths) % size).sum(),
}


@right("slot_of")
def from_a_list_of_all_slots(table, position, block_size):
    slots = [block * block_size + place if block >= 0 else None for block in table for place in range(block_size)]
    return slots[position] if position < len(slots) else None


@right("slot_of")
def with_an_exception(table, position, block_size):
    try:
        block = table[position // block_size]
    except IndexError:
        return None
    return np.int64(block * block_size + position % block_size) if block != -1 else None


WRONG["slot_of"] |= {
    "stopped with TypeError in line": lambda table, position, size: table[position / size] * size + position % size
}


@right("allocate")
def block_after_block(free, tables, request, tokens, block_size):
    table, new, spare = tables.get(request, []), [], list(free)
    while (len(table) + len(new)) * block_size < tokens:
        if not spare:
            return None
        new.append(spare.pop())  # which of them makes no difference
    tables[request], free[:] = table + new, spare
    return new


@right("allocate")
def with_slices(free, tables, request, tokens, block_size):
    needed = math.ceil(tokens / block_size) - len(tables.get(request, ()))
    if len(free) >= needed:
        new = sorted(free)[len(free) - needed :]
        tables.setdefault(request, []).extend(new)
        free[:] = [block for block in free if block not in new]
        return new


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


ALMOST["allocate"] |= {
    "has block 3 in a table and in `free`": lambda new, free, *_: (new and free.extend(new)) or new,
    "has block 3 in a table twice": with_table(lambda table, new: table[: -len(new)] + new[:1] * len(new)),
    "has [3, 7, 1] where a block's number should be": with_table(lambda table, new: [*table[: -len(new)], new]),
    "should be [0, 2, 3], but is [3, 2, 0]": with_table(lambda table, new: sorted(table, reverse=True)),
    "loses the blocks [5]": lambda new, free, *_: free.clear() or new,
    "leaves an empty table behind": lambda new, free, tables, name, *_: tables.setdefault(name, []) and new,
    "changes the table of 'a'": lambda new, free, tables, name, *_: (name == "b" and tables["a"].clear()) or new,
}
WRONG["allocate"] |= {
    "refuses, but keeps blocks": half_an_allocation,
    "returns blocks although too few are free": lambda *books: half_an_allocation(*books, refusal=True),
}


@right("release")
def block_by_block_unless_shared(free, tables, request):
    for block in reversed(tables[request]):
        if sum(block in table for table in tables.values()) == 1:
            free.insert(0, block)
    del tables[request]


@right("release")
def by_counting_references(free, tables, request):
    references = Counter(block for table in tables.values() for block in table)
    for block in tables.pop(request):
        references[block] -= 1
        if references[block] == 0:
            free.append(block)
    return True


def shared_blocks_taken_away(free, tables, request):
    table = tables.pop(request)
    free.extend(table)
    for name, other in tables.items():
        tables[name] = [block for block in other if block not in table]


WRONG["release"] |= {
    "changes the table of 'b', but this was about 'a'": shared_blocks_taken_away,
    "has block 1 in a table and in `free`": lambda free, tables, name: free.extend(
        set(tables.pop(name)).difference(next(iter(tables.values()), []))
    ),
    "has block 0 in `free` twice": lambda *books: unless_used(*books, lambda own, table: own * 2),
    "has block 10, which was neither": lambda *books: unless_used(*books, lambda own, table: [10, *own]),
    "loses the blocks [4]": lambda free, *others: free.clear() or unless_used(free, *others),
}


@right("prefix_hashes")
def with_sha256(token_ids, block_size, salt):
    name, names = salt, []
    for end in range(block_size, len(token_ids) + 1, block_size):
        name = sha256(f"{name}{token_ids[end - block_size : end]}".encode()).hexdigest()
        names.append(name)
    return names


@right("prefix_hashes")
def everything_before_as_the_name(token_ids, block_size, salt):
    """No hash at all, and as good as one, but for its length."""
    return [(salt, *token_ids[:end]) for end in range(block_size, len(token_ids) + 1, block_size)]


NUMBERS = {}


@right("prefix_hashes")
def numbers_from_a_dict(*case):
    return [NUMBERS.setdefault(name, len(NUMBERS)) for name in everything_before_as_the_name(*case)]


WRONG["prefix_hashes"] |= {
    "gives the same name to block 1 of": lambda *case: chain(
        *case, lambda name, block, *_: (len(name) if isinstance(name, str) else name) + hash(tuple(block))
    ),  # a sum does not know the order; a hash of the salt would differ from run to run
    "something up to their ends differs": lambda *case: chain(*case, lambda name, block, *_: (name, block[-1])),
    "up to their ends is the same": lambda ids, size, salt: chain(
        ids, size, salt, lambda name, *_: (name, *ids[: len(ids) // size * size])
    ),
    "returns a list as a name": lambda *case: list(map(list, everything_before_as_the_name(*case))),
    "but returned a set": lambda *case: set(with_sha256(*case)),
    "returns 0 names for [7, 71], which fills 1 blocks of 2": lambda ids, size, salt: with_sha256(ids, 4, salt),
}
ALMOST["prefix_hashes"] |= {"changed its argument: `token_ids`": lambda names, ids, *_: ids.clear() or names}
