"""The books of a paged KV cache, free blocks and block tables: observe a function that changes them, and audit them."""

from collections.abc import Callable
from copy import deepcopy
from numbers import Integral

Tables = dict[str, list[int]]


def books_after(function: Callable, free: list[int], tables: Tables, request: str, *arguments) -> dict:
    """Return the block tables, the free blocks and the other arguments as a function left them, and its result."""
    free, tables = list(free), {name: list(table) for name, table in tables.items()}
    arguments = deepcopy(arguments)  # a table may be the list of its shared blocks
    result = function(free, tables, request, *arguments)
    return {"tables": tables, "free": free, "result": result, "arguments": arguments}


def audit(free: list[int], tables: Tables, request: str, free_now: list, tables_now: dict) -> str | None:
    """Return what is wrong with the books after a request got blocks or left; None if nothing is.

    Each block must be free or in a table, and other requests' tables must not change.
    """
    for name in {**tables, **tables_now}:
        if name != request and tables_now.get(name) != tables.get(name):
            return f"changes the table of {name!r}, but this was about {request!r}"
    own = tables_now.get(request, [])
    used = [block for table in tables_now.values() for block in table]
    known = {*free, *(block for table in tables.values() for block in table)}
    for block in [*used, *free_now]:
        if not isinstance(block, Integral):
            return f"has {block!r} where a block's number should be"
        if block not in known:
            return f"has block {block}, which was neither free nor in a table"
        if free_now.count(block) > 1:
            return f"has block {block} in `free` twice: two requests would get it"
        if block in own and own.count(block) > 1:
            return f"has block {block} in a table twice: tokens would overwrite each other"
        if block in used and block in free_now:
            return f"has block {block} in a table and in `free`: the next request would overwrite keys that are in use"
    lost = sorted(known.difference(used, free_now))
    return f"loses the blocks {lost}: they are in no table and not in `free`" if lost else None
