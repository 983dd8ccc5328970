"""Answers to the exercises of lesson 8."""

import math
from itertools import takewhile

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right, solutions
from helpers.block_hashes import hash_blocks
from helpers.checks.edits import edited


@right("allocate")
def onto_the_list_of_shared_blocks(free, tables, request, tokens, block_size, shared):
    """As the hint says: the table of a new request may be that very list."""
    table, new = tables.get(request, shared), []
    missing = math.ceil(tokens / block_size) - len(table)
    if missing > len(set(free) - set(shared)):
        return None
    for block in set(free) & set(shared):
        free.remove(block)
    for _ in range(missing):
        new.append(free.pop())
        table.append(new[-1])
    tables[request] = table
    return new


def emptying_the_list_of_shared_blocks(free, tables, request, tokens, block_size, shared):
    new = solutions.allocate(free, tables, request, tokens, block_size, list(shared))
    while shared:
        shared.pop()
    return new


WRONG["allocate"] |= {"the caller's list `shared`": emptying_the_list_of_shared_blocks}


@right("release")
def block_by_block_unless_shared(free, tables, request):
    for block in reversed(tables[request]):
        if sum(block in table for table in tables.values()) == 1:
            free.insert(0, block)
    del tables[request]


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
    "has block 0 in `free` twice": edited(solutions.release, "free += -> free += 2 *"),
    "has block 10, which was neither": edited(solutions.release, "free += -> free += [10] +"),
    "loses the blocks [4]": lambda free, *others: free.clear() or solutions.release(free, *others),
}


@right("prefix_hashes")
def everything_before_as_the_name(token_ids, block_size, salt):
    """No hash at all, and as good as one, but for its length."""
    return [(salt, *token_ids[:end]) for end in range(block_size, len(token_ids) + 1, block_size)]


def chain(ids, size, salt, name):
    """Name blocks by the previous name and their tokens."""
    names = [salt]
    for end in range(size, len(ids) + 1, size):
        names.append(name(names[-1], ids[end - size : end]))
    return names[1:]


WRONG["prefix_hashes"] |= {
    "gives the same name to block 1 of": lambda *case: chain(
        *case, lambda name, block, *_: (len(name) if isinstance(name, str) else name) + hash(tuple(block))
    ),  # a sum does not know the order; a hash of the salt would differ from run to run
    "something up to their ends differs": lambda *case: chain(*case, lambda name, block, *_: (name, block[-1])),
    "up to their ends is the same": lambda ids, size, salt: chain(
        ids, size, salt, lambda name, *_: (name, *ids[: len(ids) // size * size])
    ),
    ", although something up": lambda *case: [hash(name) % 100_000 for name in everything_before_as_the_name(*case)],
    "returns a list as a name": lambda *case: list(map(list, everything_before_as_the_name(*case))),
    "calls the course's own `hash_blocks`": lambda ids, size, salt: list(hash_blocks(ids, size, salt.encode())),
    "returns 0 names for [7, 71], which fills 1 blocks of 2": lambda ids, size, salt: everything_before_as_the_name(
        ids, 4, salt
    ),
}
ALMOST["prefix_hashes"] |= {"changed its argument: `token_ids`": lambda names, ids, *_: ids.clear() or names}


@right("reuse")
def until_the_first_gap(names, cached, tokens, block_size):
    usable = names if len(names) * block_size < tokens else names[:-1]
    blocks = [cached[name] for name in takewhile(cached.__contains__, usable)]
    return blocks, np.int64(tokens) - block_size * len(blocks)


ALMOST["reuse"] |= {
    "should be 2 values, the blocks to share and the number of tokens left": lambda result, *_: [result[0]],
}

RIGHT["failing_input"] |= {
    "the_first_block_is_missing": lambda: (["a", "b"], {"b": 7}, 10, 4),
    "as_a_list_with_a_long_gap": lambda: [list("abcdef"), {"a": 0, "e": 3, "z": 1}, 6, 1],
}
WRONG["failing_input"] |= {
    "returns arguments for which": lambda: (["a", "b"], {"a": 4, "b": 9, "x": 2}, 11, 4),
    "should return four arguments": lambda: (["a", "b", "c"], {"a": 4, "c": 9}, 13),
    "returns a name twice": lambda: (["a", "b", "a"], {"a": 4, "b": 9}, 13, 4),
    "is not a dict from names": lambda: (["a", "b", "c"], [4, 9], 13, 4),
    "returns something for `cached` that is not a dict": lambda: (["a", "b", "c"], {"a": "4", "c": 9}, 13, 4),
    "gives two names the same block": lambda: (["a", "b", "c"], {"a": 4, "c": 4}, 13, 4),
    "that is not `tokens // block_size`": lambda: (["a", "b", "c"], {"a": 4, "c": 9}, 9, 4),
}
