"""Lesson 6, memory in blocks: how much room blocks waste, and in which slot a token is stored."""

from collections.abc import Callable

from .attempt import Attempt
from .differences import Wrong, expect_number, expect_numbers, kind

# --- what blocks waste ------------------------------------------------------------------------------------------------


def unused_room(attempt: Attempt) -> None:
    """Check last blocks that are half full, full and nearly empty, and requests shorter and longer than a block."""
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


# --- where a token is stored ------------------------------------------------------------------------------------------


def slot_of(attempt: Attempt) -> None:
    """Check tokens at all places in a block, block 0 and slot 0, and tokens without an allocated block."""
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


TASKS = {
    "unused_room(lengths, block_size)": (unused_room, "less than a block for each request: all that paging wastes"),
    "slot_of(table, position, block_size)": (slot_of, "a text lies anywhere in memory, and is found by its table"),
}
