"""Lesson 6, block allocation: which request gets which blocks, and which blocks are free again when it leaves."""

from collections.abc import Sequence as Seq
from copy import deepcopy

from .attempt import Attempt
from .differences import Wrong, kind

Tables = dict[str, list[int]]
NEWCOMER = {"'c'": "A newcomer has no table yet."}
POP = {"pop from": "There are fewer free blocks than needed: find that out before you take the first one."}


def _listed(blocks: Seq[int]) -> str:
    return f"block{'' if len(blocks) == 1 else 's'} {', '.join(map(str, blocks))}"


def _expect_books(free, tables, before: Tables, request: str, scene: str) -> None:
    """Raise `Wrong` if `free` or a table does not list blocks, or if another request's table has changed."""
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
    """Check new and growing requests with enough, just enough and too few free blocks, or with none needed."""
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
    """Check blocks of its own, blocks shared with others, a table shared completely, and the last request to leave."""
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


TASKS = {
    "allocate(free, tables, request, tokens, block_size)": (
        allocate,
        "all or nothing, no block has two owners, and none is taken before it is needed",
    ),
    "release(free, tables, request)": (release, "what nobody else uses can be given out again, and only that"),
}
