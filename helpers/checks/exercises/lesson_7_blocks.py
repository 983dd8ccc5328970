"""Lesson 7, a paged KV cache: slots, block tables that grow, and which requests are preempted."""

from ..block_books import audit, books_after
from ..exercise import Exercise

slices_of = Exercise(
    "slices_of(table, start, end, block_size)",
    "a text can be anywhere in memory: its block table finds each token, and neighboring blocks can be read at once",
    forbidden=["helpers.runners.kv_pool:slot_mapping"],
)


@slices_of.cases
def _(random):
    drawn = random.sample(range(40), 5)
    near = [(block := random.randint(2, 30)), block + 1, block + 2, block, block - 1]
    for table, size, spans in [
        ([5, 2, 7], 4, [(9, 11), (0, 3), (2, 10), (0, 12)]), ([3, 4, 6, -1], 16, [(30, 41), (16, 32), (40, 48)]),
        ([0, 1, 3], 4, [(1, 9), (0, 4)]), ([4, 3, 8, 7], 2, [(0, 4), (1, 7)]), ([1, 0, 2], 1, [(0, 3), (2, 3)]),
        ([9, 10, 2, 3, 4, 9], 2, [(1, 12), (3, 9)]), ([0, 5, 6], 4, [(2, 12)]), ([300, 301, 7], 16, [(10, 40)]),
        (drawn, 3, [(random.randint(0, 6), random.randint(7, 15))]),
        (near, 3, [(random.randint(0, 4), random.randint(9, 15)), (1, 15)]),
        ([5, 2, 7, -1, -1], 4, [(13, 14), (10, 14)]), ([3, 0, -1], 16, [(32, 33), (20, 32)]),
        ([6, -1, 7], 4, [(9, 12), (3, 9), (0, 4), (0, 12), (5, 10)]), ([3, 0], 16, [(33, 34), (20, 40)]),
        ([], 4, [(0, 1)]), (drawn, 3, [(random.randint(10, 15), random.randint(16, 40))]),
    ]:  # fmt: skip
        for start, end in spans:
            yield (table, start, end, size), f"table {table}, tokens {start} to {end}, blocks of {size}"


def joined(slots, follows=lambda slot, offset: True):
    """Join (slot, offset in its block) to slices, with a replaceable part: whether a slot may extend a slice."""
    slices = []
    for slot, offset in slots:
        if slices and sum(slices[-1]) == slot and follows(slot, offset):
            slices[-1] = slices[-1][0], slices[-1][1] + 1
        else:
            slices.append((slot, 1))
    return slices


@slices_of.reference
def look_up(table, start, end, size, slot=lambda t, i, o, b: t[i] * b + o, missing=lambda slots: None, join=joined):
    """Look up tokens, with replaceable parts: `slot` of the table t, the place i in it, the offset o, the size b."""
    slots = []
    for place, offset in (divmod(token, size) for token in range(start, end)):
        if place >= len(table) or table[place] == -1:
            return missing(slots)
        slots.append((slot(table, place, offset, size), offset))
    return join(slots)


