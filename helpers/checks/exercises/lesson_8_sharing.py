"""Lesson 8, prefix sharing: allocation of blocks that others have, too, and their release."""

from ..block_books import audit, books_after
from ..edits import add_edits
from ..exercise import Exercise
from .lesson_7_blocks import ROOM, A, all_or_nothing, any_free_block, is_in_order

allocate = Exercise(
    "allocate(free, tables, request, tokens, block_size, shared)",
    "a shared block costs nothing, but one that is in `free` is no longer free",
    observe=books_after,
)
B = {"b": [9]}
allocate.table([
    *[([3, 7, 5], A, "c", tokens, 4, shared) for tokens, *shared in [(9, 0), (16, 0, 7), (12, 3, 5), (8, 5, 3)]],
    *[([3, 7], A, "c", tokens, 4, shared) for tokens, *shared in [(12, 3, 7), (13, 7, 3), (16, 0, 7), (20, 0, 2)]],
    *[([7, 3], A, "c", tokens, 4, shared) for tokens, *shared in [(16, 0, 2), (9, 2, 0, 3)]],
    *[([3, 7], A, request, tokens, 4, []) for request, tokens in [("c", 8), ("c", 9), ("a", 8), ("a", 13)]],
    ([5], B, "c", 8, 4, [9]), ([5], B, "c", 12, 4, [5]), ([5], B, "c", 8, 4, [9, 5]),
    ([6, 5], B, "c", 12, 4, [5, 9, 6]),
], lambda random: [([*random.sample(range(1, 9), 5), 0], {"d": [9, 11]}, "new", random.randint(7, 18), 3, [9, 0])],
   given=f"{ROOM}, shared {{}}")  # fmt: skip
allocate.ignoring(any_free_block)
allocate.reference(all_or_nothing)
add_edits(allocate, {
    "leaves shared blocks in `free`: the next request would overwrite keys that are in use.": "in free] -> in []]",
    "counts shared blocks that are in `free` as free: the request cannot get them twice.": " - len(reused) -> ",
    "refuses where only the shared blocks in `free` are left, although no other block is missing.":
        "if missing > -> if len(free) == len(reused) or missing >",
    "subtracts all shared blocks from those that are free: one that is in another request's table was not free.":
        "- len(reused) -> - len(shared)",
    "takes every shared block out of `free`, but some are in another request's table.": " if block in free -> ",
    "does not put the shared blocks into the table: the request's first tokens would have no keys.":
        "table + new -> tables.get(request, []) + new",
    "puts the shared blocks behind the new ones: they hold the beginning of the text.":
        "table + new -> table + new if request in tables else new + table",
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
    "release(free, tables, request)", "a block becomes free only if no other request has it", observe=books_after
)
ABC = {"a": [6], "b": [6, 1, 8], "c": [6, 1, 2]}
release.table([
    ([4], {"a": [2, 5], "b": [0, 1, 3]}, "b"), ([], {"a": [2]}, "a"), ([5], {"a": [6, 1, 2], "b": [6, 1, 8]}, "a"),
    ([], ABC, "b"), ([7, 0], dict(reversed(ABC.items())), "b"), ([5], {"a": [3, 7], "b": [3, 7]}, "b"),
    ([5, 2], {"b": [6, 1, 8]}, "b"),
], lambda random: [([7], {"d": [3, 5, 9, 4], "c": [3, 5, 9, 0, 8], "b": [3]}, random.choice("dcb"))],
   given="free {}, tables {}; {!r} leaves")  # fmt: skip


@release.ignoring
def order_and_result(result, arguments):
    return {"tables": result["tables"], "free": sorted(result["free"])}


@release.reference
def unless_used(free, tables, request):
    table = tables.pop(request)
    free += [block for block in table if not any(block in other for other in tables.values())]


OWN = "[block for block in table if not any(block in other for other in tables.values())]"
add_edits(release, {
    "frees blocks that are in another table: the next request would overwrite keys in use.": f"{OWN} -> table",
    "frees nothing if some blocks are shared: the others must become free.":
        f"{OWN} -> table if {OWN} == table else []",
    "frees no block: without a table and not in `free`, a block is lost. (`free = ...` makes a new list and leaves "
    "the caller's unchanged.)": "free += -> free =",
    "keeps the table: its blocks will hold other requests' tokens.": "table = -> tables = {**tables}; table =",
    "leaves an empty table behind, as if the request ran.": "free += -> tables[request] = []; free +=",
})  # fmt: skip
release.rule(lambda arguments, outcome, right: audit(*arguments, outcome.result["free"], outcome.result["tables"]))
