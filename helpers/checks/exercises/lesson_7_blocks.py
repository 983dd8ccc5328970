"""Lesson 7, a paged KV cache: slots, block tables that grow, and which requests are preempted."""

from ..block_books import audit, books_after
from ..exercise import Exercise


@Exercise.declare(
    "a text can be anywhere in memory: its block table finds each token, and neighboring blocks can be read at once",
    forbidden=["helpers.runners.kv_pool:slot_mapping"],
)
def slices_of(table, start, end, block_size):
    slices = []
    for token in range(start, end):
        i, offset = divmod(token, block_size)
        if i >= len(table) or table[i] == -1:
            return None
        slot = table[i] * block_size + offset
        if slices and sum(slices[-1]) == slot:
            slices[-1] = slices[-1][0], slices[-1][1] + 1
        else:
            slices.append((slot, 1))
    return slices


slices_of.table([
    (table, *span, size)
    for table, size, *spans in [
        ([5, 2, 7], 4, (9, 11), (0, 3), (2, 10), (0, 12)), ([3, 4, 6, -1], 16, (30, 41), (16, 32), (40, 48)),
        ([0, 1, 3], 4, (1, 9), (0, 4)), ([4, 3, 8, 7], 2, (0, 4), (1, 7)), ([1, 0, 2], 1, (0, 3), (2, 3)),
        ([9, 10, 2, 3, 4, 9], 2, (1, 12), (3, 9)), ([0, 5, 6], 4, (2, 12)), ([300, 301, 7], 16, (10, 40)),
        ([5, 2, 7, -1, -1], 4, (13, 14), (10, 14)), ([3, 0, -1], 16, (32, 33), (20, 32)), ([], 4, (0, 1)),
        ([6, -1, 7], 4, (9, 12), (3, 9), (0, 4), (0, 12), (5, 10)), ([3, 0], 16, (33, 34), (20, 40)),
        ([9, 10, 11, 9, 8], 3, (2, 13), (1, 15)),
    ]
    for span in spans
], lambda random: [(random.sample(range(40), 5), random.randint(0, 6), random.randint(7, 15), 3)],
   given="table {}, tokens {} to {}, blocks of {}")  # fmt: skip

slices_of.add_misconceptions({
    "returns the slots before the first token without a block: a kernel would read too few.": "return None -> break",
    "returns None if any block is missing: only those of these tokens count.": "table[i] == -1 -> -1 in table",
    "looks only at the last token's block: an earlier one can be missing, too.":
        "if i >= len(table) or table[i] == -1 -> last = (end - 1) // block_size\n"
        "        if last >= len(table) or table[last] == -1",
    "joins blocks that are neighbors in the table, wherever they are in memory.": " and sum(slices[-1]) == slot -> ",
    "treats -1 as a block. As a Python index, a negative slot is near the end of the memory, with another "
    "request's keys, and there is no error.": " or table[i] == -1 -> ",
    "returns one slice per block. Blocks that follow each other in memory, too, can be read at once.":
        "if slices -> if slices and offset",
    "adds the position to the block's first slot: a block ends after `block_size` slots.": "+ offset -> + token",
    "counts the token `end` in: as in a slice, it's the one after the last.":
        "range(start, end) -> range(start, end + 1)",
    "expects an entry for every token: without one, a token has no slot.": "i >= len(table) or table[i] -> table[i]",
})  # fmt: skip

ALL_OR_NOTHING = "all or nothing, no block has two owners, and none is taken before it is needed"


