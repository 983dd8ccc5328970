"""Lesson 8, prefix sharing: allocation of blocks that others have, too, and their release."""

from ..block_books import audit, books_after
from ..exercise import Exercise
from .lesson_7_blocks import all_or_nothing, any_free_block, ceiling, is_in_order

allocate = Exercise(
    "allocate(free, tables, request, tokens, block_size, shared)",
    "a shared block costs nothing, but one that is in `free` is no longer free",
    observe=books_after,
)


@allocate.cases
def _(random):
    a, blocks = {"a": [0, 2]}, random.sample(range(20), 12)
    drawn = blocks[7:], {"d": blocks[:2], "c": blocks[2:7]}
    for free, tables, request, tokens, size, *shared in [
        *[([3, 7, 5], a, "c", tokens, 4, *shared) for tokens, *shared in [(9, 0), (16, 0, 7), (12, 3, 5), (8, 5, 3)]],
        *[([3, 7], a, "c", tokens, 4, *shared) for tokens, *shared in [(12, 3, 7), (13, 7, 3), (16, 0, 7), (20, 0, 2)]],
        *[([7, 3], a, "c", tokens, 4, *shared) for tokens, *shared in [(16, 0, 2), (9, 2, 0, 3)]],
        *[([3, 7], a, request, tokens, 4) for request, tokens in [("c", 8), ("c", 9), ("a", 8), ("a", 13)]],
        ([5], {"b": [9]}, "c", 8, 4, 9), ([5], {"b": [9]}, "c", 12, 4, 5), ([5], {"b": [9]}, "c", 8, 4, 9, 5),
        ([6, 5], {"b": [9]}, "c", 12, 4, 5, 9, 6), (*drawn, "new", random.randint(7, 18), 3, blocks[2], blocks[8]),
    ]:  # fmt: skip
        given = f"free {free}, tables {tables}; {request!r} asks for room for {tokens} tokens, blocks of {size}"
        yield (free, tables, request, tokens, size, shared), given + f", shared {shared}" * bool(shared)


allocate.ignoring(any_free_block)
allocate.reference(all_or_nothing)
allocate.add_misconceptions({
    "leaves shared blocks in `free`: the next request would overwrite keys that are in use.":
        {"reuse": lambda shared, free: []},
    "counts shared blocks that are in `free` as free: the request cannot get them twice.":
        {"reserve": lambda reused: 0},
    "refuses where only the shared blocks in `free` are left, although no other block is missing.":
        {"refuse": lambda m, f, h: m > f or f == 0},
    "subtracts all shared blocks from those that are free: one that is in another request's table was not free.":
        lambda f, t, r, n, b, s: None if ceiling(n, b) - len(s) > len(f) - len(s) and r not in t else (
            all_or_nothing(f, t, r, n, b, s)),
    "takes every shared block out of `free`, but some are in another request's table.":
        {"reuse": lambda shared, free: shared},
    "takes only the first shared block out of `free`.":
        {"reuse": lambda shared, free: [block for block in shared if block in free][:1]},
    "takes new blocks for the shared ones, too: their tokens would be computed again.":
        lambda *books: all_or_nothing(*books[:5], []),
    "does not put the shared blocks into the table: the request's first tokens would have no keys.":
        lambda f, t, r, n, b, s: all_or_nothing(f, t, r, n, b, s, join=lambda table, new: (
            t[r] + new if r in t else new)),
    "puts the shared blocks behind the new ones: they hold the beginning of the text.":
        lambda f, t, r, n, b, s: all_or_nothing(f, t, r, n, b, s, join=lambda table, new: (
            t[r] + new if r in t else new + s)),
    "returns the shared blocks, too: the task asks for the new ones.":
        lambda f, t, r, n, b, s: all_or_nothing(f, t, r, n, b, s, give=lambda new, table: table[: len(s)] + new),
})  # fmt: skip
allocate.rule(is_in_order)


@allocate.rule
def keeps_the_caller_s_list(arguments, outcome, right):
    """Report a list of shared blocks that has lost some; a table may be that very list, so it may grow."""
    shared = arguments[-1]
    if list(outcome.result["arguments"][-1][: len(shared)]) == shared:
        return None
    return "takes blocks out of the caller's list `shared`, which still needs it"


release = Exercise(
    "release(free, tables, request)",
    "a block becomes free only if no other request has it",
    observe=books_after,
)


@release.cases
def _(random):
    abc = {"a": [6], "b": [6, 1, 8], "c": [6, 1, 2]}
    *shared, one, two, three, four = random.sample(range(20), 7)
    for free, tables, request in [
        ([4], {"a": [2, 5], "b": [0, 1, 3]}, "b"), ([], {"a": [2]}, "a"), ([5], {"a": [6, 1, 2], "b": [6, 1, 8]}, "a"),
        ([], abc, "b"), ([7, 0], dict(reversed(abc.items())), "b"), ([5], {"a": [3, 7], "b": [3, 7]}, "b"),
        ([5, 2], {"b": [6, 1, 8]}, "b"),
        ([four], {"d": [*shared, one], "c": [*shared, two, three], "b": shared[:1]}, random.choice("dcb")),
    ]:  # fmt: skip
        yield (free, tables, request), f"free {free}, tables {tables}; {request!r} leaves"


@release.ignoring
def order_and_result(result, arguments):
    return {"tables": result["tables"], "free": sorted(result["free"])}


@release.reference
def unless_used(free, tables, request, freed=lambda own, table: own):
    """Release blocks, with a replaceable part: which of the table's are freed, given those that no other table has."""
    table = tables.pop(request)
    free += freed([block for block in table if not any(block in other for other in tables.values())], table)


release.add_misconceptions({
    "frees blocks that are in another table: the next request would overwrite keys in use.": lambda own, table: table,
    "frees nothing if some blocks are shared: the others must become free.": lambda own, table: own * (own == table),
    "frees no block: without a table and not in `free`, a block is lost. (`free = ...` makes a new list and leaves "
    "the caller's unchanged.)": lambda own, table: [],
    "frees only the last block: the others are lost.":
        lambda own, table: [block for block in table[-1:] if block in own],
    "puts a list into `free`, which holds block numbers.": lambda own, table: [own],
}, part="freed")  # fmt: skip
release.add_misconceptions({
    "changes nothing: the blocks become free, and the table is removed.": lambda free, tables, request: None,
    "keeps the table: its blocks will hold other requests' tokens.":
        lambda f, t, request: unless_used(f, {**t}, request),
    "leaves an empty table behind, as if the request ran.": lambda f, t, r: t.update({r: unless_used(f, t, r) or []}),
})  # fmt: skip
release.rule(lambda arguments, outcome, right: audit(*arguments, outcome.result["free"], outcome.result["tables"]))