slices_of.add_misconceptions({
    "expects an entry for every token: without one, a token has no slot.":
        lambda t, s, e, b: look_up([*t, t[(e - 1) // b]], s, e, b),
    "returns only the slots until the first token without a block: a kernel would read too few keys.":
        {"missing": joined},
    "returns None if any block of the table is missing: only the blocks of these tokens are needed.":
        lambda t, s, e, b: None if -1 in t else look_up(t, s, e, b),
    "looks only at the last token's block: an earlier one can be missing, too.":
        lambda t, s, e, b: look_up([one if one >= 0 else 999 for one in t], s, e, b) if e <= len(t) * b and (
            t[(e - 1) // b] >= 0) else None,
    "looks only at the first token's block: a later one can be missing, too.":
        lambda t, s, e, b: look_up([*[one if one >= 0 else 999 for one in t], *[999] * e], s, e, b) if (
            s < len(t) * b and t[s // b] >= 0) else None,
    "returns an empty list for a token without a block: the task asks for None.": {"missing": lambda slots: []},
    "joins blocks that follow each other in the table, wherever they are in memory.":
        {"join": lambda slots: [(slots[0][0], len(slots))]},
    "treats -1 as a block. As a Python index, a negative slot is near the end of the memory, with another "
    "request's keys, and there is no error.":
        lambda t, s, e, b: look_up([one + 1000 * (one < 0) for one in t], s, e, b, lambda t, i, o, b: (
            (t[i] - 1000 * (t[i] > 900)) * b + o)),
    "returns one slice per block. Blocks that follow each other in memory, too, can be read at once.":
        {"join": lambda slots: joined(slots, lambda slot, offset: offset > 0)},
    "returns a slot per token: the task asks for as few slices as possible.":
        {"join": lambda slots: [(slot, 1) for slot, _ in slots]},
    "returns a list of slots: the task asks for slices, pairs of the first slot and their number.":
        {"join": lambda slots: [slot for slot, _ in slots]},
    "returns the slot after the last one: the task asks for the number of slots.":
        {"join": lambda slots: [(first, first + n) for first, n in joined(slots)]},
    "orders the slices by their place in memory: attention needs the keys in the order of the tokens.":
        {"join": lambda slots: joined(sorted(slots))},
    "includes token `end`, which is the one after the last.": lambda t, s, e, b: look_up(t, s, e + 1, b),
    "starts at the beginning of the text: the task asks for the tokens from `start` on.":
        lambda t, s, e, b: look_up(t, 0, e, b),
    "starts at the beginning of a block: the task asks for the tokens from `start` on.":
        lambda t, s, e, b: look_up(t, s // b * b, e, b),
    "ends at the end of a block: the slots behind the last token hold other keys, or none.":
        lambda t, s, e, b: look_up(t, s, -(-e // b) * b, b),
})  # fmt: skip
slices_of.add_misconceptions({
    "returns the block's number: the task asks for slots in the memory.": lambda t, i, o, b: t[i],
    "returns the first slot of the block: each token has its own slot in it.": lambda t, i, o, b: t[i] * b,
    "adds the place to the block's number: a block has several slots.": lambda t, i, o, b: t[i] + o,
    "swaps quotient and remainder: which one is the place in the block?": lambda t, i, o, b: t[o % len(t)] * b + i,
    "returns positions, as if the text were contiguous in memory.": lambda t, i, o, b: i * b + o,
    "returns the place in the table: the block's number is stored there.": lambda t, i, o, b: i,
    "returns only the place in the block: which block it is matters, too.": lambda t, i, o, b: o,
    "counts tokens from 1: the first one is token 0.": lambda t, i, o, b: t[i - (not o)] * b + (o - 1) % b,
    "uses the length of the table as the block size.": lambda t, i, o, b: t[i] * len(t) + o,
    "returns the following slot: a block's first token is in its slot 0.": lambda t, i, o, b: t[i] * b + o + 1,
    "adds the position to the block's first slot: a block ends after `block_size` slots.":
        lambda t, i, o, b: t[i] * b + i * b + o,
}, part="slot")  # fmt: skip


def ceiling(tokens, size):
    return -(-tokens // size)


ALL_OR_NOTHING = "all or nothing, no block has two owners, and none is taken before it is needed"
grow = Exercise("grow(free, tables, request, tokens, block_size)", ALL_OR_NOTHING, observe=books_after)


@grow.cases
def _(random):
    a, ba, blocks = {"a": [0, 2]}, {"b": [1], "a": [0, 2]}, random.sample(range(20), 12)
    drawn = blocks[7:], {"d": blocks[:2], "c": blocks[2:7]}
    for free, tables, request, tokens, size in [
        *[([3, 7, 1, 5], a, request, tokens, 4) for request, tokens in [("c", 11), ("c", 8), ("a", 9), ("a", 14)]],
        *[([3, 7], ba, "b", tokens, 4) for tokens in (3, 4, 12, 13)],
        *[([3, 7], a, "c", tokens, 4) for tokens in (8, 9)],
        *[([], a, request, tokens, 4) for request, tokens in [("a", 8), ("a", 6), ("a", 9), ("c", 1)]],
        ([4, 3, 1], a, "c", 33, 16), ([0], {}, "c", 1, 4), ([300, 0, 41], {"b": [7, 12]}, "b", 257, 64),
        (*drawn, "d", random.randint(7, 20), 3), (*drawn, "new", random.randint(1, 25), 3),
    ]:  # fmt: skip
        given = f"free {free}, tables {tables}; {request!r} asks for room for {tokens} tokens, blocks of {size}"
        yield (free, tables, request, tokens, size), given


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


def all_or_nothing(
    *books,
    need=ceiling,
    miss=lambda n, h: n - h,
    refuse=lambda m, f, h: m > f,
    join=list.__add__,
    give=lambda n, t: n,
    reuse=lambda shared, free: [block for block in shared if block in free],
    reserve=len,
):
    """Allocate, with replaceable parts: blocks needed and missing, when to refuse, the table, what is returned, the
    shared blocks taken out of `free`, and how many blocks they leave to others."""
    free, tables, request, tokens, size, shared = books
    table = tables.get(request, shared)
    missing, reused = miss(need(tokens, size), len(table)), reuse(shared, free)
    if refuse(missing, len(free) - reserve(reused), len(table)):
        return None
    for block in reused:
        free.remove(block)
    new = [free.pop(0) for _ in range(missing)]
    tables[request] = join(table, new)
    return give(new, table)


@grow.reference
def without_sharing(*books, **parts):
    return all_or_nothing(*books, [], **parts)


for _part, _wrongs in {
    "need": {
        "counts only full blocks: tokens that do not fill a block need one, too.": lambda t, b: t // b,
        "takes another block when the last one is exactly full: no token needs it yet.": lambda t, b: t // b + 1,
        "takes a block per token: a block holds several tokens.": lambda t, b: t,
    },
    "miss": {
        "takes blocks for all tokens: the request's table already has blocks for some of them.": lambda n, h: n,
        "takes at most one block, however many are missing.": lambda n, h: min(n - h, 1),
    },
    "refuse": {
        "refuses when exactly enough blocks are free: they suffice.": lambda m, f, h: m >= f and m > 0,
        "refuses when no block is free, although the last one has room.": lambda m, f, h: m > f or f == 0,
        "counts the blocks in the table as missing, and refuses: the request has them already.":
            lambda m, f, h: m + h > f,
        "takes blocks until none is left: a refused request must get none.": lambda m, f, h: False,
    },
    "join": {
        "loses the blocks in the table: they hold the request's tokens so far.": lambda t, n: n or t,
        "puts new blocks before the old ones: a table is in the order of the tokens.": lambda t, n: n + t,
    },
    "give": {
        "returns the whole table: the task asks for the new blocks.": lambda n, t: t + n,
        "returns None if no block is missing: to the caller, that is a refusal.": lambda n, t: n or None,
        "returns nothing: to the caller, that is a refusal.": lambda n, t: None,
    },
}.items():  # fmt: skip
    grow.add_misconceptions(_wrongs, part=_part)
grow.add_misconceptions({
    "returns whether there is room: the task asks for the new blocks.": lambda *b: without_sharing(*b) is not None,
    "changes copies of `free` and `tables`, not the caller's.":
        lambda f, t, *others: without_sharing([*f], {**t}, *others),
    "expects a table for every request: a new one has none.": lambda f, t, r, *o: t[r] and without_sharing(f, t, r, *o),
    "gives a new request no table: its blocks are lost.":
        lambda f, t, r, *others: without_sharing(f, t if r in t else {}, r, *others),
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


preempted = Exercise(
    "preempted(running, tables, free, request, missing)",
    "the newest request leaves first, and none makes an older one leave",
)


@preempted.cases
def _(random):
    tables = {"a": [0, 1, 2], "b": [3], "c": [4, 5], "d": [6]}
    drawn = {name: random.sample(range(40), random.randint(1, 4)) for name in "cabed"}
    for table, free, request, missing in [
        (tables, 0, "a", 1), (tables, 0, "a", 2), (tables, 1, "a", 2), (tables, 0, "b", 3), (tables, 0, "a", 4),
        (tables, 2, "a", 2), (tables, 0, "d", 1), (tables, 0, "c", 1), (tables, 0, "c", 2), (tables, 1, "b", 5),
        (tables, 0, "b", 4), (tables, 3, "a", 4), (tables, 3, "d", 1),
        (tables, 0, "c", 5), (tables, 1, "b", 7), ({"x": [5, 2]}, 0, "x", 1),
        ({"z": [0], "y": [1], "x": [2, 3]}, 0, "z", 1), ({"z": [0], "y": [1], "x": [2, 3]}, 0, "y", 3),
        (drawn, random.randint(0, 1), "c", random.randint(2, 5)), (drawn, 0, "b", random.randint(1, 9)),
    ]:  # fmt: skip
        running = list(table)
        told = f"running, oldest first: {running}; tables {table}; {free} free; {request!r} is missing {missing}"
        yield (running, table, free, request, missing), told


@preempted.reference
def newest_first(running, tables, free, request, missing, order=reversed, worth=len, enough=int.__ge__, own=True):
    """List victims, with replaceable parts: the order, a table's blocks, when to end, whether `request` may leave."""
    names = []
    for name in order(running):
        if enough(free, missing) or (name == request and not own):
            break
        names.append(name)
        free += worth(tables[name])
        if name == request:
            break
    return names


preempted.add_misconceptions({
    "preempts the oldest first: it has computed the most, and would lose the most.": {"order": list},
    "preempts one request too many: exactly enough free blocks suffice.": {"enough": int.__gt__},
    "counts one block per request: a preempted request frees its whole table.": {"worth": lambda table: 1},
    "keeps the request that asks, although no newer one is left: then it has to leave itself.": {"own": False},
    "ignores the blocks that are free already.": lambda r, t, free, *rest: newest_first(r, t, 0, *rest),
    "preempts one request, however few blocks it has.": lambda *case: newest_first(*case)[:1],
    "preempts the largest first: in this course, the newest leaves.": lambda r, t, *rest: newest_first(
        sorted(r, key=lambda name: len(t[name])), t, *rest),
    "preempts every newer request, even if fewer suffice.": lambda r, t, free, request, missing: (
        r[: r.index(request) : -1] if free < missing else []),
    "makes older requests leave: only newer ones do, and, as the last, the request itself.":
        lambda r, t, free, request, missing: newest_first(r, t, free, r[0], missing),
    "preempts the request that asks before the newer ones.": lambda r, t, free, request, missing: (
        [request] if free < missing else []),
    "returns the blocks: the task asks for the requests.": lambda r, t, *rest: [
        block for name in newest_first(r, t, *rest) for block in t[name]],
    "lists the oldest of the preempted first: the newest leaves first.": lambda *case: newest_first(*case)[::-1],
})  # fmt: skip
