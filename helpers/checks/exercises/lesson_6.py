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
    cases = [([6, 10, 3], 4), ([8, 4, 12], 4), ([1, 1, 1], 16), ([17], 16), ([5, 9, 16, 32], 8), ([3, 7], 1)]
    for lengths, size in [*cases, (drawn, 10)]:
        yield (lengths, size), f"lengths {lengths}, blocks of {size}"


@unused_room.reference
def of_last_blocks(lengths, size):
    return sum(-length % size for length in lengths)


def room(lengths, size):
    return sum(ceiling(length, size) * size for length in lengths)


for _message, _wrong in {
    "counts only full blocks: one that holds a single token is allocated, too.": lambda n, b: -sum(x % b for x in n),
    "takes another block when the last one is exactly full: no token needs it yet.":
        lambda n, b: sum(b - x % b for x in n),
    "counts the tokens in the last blocks: the task asks for the room left there.": lambda n, b: sum(x % b for x in n),
    "adds up the requests' tokens: each request has its own blocks, and its own last one.": lambda n, b: -sum(n) % b,
    "gives each request as many blocks as the longest: it needs only its own.":
        lambda n, b: len(n) * room([max(n)], b) - sum(n),
    "counts all the room: the task asks for the part that holds no token.": room,
    "counts blocks: the task asks how many more tokens fit.": lambda n, b: room(n, b) // b,
    "returns a share of the room: the task asks how many more tokens fit.": lambda n, b: 1 - sum(n) / room(n, b),
    "counts blocks that are not full: the task asks for the room in them.": lambda n, b: sum(x % b > 0 for x in n),
    "counts the most that each request can waste: some waste less.": lambda n, b: len(n) * (b - 1),
    "subtracts the wrong way round: the blocks' room is never less than the tokens.": lambda n, b: sum(n) - room(n, b),
}.items():  # fmt: skip
    unused_room.misconception(_message, _wrong)

# --- slot_of --------------------------------------------------------------------------------------------------------

