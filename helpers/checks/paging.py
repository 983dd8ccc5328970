"""Lesson 6, memory in blocks: what they waste, which sequence has which, where a token is, and how a prefix is found.

No model runs here. `engine_with` lets a student's functions allocate an engine's memory; that changes no token.
"""

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..engine import BlockManager, EngineConfig, Sequence
from ..model_engine import Engine
from .attempt import Attempt
from .differences import Wrong, expect_number, expect_numbers, kind

# --- what blocks waste --------------------------------------------------------------------------------------------


def unused_room(attempt: Attempt) -> None:
    """Last blocks that are half full, full and nearly empty; requests shorter and longer than a block."""
    cases = [([6, 10, 3], 4), ([8, 4, 12], 4), ([1, 1, 1], 16), ([17], 16), ([5, 9, 16, 32], 8), ([3, 7], 1)]
    given = [f"lengths {lengths}, blocks of {size}" for lengths, size in cases]
    got = []
    for (lengths, size), told in zip(cases, given, strict=True):
        number = attempt(list(lengths), size, given=told)
        expect_number(number)
        got.append(float(number))

    def every(of: Callable[[int, int], int]) -> list[int]:
        return [sum(of(length, size) for length in lengths) for lengths, size in cases]

    taken = every(lambda length, size: -(-length // size) * size)
    right = [room - sum(lengths) for room, (lengths, _) in zip(taken, cases, strict=True)]
    expect_numbers(
        got,
        right,
        [
            (
                every(lambda length, size: length // size * size - length),
                "counts full blocks only, so that there is less room than tokens: a block that has been begun is "
                "taken, too.",
            ),
            (
                every(lambda length, size: size - length % size),
                "takes a further block when the last one is just full: nobody needs it before there is another token.",
            ),
            (
                every(lambda length, size: length % size),
                "counts the tokens in the last blocks. Wanted is the room in them that is left.",
            ),
            (
                [-sum(lengths) % size for lengths, size in cases],
                "puts the tokens of all requests together: each has blocks of its own, and its own last one.",
            ),
            (
                [len(lengths) * (-(-max(lengths) // size) * size) - sum(lengths) for lengths, size in cases],
                "gives everybody as many blocks as the longest: with blocks, each has what it needs.",
            ),
            (taken, "counts all the room that is taken. Wanted is the part of it that holds no token."),
            (
                [room / size for room, (_, size) in zip(taken, cases, strict=True)],
                "counts blocks, not room for tokens.",
            ),
            (
                [one / room for one, room in zip(right, taken, strict=True)],
                "gives a share of the room. Wanted is for how many tokens it would be enough.",
            ),
            (
                every(lambda length, size: length % size > 0),
                "counts blocks that are not full. Wanted is for how many tokens there is room in them.",
            ),
            (
                every(lambda length, size: size - 1),
                "counts the most that a request can waste, a block less a token: some waste less.",
            ),
            ([-one for one in right], "has the wrong sign: the room is larger than what is in it."),
        ],
        given,
    )


# --- where a token is ---------------------------------------------------------------------------------------------


def slot_of(attempt: Attempt) -> None:
    """Tokens in all places of a block, block and slot 0; then tokens that no block is there for."""
    tables = [([5, 2, 7], 4, (9, 0, 3, 4, 11)), ([3, 0, 6, -1], 16, (40, 31, 16)), ([1, 0, 2], 1, (2, 1))]
    there = [(table, position, size) for table, size, positions in tables for position in positions]
    beginning = [5, 2, 7, -1, -1]
    missing = [(beginning, 13, 4), (beginning, 19, 4), ([3, 0, -1], 32, 16), ([3, 0], 33, 16), ([], 0, 4)]

    def told(table, position, size) -> str:
        return f"table {table}, token {position}, blocks of {size}"

    beyond = {
        "index out of range": "A token that the table has no entry for has no slot: say None.",
        "must be integers": "A place in the table is a whole number.",
    }
    got = [attempt(list(case[0]), *case[1:], given=told(*case), hints=beyond) for case in there]
    right = [table[position // size] * size + position % size for table, position, size in there]
    for number, case in zip(got, there, strict=True):
        if number is None:
            zero = case[0][case[1] // case[2]] == 0
            hint = " Block 0 is a block like any other." if zero else ""
            raise Wrong(f"says None, but there is a block for this token ({told(*case)}).{hint}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise Wrong(f"should return a number or None; it returned {kind(number)} ({told(*case)}).")

    def every(of: Callable[[list[int], int, int], float]) -> list[float]:
        return [of(*case) for case in there]

    expect_numbers(
        got,
        right,
        [
            (
                every(lambda table, position, size: table[position // size]),
                "returns the number of the block. Wanted is the slot in the whole memory.",
            ),
            (
                every(lambda table, position, size: table[position // size] * size),
                "returns the first slot of the block: the token has a place of its own in it.",
            ),
            (
                every(lambda table, position, size: table[position // size] + position % size),
                "adds the place to the block's number: before block 5 there are 5 whole blocks of slots.",
            ),
            (
                every(lambda table, position, size: table[position % size % len(table)] * size + position // size),
                "divides the wrong way: whole blocks before the token say which block, the rest says where in it.",
            ),
            (
                every(lambda table, position, size: position),
                "returns the token's own number, as if the memory were one piece: the table says where its block is.",
            ),
            (
                every(lambda table, position, size: position // size),
                "returns the place in the table. What stands there is the number of the block.",
            ),
            (
                every(lambda table, position, size: position % size),
                "returns the place in the block only: which block it is makes the difference.",
            ),
            (
                every(lambda table, position, size: table[max(position - 1, 0) // size] * size + (position - 1) % size),
                "counts tokens from 1: the first one is token 0.",
            ),
            (
                every(lambda table, position, size: table[position // size] * size + position % size + 1),
                "is one slot too far: the first token of a block is in its slot 0.",
            ),
            (
                every(lambda table, position, size: table[position // size] * len(table) + position % size),
                "counts as many slots in a block as the table has entries: they have nothing to do with each other.",
            ),
            (
                every(lambda table, position, size: table[position // size] * size + position),
                "adds the token's own number: only its place within the block counts behind the block's first slot.",
            ),
        ],
        [told(*case) for case in there],
    )
    if not all(isinstance(number, int) for number in got):
        case = there[next(place for place, number in enumerate(got) if not isinstance(number, int))]
        raise Wrong(f"returns a fraction, and a slot is a whole number ({told(*case)}).")
    for case in missing:
        table, position, size = case
        slot = attempt(list(table), position, size, given=told(*case), hints=beyond)
        if slot is None:
            continue
        if slot == -1:
            raise Wrong(
                f"says -1 for a token without a block. To Python, place -1 is the last one: somebody's keys would be "
                f"overwritten, and nobody would notice. Say None ({told(*case)})."
            )
        if isinstance(slot, int) and slot < 0:
            raise Wrong(
                f"takes -1 for a block and says slot {slot}. To Python that is a place near the end of the memory: it "
                f"would read somebody else's keys, without an error. Not allocated means None ({told(*case)})."
            )
        raise Wrong(f"says {slot!r}, but there is no block for this token: that is None ({told(*case)}).")


# --- who has which block ------------------------------------------------------------------------------------------

Tables = dict[str, list[int]]
NEWCOMER = {"'c'": "A newcomer has no table yet."}
POP = {"pop from": "There are fewer free blocks than needed: find that out before you take the first one."}


def _listed(blocks: Seq[int]) -> str:
    return f"block{'' if len(blocks) == 1 else 's'} {', '.join(map(str, blocks))}"


def _expect_books(free, tables, before: Tables, request: str, scene: str) -> None:
    """Say in words if what is left is no list of blocks and no dict of such lists, or somebody else's table changed."""
    for block in free:
        if type(block) is not int:
            raise Wrong(f"`free` should hold numbers of blocks, and holds {block!r} ({scene}).")
    for name, table in tables.items():
        if name not in before and name != request:
            raise Wrong(f"makes a table for {name!r}, and there is no such request ({scene}).")
        if not isinstance(table, list):
            raise Wrong(f"the table of {name} should be a list of blocks, and is {table!r} ({scene}).")
        for block in table:
            if type(block) is not int:
                raise Wrong(f"the table of {name} should hold numbers of blocks, and holds {block!r} ({scene}).")
    for name, table in before.items():
        if name != request and tables.get(name) != table:
            raise Wrong(f"changes the table of {name}, and {request} was asked for ({scene}).")


def allocate(attempt: Attempt) -> None:
    """Newcomers and those that grow; enough, just enough and too few blocks, or none needed."""
    a = {"a": [0, 2]}
    for free, tables, request, tokens, size in [
        ([3, 7, 1, 5], a, "c", 11, 4),
        ([3, 7, 1, 5], a, "c", 8, 4),
        ([3, 7, 1, 5], a, "a", 9, 4),
        ([3, 7, 1, 5], a, "a", 14, 4),
        ([3, 7], {"a": [0, 2], "b": [1]}, "b", 3, 4),
        ([3, 7], {"a": [0, 2], "b": [1]}, "b", 4, 4),
        ([3, 7], a, "c", 8, 4),
        ([3, 7], {"a": [0, 2], "b": [1]}, "b", 12, 4),
        ([3, 7], {"a": [0, 2], "b": [1]}, "b", 13, 4),
        ([3, 7], a, "c", 9, 4),
        ([], a, "a", 8, 4),
        ([], a, "a", 9, 4),
        ([], a, "c", 1, 4),
        ([4, 3, 1], {"a": [0, 2]}, "c", 33, 16),
    ]:
        scene = f"free {free}, tables {tables}, {request} asks for room for {tokens} tokens, blocks of {size}"
        free_now, tables_now = deepcopy(free), deepcopy(tables)
        hints = NEWCOMER | POP if request not in tables else POP
        got = attempt(free_now, tables_now, request, tokens, size, given=scene, hints=hints, pure=False)
        _expect_books(free_now, tables_now, tables, request, scene)
        old = tables.get(request, [])
        needed = -(-tokens // size) - len(old)
        if needed > len(free):
            why = _why_not_refused(got, free, tables, free_now, tables_now, request, needed)
        else:
            why = _why_not_allocated(got, free, old, free_now, tables_now.get(request), needed, tokens, size)
        if why:
            raise Wrong(f"{why} ({scene}).")
        if got not in (True, False):
            raise Wrong(f"should return True or False; it returned {kind(got)} ({scene}).")


def _why_not_refused(
    got, free: list[int], tables: Tables, free_now: list[int], tables_now: Tables, request: str, needed: int
) -> str | None:
    missing = f"{needed} more block{'s' if needed > 1 else ''} would be needed, and {len(free)} are free"
    if (free_now, tables_now) == (free, tables):
        return f"says {got!r}, but {missing}: that is False" if got is not False else None
    old, table = tables.get(request, []), tables_now.get(request, [])
    if got:
        return f"promises room that is not there: {missing}"
    if request not in tables and table == [] and request in tables_now:
        return f"refuses {request}, and leaves an empty table behind: whoever has a table counts as running"
    if len(table) > len(old):
        return (
            f"refuses, and keeps {_listed(table[len(old) :])}: {missing}. All or nothing: what a refused request "
            f"holds, nobody else can have"
        )
    if request not in tables_now:
        return f"refuses, and takes {request}'s table away: it still has the tokens of before"
    if len(free_now) < len(free):
        return f"refuses, and takes {len(free) - len(free_now)} blocks out of `free`: {missing}, so nothing may change"
    return f"refuses, and leaves `free` as {free_now} and the table of {request} as {table}: nothing may change"


def _why_not_allocated(
    got, free: list[int], old: list[int], free_now: list[int], table, needed: int, tokens: int, size: int
) -> str | None:
    table_now = old if table is None else table
    if table_now == old and free_now == free and not got and needed > 0:
        if got is None:
            return "changes nothing and returns nothing: new blocks leave `free`, and stand in the table itself"
        if old and -(-tokens // size) > len(free):
            there = f"{_listed(old)} {'is' if len(old) == 1 else 'are'} there already"
            return f"refuses, although {needed} more are needed and {len(free)} are free: {there}"
        if needed == len(free):
            return f"refuses, although {needed} blocks are needed and {len(free)} are free: it is just enough"
        return f"refuses, although {needed} blocks are needed and {len(free)} are free"
    if needed == 0 and table_now == old and free_now == free:
        if got is False:
            return f"refuses, although no block is needed: the last one has room for {tokens} tokens in all"
        return None if got is True else f"returns {kind(got)}: who asks wants True or False"
    if table_now[: len(old)] != old:
        if old and table_now[-len(old) :] == old:
            return "puts new blocks before the old ones: a table is in the order of the tokens, and these come last"
        if not set(old) <= set(table_now):
            return f"loses {_listed(old)}: the tokens so far are there, and the new blocks come behind them"
        return f"has the table {table_now}: {_listed(old)} hold the first tokens, and have to stay the first"
    added = table_now[len(old) :]
    if table is None and needed:
        return "gives a newcomer no table: its blocks have to be found again by its name"
    if len(added) != needed:
        return _wrong_number(len(added), needed, len(old), len(free), tokens, size)
    if len(set(added)) < len(added):
        twice = next(block for block in added if added.count(block) > 1)
        return f"gives out block {twice} twice: two pieces of a text would overwrite each other"
    if strangers := [block for block in added if block not in free]:
        return f"gives out {_listed(strangers)}, and free were {free}: somebody's tokens may be there"
    if still := [block for block in added if block in free_now]:
        return f"leaves {_listed(still)} in `free`: the next request would get the same block, and overwrite this one's"
    if lost := [block for block in free if block not in free_now and block not in added]:
        return f"loses {_listed(lost)}: neither free nor in a table"
    if sorted(free_now) != sorted(set(free) - set(added)):
        return f"leaves `free` as {free_now}: it should hold what was free and is not given out"
    if got is not True:
        word = "returns nothing" if got is None else f"says {got!r}"
        return f"{word}, although the room is there now: who asks has to know, so say True"
    return None


def _wrong_number(added: int, needed: int, had: int, free: int, tokens: int, size: int) -> str:
    whole = -(-tokens // size)
    took = f"takes {added} block{'' if added == 1 else 's'} where {needed} {'is' if needed == 1 else 'are'} needed"
    if had and added == whole:
        return f"{took}: {tokens} is the number of all its tokens, and {had} of the blocks for them are there already"
    if added == tokens // size + 1 - had and tokens % size == 0:
        return f"{took}: {tokens} tokens fill {whole} blocks of {size} exactly, and no token is there for another one"
    if added == tokens // size - had:
        return f"{took}: {tokens % size} tokens do not fill a block, but need one as well"
    if added == tokens or added == tokens - had:
        return f"{took}: a block holds {size} tokens"
    if added == free:
        return f"{took}, all that are free: others need some, too"
    return took


def release(attempt: Attempt) -> None:
    """Blocks of its own, blocks that others share, all of them shared, and the last one to leave."""
    three = {"a": [6, 1, 2], "b": [6, 1, 8], "c": [6, 4]}
    for free, tables, request in [
        ([4], {"a": [2, 5], "b": [0, 1, 3]}, "b"),
        ([], {"a": [2]}, "a"),
        ([5], {"a": [6, 1, 2], "b": [6, 1, 8]}, "a"),
        ([], three, "c"),
        ([7, 0], three, "b"),
        ([5], {"a": [3, 7], "b": [3, 7]}, "b"),
        ([5, 2], {"b": [6, 1, 8]}, "b"),
    ]:
        scene = f"free {free}, tables {tables}, {request} leaves"
        free_now, tables_now = deepcopy(free), deepcopy(tables)
        attempt(free_now, tables_now, request, given=scene, pure=False)
        _expect_books(free_now, tables_now, tables, request, scene)
        others = {block for name, table in tables.items() if name != request for block in table}
        if why := _why_not_released(free, free_now, tables[request], tables_now.get(request), others):
            raise Wrong(f"{why} ({scene}).")


def _why_not_released(
    free: list[int], free_now: list[int], table: list[int], table_now: list[int] | None, others: set[int]
) -> str | None:
    own = [block for block in table if block not in others]
    if shared := [block for block in table if block in others and block in free_now]:
        return (
            f"gives back {_listed(shared)}, which another table has, too: the next request would overwrite keys that "
            f"are still in use"
        )
    if twice := sorted({block for block in free_now if free_now.count(block) > 1}):
        return f"has {_listed(twice)} in `free` twice: two requests would get the same"
    if gone := [block for block in free if block not in free_now]:
        return f"loses {_listed(gone)} from `free`: what was free before still is"
    if strangers := [block for block in free_now if block not in free and block not in table]:
        return f"gives back {_listed(strangers)}, which were never its own"
    if table_now is None and (missing := [block for block in own if block not in free_now]):
        if len(own) < len(table) and len(missing) == len(own):
            return f"gives nothing back because some blocks are shared: nobody else has {_listed(missing)}"
        same = " (`free` itself has to change: a new list with its name is another list)" if free_now == free else ""
        return f"loses {_listed(missing)}: neither in a table nor free, so nobody can ever have them again{same}"
    if table_now is None:
        return None
    if table_now == [] and table:
        return "leaves an empty table behind: whoever has a table counts as running"
    if table_now == table and free_now == free and own:
        return "changes nothing: its blocks go to `free`, and its table goes away"
    return "keeps the table: whoever has left holds nothing, and somebody else's tokens will be in these blocks"


# --- who begins alike ---------------------------------------------------------------------------------------------


def prefix_hashes(attempt: Attempt) -> None:
    """Texts that share a beginning, an end or a piece in the middle, and that have the same tokens in other places."""
    size = 4
    first, second, third = [7, 3, 9, 1], [5, 5, 2, 8], [6, 4, 1, 3]

    def names_of(text: list[int], size: int = size) -> list:
        given = f"token_ids {text}, blocks of {size}"
        got = attempt(list(text), size, given=given)
        if not isinstance(got, list):
            raise Wrong(f"should return a list, a name for each full block; it returned {kind(got)} ({given}).")
        _expect_count(len(got), len(text), size, given)
        for name in got:
            if name is None or not isinstance(name, Hashable) or not _usable(name):
                raise Wrong(f"a name should be fit for the key of a dict, and is {kind(name)} ({given}).")
        return got

    text = first + second + third
    names = names_of(text)
    if names_of(text) != names:
        raise Wrong("gives the same text other names the second time: nobody would ever find a block by them.")
    if len(set(map(repr, names))) == 1:
        raise Wrong(f"gives all blocks the same name: {text} has three of them, with other tokens each.")
    cut = names_of(first)
    if names[-1] == cut[0]:
        raise Wrong("has the names backwards: the first one is the first block's.")

    def same(one: list[int], other: list[int], block: int) -> bool:
        return names_of(one)[block] == names_of(other)[block]

    for one, other, block, why in [
        (
            [*text, 1, 2],
            text,
            2,
            "the tokens behind the last full block change the name of that block. It can be shared, whatever comes "
            "after it",
        ),
        (
            first + second + third,
            first + second + [9, 9, 9, 9],
            1,
            "the name of a block depends on what comes after it. Keys do not: a token sees only what is before it",
        ),
        (first, text, 0, "the name of a block depends on how long the text is. Keys do not"),
    ]:
        if not same(one, other, block):
            raise Wrong(f"{why} (block {block} of {one} and of {other}).")
    own = "gives blocks with other tokens the same name: all of a block's own tokens belong to its name"
    far = "looks back one block only: what differs two blocks before is in the keys, too"
    begins, ends = [0, *first[1:]], [*first[:-1], 0]  # each with another token
    for one, other, block, why in [
        (second + first, second + begins, 1, own),
        (second + first, second + ends, 1, own),
        (
            first + second,
            begins + second,
            1,
            "looks at a block's own tokens only. Its keys have seen everything before it, so behind another beginning "
            "they are others",
        ),
        (text, begins + second + third, 2, far),
        (text, ends + second + third, 2, far),
        (second + first + third, second + begins + third, 2, "leaves out a part of the past: the block before counts"),
        (
            first + second,
            first + second[::-1],
            1,
            "the order of the tokens makes no difference to the name, and to the keys it does",
        ),
        (
            text,
            second + first + third,
            2,
            "the order of the blocks before makes no difference to the name, and to the keys it does",
        ),
        (
            [1, 11, 2, 3],
            [11, 1, 2, 3],
            0,
            "writes the numbers of the tokens together, so that 1, 11 and 11, 1 are the same: a name has to keep them "
            "apart",
        ),
    ]:
        if same(one, other, block):
            raise Wrong(f"{why} (block {block} of {one} and of {other}).")
    again = names_of(first + first)
    if again[0] == again[1]:
        raise Wrong(
            f"looks at a block's own tokens only: in {first + first}, the second block stands behind the first."
        )
    for text, size in [([], 4), ([1, 2, 3], 4), (list(range(13)), 3), ([4, 5, 6], 1)]:
        names_of(text, size)


def _usable(name) -> bool:
    """Whether it can be a key, and be found again."""
    try:
        return {name: True}.get(name, False) and not isinstance(name, Tensor)
    except Exception:
        return False


def _expect_count(got: int, tokens: int, size: int, given: str) -> None:
    full = tokens // size
    if got == full:
        return
    if got == -(-tokens // size):
        raise Wrong(
            f"gives a name to the last block, which is not full. Tokens will still be added to it, so nobody can share "
            f"it ({given})."
        )
    if got == full - 1 and tokens % size == 0:
        raise Wrong(f"leaves out the last block, which is just full ({given}).")
    if got == full + 1:
        raise Wrong(f"has {got} names for {full} full blocks ({given}): does one stand for the empty beginning?")
    if got in (tokens, tokens - size + 1):
        raise Wrong(f"has {got} names: wanted is one for each block, not for each token ({given}).")
    if got == 1:
        raise Wrong(
            f"has one name for the whole text: a text that begins alike shares only some of its blocks ({given})."
        )
    raise Wrong(f"has {got} names, and there are {full} full blocks ({given}).")


# --- in the engine ------------------------------------------------------------------------------------------------


class StudentBlockManager(BlockManager):
    """A block manager that asks a student's `allocate` and `release`; no blocks are shared.

    Args:
        num_blocks, block_size: as in `BlockManager`.
        allocate, release: the student's functions.

    Attributes:
        free_blocks: the student's list of free blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, allocate: Callable, release: Callable):
        super().__init__(num_blocks, block_size, prefix_caching=False)
        self.free_blocks = list(range(num_blocks))
        self._allocate, self._release = allocate, release

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate memory for the next `tokens` tokens, or return False.

        Raises:
            ValueError: it is refused although no sequence has a block: the engine would run forever.
        """
        total = sequence.computed + tokens
        done = self._allocate(self.free_blocks, self.tables, sequence, total, self.block_size)
        if not done and not self.tables:
            raise ValueError(
                f"Room for {tokens} tokens is refused, and nobody has any of the {self.num_blocks} blocks."
            )
        return bool(done)

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's blocks."""
        if sequence in self.tables:
            self._release(self.free_blocks, self.tables, sequence)
        sequence.computed = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated."""
        return len(self.free_blocks)


def engine_with(allocate: Callable, release: Callable, slot_of: Callable, config: EngineConfig) -> Engine:
    """Return an engine whose blocks and slots a student's functions choose.

    Args:
        allocate, release, slot_of: the student's functions.
        config: the engine's, with `num_blocks`; prefix caching is switched off.
    """
    engine = Engine(config=replace(config, execution="ragged", prefix_caching=False))
    blocks = engine.block_manager
    own = StudentBlockManager(blocks.num_blocks, blocks.block_size, allocate, release)
    engine.block_manager = engine.scheduler.memory = engine.validator.block_manager = own
    engine.runner.slot_mapping = partial(_slots_by, slot_of)
    return engine


def _slots_by(slot_of: Callable, block_table: list[int], block_size: int, start: int, end: int) -> list[int]:
    """Return the slots that a student's function gives a sequence's tokens from `start` to `end`."""
    return [slot_of(block_table, token, block_size) for token in range(start, end)]


TASKS = {
    "unused_room(lengths, block_size)": (unused_room, "less than a block for each request: all that paging wastes"),
    "slot_of(table, position, block_size)": (slot_of, "a text lies anywhere in memory, and is found by its table"),
    "allocate(free, tables, request, tokens, block_size)": (
        allocate,
        "all or nothing, no block has two owners, and none is taken before it is needed",
    ),
    "release(free, tables, request)": (release, "what nobody else uses can be given out again, and only that"),
    "prefix_hashes(token_ids, block_size)": (
        prefix_hashes,
        "two blocks have the same name if everything up to their end is the same, and can be shared",
    ),
}
