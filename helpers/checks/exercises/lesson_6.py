"""Lesson 6, a paged KV cache: what blocks leave unused, block tables, allocation, and names for shared prefixes."""

from ..block_books import audit, books_after
from ..block_names import numbered_names, wrong_names
from ..exercise import Exercise

# --- unused_room ----------------------------------------------------------------------------------------------------

unused_room = Exercise("unused_room(lengths, block_size)", "with blocks, a request leaves less than one block unused")


def ceiling(tokens, size):
    return -(-tokens // size)


@unused_room.cases
def _(random):
    drawn = [random.randint(1, 60) for _ in range(random.randint(3, 6))]
    cases = [
        ([6, 10, 3], 4),
        ([8, 4, 12], 4),
        ([1, 1, 1], 16),
        ([17], 16),
        ([5, 9, 16, 32], 8),
        ([3, 7], 1),
        (drawn, 10),
    ]
    for lengths, size in cases:
        yield (lengths, size), f"lengths {lengths}, blocks of {size}"


@unused_room.reference
def of_last_blocks(lengths, size):
    return sum(-length % size for length in lengths)


def room(lengths, size):
    return sum(ceiling(length, size) * size for length in lengths)


for _message, _wrong in {
    "counts full blocks only: one that holds a single token is taken, too.": lambda n, b: -sum(x % b for x in n),
    "takes another block when the last is exactly full: no token needs it yet.": lambda n, b: sum(b - x % b for x in n),
    "counts the tokens in the last blocks. Wanted is the room left there.": lambda n, b: sum(x % b for x in n),
    "joins the requests' tokens: each has blocks of its own, and its own last one.": lambda n, b: -sum(n) % b,
    "gives all as many blocks as the longest: each takes its own.": lambda n, b: len(n) * room([max(n)], b) - sum(n),
    "counts all the room that is taken. Wanted is the part of it that holds no token.": room,
    "counts blocks. Wanted is for how many tokens there is room.": lambda n, b: room(n, b) // b,
    "gives a share of the room. Wanted is for how many tokens it is.": lambda n, b: 1 - sum(n) / room(n, b),
    "counts blocks that are not full. Wanted is the room in them.": lambda n, b: sum(x % b > 0 for x in n),
    "counts the most that requests can waste: some waste less.": lambda n, b: len(n) * (b - 1),
    "has the wrong sign: the room is at least as large as what is in it.": lambda n, b: sum(n) - room(n, b),
}.items():
    unused_room.misconception(_message, _wrong)

# --- slot_of --------------------------------------------------------------------------------------------------------

slot_of = Exercise(
    "slot_of(table, position, block_size)",
    "a text can be anywhere in memory, and its block table finds each token",
    forbidden=["helpers.runners.kv_pool:slot_mapping"],
)


@slot_of.cases
def _(random):
    drawn = random.sample(range(40), 5)
    for table, size, positions in [
        ([5, 2, 7], 4, [9, 0, 3, 4, 11]),
        ([3, 0, 6, -1], 16, [40, 31, 16]),
        ([1, 0, 2], 1, [2, 1]),
        (drawn, 3, random.sample(range(15), 4)),
        ([5, 2, 7, -1, -1], 4, [13, 19]),
        ([3, 0, -1], 16, [32]),
        ([3, 0], 16, [33]),
        ([], 4, [0]),
        (drawn, 3, [random.randint(15, 40)]),
    ]:
        for position in positions:
            yield (table, position, size), f"table {table}, token {position}, blocks of {size}"


@slot_of.reference
def look_up(table, position, size, slot=lambda t, i, o, b: t[i] * b + o, missing=None):
    """Look up a token, with a part to be broken: `slot` of the table t, the place i in it, the offset o, the size b."""
    place, offset = divmod(position, size)
    return slot(table, place, offset, size) if place < len(table) and table[place] != -1 else missing


for _message, _wrong in {
    "lets a table be too short: a token without an entry has no slot.": lambda t, p, b: look_up([*t, t[p // b]], p, b),
    "returns None for slot 0, which is a slot like any other.": lambda t, p, b: look_up(t, p, b) or None,
    "returns -1 for a token without a block. To Python, place -1 is the last one: another request's keys would be "
    "overwritten, without an error.": lambda t, p, b: look_up(t, p, b, missing=-1),
    "takes -1 for a block. To Python, a negative place is one near the end of the memory, with another request's keys, "
    "and there is no error.": lambda t, p, b: t[p // b] * b + p % b if p // b < len(t) else None,
    "expects a block for every token. With -1 for a block, attention would get another request's keys, without an "
    "error.": lambda t, p, b: t[p // b] * b + p % b,
}.items():
    slot_of.misconception(_message, _wrong)
for _message, _slot in {
    "returns None for block 0, which is a block like any other.": lambda t, i, o, b: t[i] * b + o if t[i] else None,
    "returns the block's number. Wanted is the slot in the whole memory.": lambda t, i, o, b: t[i],
    "returns the first slot of the block: the token has its own place in it.": lambda t, i, o, b: t[i] * b,
    "adds the place to the block's number: a block has several slots.": lambda t, i, o, b: t[i] + o,
    "divides the wrong way: the remainder says where in the block.": lambda t, i, o, b: t[o % len(t)] * b + i,
    "returns the position, as if the text were contiguous in memory.": lambda t, i, o, b: i * b + o,
    "returns the place in the table: what is there is the block's number.": lambda t, i, o, b: i,
    "returns the place in the block only: it makes a difference which block.": lambda t, i, o, b: o,
    "counts tokens from 1: the first one is token 0.": lambda t, i, o, b: t[i - (not o)] * b + (o - 1) % b,
    "takes the length of the table for the block size.": lambda t, i, o, b: t[i] * len(t) + o,
    "is one slot too far: the first token of a block is in its slot 0.": lambda t, i, o, b: t[i] * b + o + 1,
    "adds the position to the block's first slot: others are in between.": lambda t, i, o, b: t[i] * b + i * b + o,
}.items():
    slot_of.misconception(_message, lambda t, p, b, slot=_slot: look_up(t, p, b, slot))

# --- allocate -------------------------------------------------------------------------------------------------------

allocate = Exercise(
    "allocate(free, tables, request, tokens, block_size)",
    "all or nothing, no block has two owners, and none is taken before it is needed",
    observe=books_after,
)


@allocate.cases
def _(random):
    a, ba, blocks = {"a": [0, 2]}, {"b": [1], "a": [0, 2]}, random.sample(range(20), 12)
    for free, tables, request, tokens, size in [
        *[([3, 7, 1, 5], a, request, tokens, 4) for request, tokens in [("c", 11), ("c", 8), ("a", 9), ("a", 14)]],
        *[([3, 7], ba, "b", tokens, 4) for tokens in (3, 4, 12, 13)],
        *[([3, 7], a, "c", tokens, 4) for tokens in (8, 9)],
        *[([], a, request, tokens, 4) for request, tokens in [("a", 8), ("a", 6), ("a", 9), ("c", 1)]],
        ([4, 3, 1], a, "c", 33, 16),
        (blocks[7:], {"d": blocks[:2], "c": blocks[2:7]}, "d", random.randint(7, 20), 3),
        (blocks[7:], {"d": blocks[:2], "c": blocks[2:7]}, "new", random.randint(1, 25), 3),
    ]:
        given = f"free {free}, tables {tables}; {request!r} asks for room for {tokens} tokens, blocks of {size}"
        yield (free, tables, request, tokens, size), given


@allocate.ignoring
def any_free_block(result, arguments):
    """Rename the blocks that were free in the order of their use. Outside of tables, their order does not matter."""
    free, _, request, *_ = arguments
    used = [block for block in [*result["tables"].get(request, []), *sorted(result["free"])] if block in free]
    names = dict(zip(dict.fromkeys(used), free, strict=False))

    def renamed(blocks):
        return [names.get(block, block) for block in blocks]

    tables = {name: renamed(table) for name, table in result["tables"].items()}
    new = sorted(renamed(result["result"])) if isinstance(result["result"], list) else result["result"]
    return {"tables": tables, "free": sorted(renamed(result["free"])), "result": new}


@allocate.reference
def all_or_nothing(
    *books, need=ceiling, miss=lambda n, h: n - h, refuse=lambda m, f, h: m > f, join=list.__add__, give=lambda n, t: n
):
    """Allocate, with parts to be broken: blocks needed and missing, when to refuse, the table, and what is returned."""
    free, tables, request, tokens, size = books
    table = tables.get(request, [])
    missing = miss(need(tokens, size), len(table))
    if refuse(missing, len(free), len(table)):
        return None
    new = [free.pop(0) for _ in range(missing)]
    tables[request] = join(table, new)
    return give(new, table)


for _part, _wrongs in {
    "need": {
        "counts full blocks only: tokens that do not fill a block need one, too.": lambda t, b: t // b,
        "takes another block when the last is exactly full: no token needs it yet.": lambda t, b: t // b + 1,
        "takes a block per token: a block holds several.": lambda t, b: t,
    },
    "miss": {
        "takes blocks for all tokens: `tokens` includes those that its table has blocks for.": lambda n, h: n,
        "takes one block, however many are missing.": lambda n, h: min(n - h, 1),
    },
    "refuse": {
        "refuses when just enough blocks are free.": lambda m, f, h: m >= f and m > 0,
        "refuses when none is free, although the last block has room.": lambda m, f, h: m > f or f == 0,
        "counts the blocks in the table as missing, and refuses: they are there already.": lambda m, f, h: m + h > f,
        "takes blocks until none is left: find out first whether they are enough.": lambda m, f, h: False,
    },
    "join": {
        "loses the blocks in the table: the tokens so far are there. New blocks come behind.": lambda t, n: n or t,
        "puts new blocks before the old ones: a table is in the order of the tokens.": lambda t, n: n + t,
    },
    "give": {
        "returns the whole table: wanted are the new blocks.": lambda n, t: t + n,
        "returns None where no block is missing: to the caller, that is a refusal.": lambda n, t: n or None,
        "returns nothing: to the caller, that is a refusal.": lambda n, t: None,
    },
}.items():
    for _message, _of in _wrongs.items():
        allocate.misconception(_message, lambda *books, part=_part, of=_of: all_or_nothing(*books, **{part: of}))
for _message, _wrong in {
    "says only whether there is room. Wanted are the new blocks, or None.": lambda *b: all_or_nothing(*b) is not None,
    "changes copies of `free` and `tables`.": lambda f, t, *others: all_or_nothing([*f], {**t}, *others),
    "expects a table of each request: a new one has none.": lambda f, t, r, *o: t[r] and all_or_nothing(f, t, r, *o),
    "gives a new request no table.": lambda f, t, r, *others: all_or_nothing(f, t if r in t else {}, r, *others),
}.items():
    allocate.misconception(_message, _wrong)


@allocate.rule
def is_in_order(arguments, outcome, right):
    """Report a refusal that changes something, and books that are out of order."""
    free, tables, request, *_ = arguments
    got = outcome.result
    if right.result.get("result", []) is None and (sorted(got["free"]), got["tables"]) != (sorted(free), tables):
        if got["result"]:
            return "promises room that is not there: without enough free blocks, a request is refused"
        if request not in tables and got["tables"].get(request) == []:
            return "refuses, and leaves an empty table behind: a request with a table counts as running"
        return "refuses, and keeps blocks. All or nothing: what a refused request holds, no other can have"
    return audit(free, tables, request, got["free"], got["tables"])


# --- release --------------------------------------------------------------------------------------------------------

release = Exercise(
    "release(free, tables, request)",
    "only blocks that no other request has can be given out again",
    observe=books_after,
)


@release.cases
def _(random):
    abc = {"a": [6], "b": [6, 1, 8], "c": [6, 1, 2]}
    *shared, one, two, three, four = random.sample(range(20), 7)
    for free, tables, request in [
        ([4], {"a": [2, 5], "b": [0, 1, 3]}, "b"),
        ([], {"a": [2]}, "a"),
        ([5], {"a": [6, 1, 2], "b": [6, 1, 8]}, "a"),
        ([], abc, "b"),
        ([7, 0], dict(reversed(abc.items())), "b"),
        ([5], {"a": [3, 7], "b": [3, 7]}, "b"),
        ([5, 2], {"b": [6, 1, 8]}, "b"),
        ([four], {"d": [*shared, one], "c": [*shared, two, three], "b": shared[:1]}, random.choice("dcb")),
    ]:
        yield (free, tables, request), f"free {free}, tables {tables}; {request!r} leaves"


@release.ignoring
def order_and_result(result, arguments):
    return {"tables": result["tables"], "free": sorted(result["free"])}


@release.reference
def unless_used(free, tables, request, freed=lambda own, table: own):
    """Release blocks, with a part to be broken: which are freed of the table's, given those that no other table has."""
    table = tables.pop(request)
    free += freed([block for block in table if not any(block in other for other in tables.values())], table)


for _message, _of in {
    "frees blocks that are in another table: the next request would overwrite keys in use.": lambda own, table: table,
    "frees nothing when some blocks are shared: no table has the others.": lambda own, table: own * (own == table),
    "frees no block: without a table and not in `free`, it is lost. (`free = ...` makes another list, and leaves the "
    "caller's as it was.)": lambda own, table: [],
    "frees the last block only.": lambda own, table: [block for block in table[-1:] if block in own],
    "puts a list into `free`: it holds numbers of blocks.": lambda own, table: [own],
}.items():
    release.misconception(_message, lambda *books, of=_of: unless_used(*books, of))
for _message, _wrong in {
    "changes nothing: blocks go to `free`, and the table goes away.": lambda free, tables, request: None,
    "keeps the table: its blocks will hold others' tokens.": lambda f, t, request: unless_used(f, {**t}, request),
    "leaves an empty table behind, as if it were running.": lambda f, t, r: t.update({r: unless_used(f, t, r) or []}),
}.items():
    release.misconception(_message, _wrong)
release.rule(lambda arguments, outcome, right: audit(*arguments, outcome.result["free"], outcome.result["tables"]))

# --- prefix_hashes --------------------------------------------------------------------------------------------------

prefix_hashes = Exercise(
    "prefix_hashes(token_ids, block_size, salt)",
    "blocks have the same name if all up to their ends is the same, and only then they can be shared",
    observe=numbered_names,
    forbidden=["helpers.engine.block_manager:BlockManager._hashes"],
)


@prefix_hashes.cases
def _(random):
    a, b, c, d = [7, 3, 9, 1], [5, 5, 2, 8], [6, 4, 1, 3], [9, 9, 9, 9]
    start, end = [0, *a[1:]], [*a[:-1], 0]  # both differ from `a` in one token
    short = [[random.randint(0, 1) for _ in range(random.randint(0, 8))] for _ in range(40)]
    for texts, size, salts, what in [
        ([a + b + c, a, a + b + d, a + b + c + [1, 2]], 4, "xxxx", "texts that begin alike"),
        ([a + b + c, start + b + c, end + b + c, a + start + c, a + a], 4, "xxxxx", "texts that begin differently"),
        ([a + b + c, a + b[::-1], a[::-1] + b, b + a + c], 4, "xxxx", "the same tokens in another order"),
        ([[1, 11, 2, 3], [11, 1, 2, 3], [1, 1, 12, 3]], 4, "xxx", "ids with the same digits"),
        ([[7, 71], [77, 1], [7, 7]], 2, "xxx", "two ids with the same digits"),
        ([a + b, a + b, a, a + c], 4, "xyyx", "a text with two salts"),
        ([[], [1, 2, 3], list(range(13)), list(range(12))], 3, "xxxy", "blocks of 3"),
        ([[4, 5, 6], [4, 5, 7], [4]], 1, "xxy", "blocks of 1"),
        (short, 2, random.choices("xy", k=40), "40 short texts of two tokens"),
    ]:
        yield (texts, size, list(salts)), what


@prefix_hashes.reference
def chain(t, size, s, name=lambda n, b, p, t, s: (n, *b)):
    """Name blocks by n, the name before, and b, the block's tokens; not by p, the past, t, the text, or s, the salt."""
    names = [s]
    for end in range(size, len(t) + 1, size):
        names.append(name(names[-1], t[end - size : end], t[: end - size], t, s))
    return names[1:]


OWN = "Its keys are computed from everything before it, so behind another beginning they are different."
for _message, _name in {
    f"looks only at a block's own tokens. {OWN}": lambda n, b, p, t, s: (s, *b),
    f"looks only at a block's own tokens and its place. {OWN}": lambda n, b, p, t, s: (s, len(p), *b),
    "looks back one block only.": lambda n, b, p, t, s: (s, len(p) > 0, *p[-len(b) :], *b),
    "ignores the order of tokens, and keys depend on it.": lambda n, b, p, t, s: (n, sum(b)),
    "ignores some of a block's tokens: all belong to its name.": lambda n, b, p, t, s: (n, b[0]),
    "writes ids together, so that 1, 11 and 11, 1 are the same.": lambda n, b, p, t, s: (n, "".join(map(str, b))),
    "makes names depend on later tokens: a token attends only to earlier ones.": lambda n, b, p, t, s: (n, *t),
    "makes names depend on the length of the text. Keys do not.": lambda n, b, p, t, s: (n, len(t), *b),
    "gives the same text other names the next time: no block would be found.": lambda n, b, p, t, s: object(),
}.items():
    prefix_hashes.misconception(_message, lambda t, size, s, name=_name: chain(t, size, s, name))
for _message, _wrong in {
    "ignores the salt. Two customers would share blocks, and one could tell from its TTFT which prompts the other has "
    "sent.": lambda t, size, s: chain(t, size, ""),
    "names the last block although it is not full. It will get further tokens, so that it cannot be shared by its "
    "name.": lambda t, size, s: chain([*t, *[-1] * (-len(t) % size)], size, s),
    "leaves out the last block when it is exactly full.": lambda t, size, s: chain(t[:-1], size, s),
    "has a name for the empty beginning: wanted is one per block.": lambda t, size, s: [s, *chain(t, size, s)],
    "has a name per token: wanted is one per block.": lambda t, size, s: chain(t, 1, s),
    "has one name for the whole text: texts may share some blocks only.": lambda t, size, s: [(s, *t)],
    "has the names backwards: the first one is the first block's.": lambda t, size, s: chain(t, size, s)[::-1],
}.items():
    prefix_hashes.misconception(_message, _wrong)


@prefix_hashes.rule
def are_names_of_prefixes(arguments, outcome, right):
    """Report what is no name, and two blocks that wrongly share one or do not."""
    return wrong_names(*arguments, outcome.result["all salts"], right.result["all salts"])