slot_of = Exercise(
    "slot_of(table, position, block_size)",
    "a text can be anywhere in memory: its block table finds each token",
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
    """Look up a token, with a replaceable part: `slot` of the table t, the place i in it, the offset o, the size b."""
    place, offset = divmod(position, size)
    return slot(table, place, offset, size) if place < len(table) and table[place] != -1 else missing


for _message, _wrong in {
    "expects an entry for every token: without one, a token has no slot.":
        lambda t, p, b: look_up([*t, t[p // b]], p, b),
    "returns None for slot 0, which is a slot like any other.": lambda t, p, b: look_up(t, p, b) or None,
    "returns -1 for a token without a block. As a Python index, -1 is the last slot: another request's keys would "
    "be overwritten, without an error.": lambda t, p, b: look_up(t, p, b, missing=-1),
    "treats -1 as a block. As a Python index, a negative slot is near the end of the memory, with another "
    "request's keys, and there is no error.": lambda t, p, b: t[p // b] * b + p % b if p // b < len(t) else None,
    "expects a block for every token. With -1 as a block, attention would get another request's keys, without an "
    "error.": lambda t, p, b: t[p // b] * b + p % b,
}.items():  # fmt: skip
    slot_of.misconception(_message, _wrong)
for _message, _slot in {
    "returns None for block 0, which is a block like any other.": lambda t, i, o, b: t[i] * b + o if t[i] else None,
    "returns the block's number: the task asks for the slot in the memory.": lambda t, i, o, b: t[i],
    "returns the first slot of the block: each token has its own slot in it.": lambda t, i, o, b: t[i] * b,
    "adds the place to the block's number: a block has several slots.": lambda t, i, o, b: t[i] + o,
    "swaps quotient and remainder: which one is the place in the block?": lambda t, i, o, b: t[o % len(t)] * b + i,
    "returns the position, as if the text were contiguous in memory.": lambda t, i, o, b: i * b + o,
    "returns the place in the table: the block's number is stored there.": lambda t, i, o, b: i,
    "returns only the place in the block: which block it is matters, too.": lambda t, i, o, b: o,
    "counts tokens from 1: the first one is token 0.": lambda t, i, o, b: t[i - (not o)] * b + (o - 1) % b,
    "uses the length of the table as the block size.": lambda t, i, o, b: t[i] * len(t) + o,
    "returns the following slot: a block's first token is in its slot 0.": lambda t, i, o, b: t[i] * b + o + 1,
    "adds the position to the block's first slot: a block ends after `block_size` slots.":
        lambda t, i, o, b: t[i] * b + i * b + o,
}.items():  # fmt: skip
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
    """Rename the blocks that were free, in order of use. Only in a table does their order matter."""
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
    """Allocate, with replaceable parts: blocks needed and missing, when to refuse, the table, and what is returned."""
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
    for _message, _of in _wrongs.items():
        allocate.misconception(_message, lambda *books, part=_part, of=_of: all_or_nothing(*books, **{part: of}))
for _message, _wrong in {
    "returns whether there is room: the task asks for the new blocks.": lambda *b: all_or_nothing(*b) is not None,
    "changes copies of `free` and `tables`, not the caller's.":
        lambda f, t, *others: all_or_nothing([*f], {**t}, *others),
    "expects a table for every request: a new one has none.": lambda f, t, r, *o: t[r] and all_or_nothing(f, t, r, *o),
    "gives a new request no table: its blocks are lost.":
        lambda f, t, r, *others: all_or_nothing(f, t if r in t else {}, r, *others),
}.items():  # fmt: skip
    allocate.misconception(_message, _wrong)


@allocate.rule
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


# --- release --------------------------------------------------------------------------------------------------------

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
    """Release blocks, with a replaceable part: which of the table's are freed, given those that no other table has."""
    table = tables.pop(request)
    free += freed([block for block in table if not any(block in other for other in tables.values())], table)


for _message, _of in {
    "frees blocks that are in another table: the next request would overwrite keys in use.": lambda own, table: table,
    "frees nothing if some blocks are shared: the others must become free.": lambda own, table: own * (own == table),
    "frees no block: without a table and not in `free`, a block is lost. (`free = ...` makes a new list and leaves "
    "the caller's unchanged.)": lambda own, table: [],
    "frees only the last block: the others are lost.":
        lambda own, table: [block for block in table[-1:] if block in own],
    "puts a list into `free`, which holds block numbers.": lambda own, table: [own],
}.items():  # fmt: skip
    release.misconception(_message, lambda *books, of=_of: unless_used(*books, of))
for _message, _wrong in {
    "changes nothing: the blocks become free, and the table is removed.": lambda free, tables, request: None,
    "keeps the table: its blocks will hold other requests' tokens.":
        lambda f, t, request: unless_used(f, {**t}, request),
    "leaves an empty table behind, as if the request ran.": lambda f, t, r: t.update({r: unless_used(f, t, r) or []}),
}.items():  # fmt: skip
    release.misconception(_message, _wrong)
release.rule(lambda arguments, outcome, right: audit(*arguments, outcome.result["free"], outcome.result["tables"]))

# --- prefix_hashes --------------------------------------------------------------------------------------------------

prefix_hashes = Exercise(
    "prefix_hashes(token_ids, block_size, salt)",
    "blocks share a name only if everything up to their ends is the same, so sharing them is safe",
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
    """Name blocks by n, the previous name, and b, their tokens; not by p, the past, t, the text, or s, the salt."""
    names = [s]
    for end in range(size, len(t) + 1, size):
        names.append(name(names[-1], t[end - size : end], t[: end - size], t, s))
    return names[1:]


OWN = "Its keys depend on everything before it, so after another beginning they are different."
for _message, _name in {
    f"looks only at a block's own tokens. {OWN}": lambda n, b, p, t, s: (s, *b),
    f"looks only at a block's own tokens and its place. {OWN}": lambda n, b, p, t, s: (s, len(p), *b),
    "looks back only one block: keys depend on all earlier tokens.":
        lambda n, b, p, t, s: (s, len(p) > 0, *p[-len(b) :], *b),
    "ignores the order of tokens, but keys depend on it.": lambda n, b, p, t, s: (n, sum(b)),
    "ignores some of a block's tokens: its name must depend on all of them.": lambda n, b, p, t, s: (n, b[0]),
    "joins the digits of ids, so that 1, 11 and 11, 1 get the same name.":
        lambda n, b, p, t, s: (n, "".join(map(str, b))),
    "makes names depend on later tokens: a token attends only to earlier ones.": lambda n, b, p, t, s: (n, *t),
    "makes names depend on the length of the text: keys do not.": lambda n, b, p, t, s: (n, len(t), *b),
    "names the same text differently each time: no block would ever be found.": lambda n, b, p, t, s: object(),
}.items():  # fmt: skip
    prefix_hashes.misconception(_message, lambda t, size, s, name=_name: chain(t, size, s, name))
for _message, _wrong in {
    "ignores the salt. Two customers would share blocks, and each could tell from its TTFT which prompts the other "
    "has sent.": lambda t, size, s: chain(t, size, ""),
    "names the last block although it is not full. It will get more tokens, so it cannot be shared "
    "yet.": lambda t, size, s: chain([*t, *[-1] * (-len(t) % size)], size, s),
    "leaves out the last block when it is exactly full.": lambda t, size, s: chain(t[:-1], size, s),
    "returns a name for the empty prefix: the task asks for one per block.": lambda t, size, s: [s, *chain(t, size, s)],
    "returns a name per token: the task asks for one per block.": lambda t, size, s: chain(t, 1, s),
    "returns one name for the whole text: texts may share only some blocks.": lambda t, size, s: [(s, *t)],
    "returns the names backwards: the first one is the first block's.": lambda t, size, s: chain(t, size, s)[::-1],
}.items():
    prefix_hashes.misconception(_message, _wrong)


@prefix_hashes.rule
def are_names_of_prefixes(arguments, outcome, right):
    """Report what is not a name, or two blocks that wrongly share a name or wrongly do not."""
    return wrong_names(*arguments, outcome.result["all salts"], right.result["all salts"])
