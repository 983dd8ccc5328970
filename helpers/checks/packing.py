"""Lesson 5, packing: how many tokens padding costs, and a row that holds the tokens of all requests."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise

from .attempt import Attempt
from .differences import Wrong, expect_ids, expect_number, expect_numbers, kind, recognise


def _expect_three(value, what: str, given: str) -> None:
    if not isinstance(value, tuple | list) or len(value) != 3:
        of = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise Wrong(f"should return three things, {what}; it returned {kind(value)}{of} ({given}).")


# --- what padding costs -----------------------------------------------------------------------------------------------


def padded_tokens(attempt: Attempt) -> None:
    """Check unequal prompts, decodes beside a long prompt, equal lengths and a single request."""
    cases = [[5, 3, 7], [1, 1, 1, 40], [6, 6], [9], [2, 11, 2, 2, 2]]
    given = [f"lengths {lengths}" for lengths in cases]
    got = []
    for lengths, told in zip(cases, given, strict=True):
        three = attempt(list(lengths), given=told)
        _expect_three(three, "the tokens of the rectangle, the pads among them and the tokens of the row", told)
        for number in three:
            expect_number(number)
        got.append([float(number) for number in three])

    rectangle = [len(lengths) * max(lengths) for lengths in cases]
    row = [sum(lengths) for lengths in cases]
    pads = [all - own for all, own in zip(rectangle, row, strict=True)]
    right = list(zip(rectangle, pads, row, strict=True))
    if got != [list(each) for each in right] and all(
        sorted(one) == sorted(other) for one, other in zip(got, right, strict=True)
    ):
        raise Wrong("has the three numbers in another order: the rectangle's tokens, its pads, the row's tokens.")
    longest = [max(lengths) for lengths in cases]
    expect_numbers(
        [three[0] for three in got],
        rectangle,
        [
            (row, "counts the requests' own tokens for the rectangle: all its rows are as wide as the longest."),
            (longest, "counts a single row of the rectangle: every request has one."),
            (pads, "counts only the pads of the rectangle: the requests' tokens are computed, too."),
            (
                [len(lengths) * min(lengths) for lengths in cases],
                "makes the rectangle as wide as the shortest request: the others would be cut.",
            ),
            (
                [len(lengths) * sum(lengths) for lengths in cases],
                "makes every row of the rectangle as wide as all requests together: each row holds one of them.",
            ),
        ],
        [f"the tokens of the rectangle, {told}" for told in given],
    )
    expect_numbers(
        [three[1] for three in got],
        pads,
        [
            (row, "takes the requests' own tokens for pads: pads are what nobody asked for."),
            (rectangle, "takes everything in the rectangle for pads."),
            (
                [max(lengths) - min(lengths) for lengths in cases],
                "looks at the longest and the shortest request only: every row but the longest is padded.",
            ),
            (
                [sum(length < max(lengths) for length in lengths) for lengths in cases],
                "counts rows that are padded. Wanted are the pads: a row may have many.",
            ),
            ([one / all for one, all in zip(pads, rectangle, strict=True)], "gives a share. Wanted is how many pads."),
            ([0] * len(cases), "finds no pads: in a rectangle, shorter rows are filled up."),
        ],
        [f"the pads, {told}" for told in given],
    )
    expect_numbers(
        [three[2] for three in got],
        row,
        [
            (rectangle, "pads the row, too: side by side nobody has to be as long as anybody else."),
            (pads, "has the pads in the place of the row's tokens: the row has none."),
            (longest, "makes the row as long as the longest request: everybody's tokens stand in it side by side."),
            (
                [len(lengths) for lengths in cases],
                "counts one token for each request: that is so only if all of them decode.",
            ),
        ],
        [f"the tokens of the row, {told}" for told in given],
    )


# --- one row for all requests -----------------------------------------------------------------------------------------


def pack(attempt: Attempt) -> None:
    """Check prompts, decodes, both together, and chunks from the middle of a prompt."""
    for chunks, cached, what in [
        ([[14], [23]], [3, 2], "two decodes"),
        ([[11, 12], [21, 22, 23]], [0, 0], "two prompts"),
        ([[15], [24], [31, 32, 33, 34]], [4, 3, 0], "two decodes and a prompt"),
        ([[43, 44, 43, 45], [15], [43, 44]], [6, 9, 2], "two chunks, and a decode between them"),
        ([[7]], [0], "a single token"),
    ]:
        given = f"{what}: chunks {chunks}, cached {cached}"
        got = attempt([list(chunk) for chunk in chunks], list(cached), given=given)
        _expect_three(got, "the row's ids, its positions and the columns of every request", given)
        ids, positions, columns = got
        _expect_row(ids, chunks, given)
        _expect_positions(positions, chunks, cached, given)
        _expect_columns(columns, chunks, cached, given)


def _expect_row(ids, chunks: Seq[list[int]], given: str) -> None:
    right = [token for chunk in chunks for token in chunk]
    if isinstance(ids, list) and ids and all(isinstance(each, list) for each in ids):
        if len(ids) == 1 < len(chunks):
            raise Wrong(f"the ids are a list in a list ({given}): wanted is a plain list, the row itself.")
        raise Wrong(f"the ids are a list for each request ({given}): all their tokens stand in one row.")
    expect_ids(ids, f"the row ({given})")
    if ids == right:
        return
    width = max(map(len, chunks))

    def joined(lists) -> list[int]:
        return [token for each in lists for token in each]

    recognise(
        ids,
        right,
        [
            (joined(chunks[::-1]), f"has the requests backwards: the columns name them as they were given ({given})."),
            (joined(sorted(chunks, key=len)), f"sorts the requests by length: who is who would be lost ({given})."),
            (
                joined(sorted(chunks, key=len, reverse=True)),
                f"sorts the requests by length: who is who would be lost ({given}).",
            ),
            (
                [chunk[-1] for chunk in chunks],
                f"has the last token of each request only: all of a chunk is read ({given}).",
            ),
            (chunks[0], f"has the first request's tokens only: all of them share the row ({given})."),
            (list(dict.fromkeys(right)), f"drops tokens that come twice: each of them is read ({given})."),
        ],
    )
    if len(ids) == len(chunks) * width > len(right):
        raise Wrong(f"the row has {len(ids)} tokens, pads among them: in a row nobody has to be padded ({given}).")
    if len(ids) != len(right):
        raise Wrong(f"the row has {len(ids)} tokens, and the requests read {len(right)} ({given}).")
    place = next(place for place in range(len(ids)) if ids[place] != right[place])
    raise Wrong(f"the row, column {place}: expected {right[place]}, got {ids[place]} ({given}).")


def _expect_positions(positions, chunks: Seq[list[int]], cached: Seq[int], given: str) -> None:
    expect_ids(positions, f"the positions ({given})")
    spans = list(zip(cached, map(len, chunks), strict=True))
    columns = list(accumulate(map(len, chunks), initial=0))
    total = columns[-1]
    right = [past + place for past, count in spans for place in range(count)]

    def each(of: Callable[[int, int, int], Seq[int]]) -> list[int]:
        parts = zip(spans, columns, strict=False)
        return [position for (past, count), start in parts for position in of(past, count, start)]

    recognise(
        positions,
        right,
        [
            (
                each(lambda past, count, start: range(count)),
                "the positions start with 0 again, although tokens of the request are in the cache: what is new stands "
                f"behind them ({given}).",
            ),
            (
                list(range(total)),
                "the positions run on through the row. A token's position is its place in its own text, wherever it "
                f"stands in the row ({given}).",
            ),
            (
                each(lambda past, count, start: range(past + start, past + start + count)),
                "adds the column to what is cached: the position counts a request's own tokens, and those beside it "
                f"in the row are others' ({given}).",
            ),
            (
                each(lambda past, count, start: range(past + 1, past + count + 1)),
                f"the positions are one too far: the first token of a text has position 0 ({given}).",
            ),
            (
                each(lambda past, count, start: range(past - 1, past + count - 1)),
                f"the positions are one too low: the newest of the cached tokens has that position already ({given}).",
            ),
            (
                each(lambda past, count, start: [past] * count),
                f"all tokens of a chunk get the same position: they stand one behind the other ({given}).",
            ),
            (
                each(lambda past, count, start: range(past + count)),
                f"numbers the cached tokens, too: there is one position for each token in the row ({given}).",
            ),
        ],
    )
    if len(positions) != len(right):
        raise Wrong(f"has {len(positions)} positions for {len(right)} tokens ({given}).")
    if positions != right:
        place = next(place for place in range(total) if positions[place] != right[place])
        raise Wrong(f"the positions, column {place}: expected {right[place]}, got {positions[place]} ({given}).")


def _expect_columns(columns, chunks: Seq[list[int]], cached: Seq[int], given: str) -> None:
    lengths = [len(chunk) for chunk in chunks]
    borders = list(accumulate(lengths, initial=0))
    right = list(pairwise(borders))
    if not isinstance(columns, list | tuple):
        raise Wrong(f"the columns should be a list of (start, end), and are {kind(columns)} ({given}).")
    if list(columns) == borders or list(columns) == borders[1:]:
        raise Wrong(f"the columns are a list of borders: wanted is a pair (start, end) for each request ({given}).")
    for pair in columns:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(each) is int for each in pair):
            raise Wrong(f"the columns should be pairs (start, end), and {kind(pair)} is among them ({given}).")
    got = [tuple(pair) for pair in columns]
    with_past = [past + length for past, length in zip(cached, lengths, strict=True)]
    recognise(
        got,
        right,
        [
            (
                [(start, end - 1) for start, end in right],
                "the columns end with a request's last token. As in a slice, `end` is the column behind it: with "
                f"yours, each request would lose one ({given}).",
            ),
            (
                [(start, end - start) for start, end in right],
                f"the columns are (start, number of tokens): wanted is where they end ({given}).",
            ),
            (
                [(0, length) for length in lengths],
                f"all requests start in column 0: they stand side by side in one row ({given}).",
            ),
            (
                [(start + 1, end + 1) for start, end in right],
                f"the columns are one too far to the right: the first one is column 0 ({given}).",
            ),
            (
                list(zip(cached, with_past, strict=True)),
                f"the columns are the positions: a column is a place in the row, whatever is cached ({given}).",
            ),
            (
                list(pairwise(accumulate(with_past, initial=0))),
                "the columns leave room for what is cached: the row holds only what is read now, and the rest stays "
                f"in the cache ({given}).",
            ),
        ],
    )
    if len(got) != len(right):
        raise Wrong(f"has columns for {len(got)} of {len(right)} requests ({given}).")
    for request, (one, other) in enumerate(zip(got, right, strict=True)):
        if one != other:
            raise Wrong(f"the columns of request {request}: expected {other}, got {one} ({given}).")


TASKS = {
    "padded_tokens(lengths)": (padded_tokens, "a rectangle pays for the longest request in every row, a row does not"),
    "pack(chunks, cached)": (
        pack,
        "everybody's tokens in one row, each at the place where it stands in its own text",
    ),
}