@Exercise.declare(ALL_OR_NOTHING, observe=books_after)
def grow(free, tables, request, tokens, block_size, shared=()):
    table = tables.get(request, list(shared))
    reused = [block for block in shared if block in free]
    missing = -(-tokens // block_size) - len(table)
    if missing > len(free) - len(reused):
        return None
    for block in reused:
        free.remove(block)
    new = [free.pop(0) for _ in range(missing)]
    tables[request] = table + new
    return new


ROOM = "free {}, tables {}; {!r} asks for room for {} tokens, blocks of {}"
A = {"a": [0, 2]}
grow.table([
    *[([3, 7, 1, 5], A, request, tokens, 4) for request, tokens in [("c", 11), ("c", 8), ("a", 9), ("a", 14)]],
    *[([3, 7], {"b": [1], **A}, "b", tokens, 4) for tokens in (3, 4, 12, 13)],
    *[([3, 7], A, "c", tokens, 4) for tokens in (8, 9)],
    *[([], A, request, tokens, 4) for request, tokens in [("a", 8), ("a", 6), ("a", 9), ("c", 1)]],
    ([4, 3, 1], A, "c", 33, 16), ([0], {}, "c", 1, 4), ([300, 0, 41], {"b": [7, 12]}, "b", 257, 64),
], lambda random: [
    (random.sample(range(9), 5), {"d": random.sample(range(9, 20), 2), "c": [21, 20]}, name, tokens, 3)
    for name, tokens in [("d", random.randint(7, 20)), ("new", random.randint(1, 25))]
], given=ROOM)  # fmt: skip


@grow.ignoring
def any_free_block(result, arguments):
    """Rename the blocks that were free and are not shared, in order of use. Only in a table does their order matter."""
    free, _, request, _, _, shared, *_ = *arguments, ()
    free = [block for block in free if block not in shared]
    used = [block for block in [*result["tables"].get(request, []), *sorted(result["free"])] if block in free]
    names = dict(zip(dict.fromkeys(used), free, strict=False))

    def renamed(blocks):
        return [names.get(block, block) for block in blocks]

    tables = {name: renamed(table) for name, table in result["tables"].items()}
    new = sorted(renamed(result["result"])) if isinstance(result["result"], list) else result["result"]
    return {"tables": tables, "free": sorted(renamed(result["free"])), "result": new}


grow.add_misconceptions({
    "counts only full blocks: a partial one is needed, too.": "-(-tokens // block_size) -> tokens // block_size",
    "takes another block when the last one is exactly full: no token needs it yet.":
        "-(-tokens // block_size) -> tokens // block_size + 1",
    "takes blocks for all tokens: the request's table already has blocks for some of them.": " - len(table) -> ",
    "refuses when exactly enough blocks are free: they suffice.": "missing > len(free) -> 0 < missing >= len(free)",
    "refuses when no block is free, although the last one has room.": "if missing > -> if not free or missing >",
    "returns None if no block is missing: to the caller, that is a refusal.": "return new -> return new or None",
    "returns the whole table: the task asks for the new blocks.": "return new -> return tables[request]",
    "returns [] for a refusal: this says that no block was missing.": "return None -> return []",
    "expects a table for every request: a new one has none.": "tables.get(request, list(shared)) -> tables[request]",
})  # fmt: skip


@grow.rule
def is_in_order(arguments, outcome, right):
    """Report a refusal that changes something, or inconsistent tables and free blocks."""
    free, tables, request, *_ = arguments
    got = outcome.result
    if right.result.get("result", []) is None and (sorted(got["free"]), got["tables"]) != (sorted(free), tables):
        if got["result"]:
            return "returns blocks although too few are free: then a request is refused"
        if request not in tables and got["tables"].get(request) == []:
            return "refuses, but leaves an empty table behind: a request with a table counts as running"
        return "refuses, but keeps blocks. All or nothing: no other request can use what a refused one holds"
    return audit(free, tables, request, got["free"], got["tables"])


@Exercise.declare("the newest request leaves first, and none makes an older one leave")
def preempted(running, tables, free, request, missing):
    names = []
    for name in reversed(running):
        if free >= missing:
            break
        names.append(name)
        free += len(tables[name])
        if name == request:
            break
    return names


ABCD, ZYX = {"a": [0, 1, 2], "b": [3], "c": [4, 5], "d": [6]}, {"z": [0], "y": [1], "x": [2, 3]}
preempted.table([
    (list(tables), tables, *case)
    for tables, *cases in [
        (ABCD, (0, "a", 1), (0, "a", 2), (1, "a", 2), (0, "b", 3), (0, "a", 4), (2, "a", 2), (0, "d", 1),
         (0, "c", 1), (0, "c", 2), (1, "b", 5), (0, "b", 4), (3, "a", 4), (3, "d", 1), (0, "c", 5), (1, "b", 7)),
        ({"x": [5, 2]}, (0, "x", 1)), (ZYX, (0, "z", 1), (0, "y", 3)),
    ]
    for case in cases
], lambda random: [
    (list("cabed"), {name: random.sample(range(40), random.randint(1, 4)) for name in "cabed"}, 0, asking, missing)
    for asking, missing in [("c", random.randint(2, 5)), ("b", random.randint(1, 9))]
], given="running, oldest first: {}; tables {}; {} free; {!r} is missing {}")  # fmt: skip

preempted.add_misconceptions({
    "preempts the oldest first: it has computed the most, and would lose the most.": "reversed(running) -> running",
    "counts one block per request: a preempted request frees its whole table.": "len(tables[name]) -> 1",
    "keeps the request that asks, although no newer one is left: then it has to leave itself.":
        "free >= missing -> free >= missing or name == request",
    "preempts one request, however few blocks it has.": "return names -> return names[:1]",
    "goes on although enough blocks are free: what is preempted is computed anew.": "free >= missing -> free > missing",
    "makes older requests leave: newer ones do, and last the request itself.": "name == request -> name == running[0]",
})  # fmt: skip
