"""Lesson 5, no padding: what a rectangle costs, one row for everybody, and attention that knows whose keys are whose.

`Reader` puts a student's row and attention under the model, so that they can be seen to change no token.
"""

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ..models import clone_sharing_weights, load_model
from .attempt import Attempt
from .differences import Grids, Wrong, expect_ids, expect_number, expect_numbers, expect_tensor, kind, recognise

Columns = Seq[tuple[int, int]]


def _expect_three(value, what: str, given: str) -> None:
    if not isinstance(value, tuple | list) or len(value) != 3:
        of = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise Wrong(f"should return three things, {what}; it returned {kind(value)}{of} ({given}).")


# --- what padding costs -------------------------------------------------------------------------------------------


def padded_tokens(attempt: Attempt) -> None:
    """Unequal prompts, decodes beside a page, equal lengths, a single request."""
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


# --- one row for everybody ----------------------------------------------------------------------------------------


def pack(attempt: Attempt) -> None:
    """Prompts, decodes, both together, chunks from the middle of a prompt."""
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


# --- who sees whom ------------------------------------------------------------------------------------------------


def block_mask(attempt: Attempt) -> None:
    """Two prompts, three of unequal lengths, a single one, single tokens."""
    for lengths in [[3, 2], [1, 4, 2], [4], [1, 1], [2, 2, 2]]:
        columns = list(pairwise(accumulate(lengths, initial=0)))
        given = f"columns {columns}"
        got = attempt(list(columns), given=given)
        total = columns[-1][1]
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        own, causal = owner[:, None] == owner, torch.ones(total, total).tril() == 1
        right = own & causal
        if not isinstance(got, torch.Tensor):
            raise Wrong(f"should return a tensor; it returned {kind(got)} ({given}).")
        if list(got.shape) == [total, total]:
            _expect_looks(got.cpu(), right, own, causal, given)
        meaning = "a line for each token that looks, a column for each that is looked at"
        expect_tensor(got, f"the mask ({given})", right.shape, meaning, got.dtype)


def _expect_looks(got: torch.Tensor, right: torch.Tensor, own: torch.Tensor, causal: torch.Tensor, given: str) -> None:
    seen = got == 0 if got.is_floating_point() and got.min() < 0 else got.bool()  # an additive mask hides by minus
    grids = Grids(right.int().tolist(), seen.int().tolist(), "mask: line looks at column", (None, 0))
    itself = torch.eye(len(right), dtype=torch.bool)
    crossing = next(((i, j) for i, j in (seen & ~own).nonzero().tolist()), None)
    recognise(
        seen,
        right,
        [
            (
                causal,
                f"a token sees everything before it in the row, others' texts, too: line {crossing and crossing[0]} "
                f"looks at column {crossing and crossing[1]} ({given}). Only its own request's columns are its past.",
            ),
            (
                own,
                f"a token sees what comes after it in its text ({given}). The model has learned to guess that, and "
                "keys that are in the cache have not seen it either.",
            ),
            (right.T, f"lines and columns are swapped: line i is the token that looks ({given})."),
            (~right, f"is upside down: True means that a token looks ({given})."),
            (causal.T, f"a token sees what comes after it, others' texts, too ({given})."),
            (right & ~itself, f"a token does not see itself, and a text's first one would see nothing ({given})."),
            (itself, f"a token sees nothing but itself: what came before it in its text is missing ({given})."),
            (
                torch.ones_like(right),
                f"everybody sees everything: others' texts, and what comes after ({given}).",
            ),
            (causal & ~own, f"a token sees the others' texts and not its own ({given})."),
        ],
        grids,
    )
    if torch.equal(seen, right):
        if got.is_floating_point() and got.min() < 0:
            raise Wrong(f"is a mask to add to the scores; wanted is a bool one, True where a token looks ({given}).")
        if got.dtype != torch.bool:
            raise Wrong(
                f"holds {str(got.dtype).removeprefix('torch.')}, and should hold bool. What is not bool is added to "
                f"the scores: a 0 would hide nothing ({given})."
            )
        return
    i, j = (seen != right).nonzero()[0].tolist()
    if not own[i, j]:
        raise Wrong(f"line {i} looks at column {j}, which is another request's ({given}).", grids)
    if j > i:
        raise Wrong(f"line {i} looks at column {j}, which comes after it ({given}).", grids)
    raise Wrong(f"line {i} does not look at column {j}, which is in its own text and not after it ({given}).", grids)


# --- attention ----------------------------------------------------------------------------------------------------

HEADS, DIMENSION = 2, 4
SHAPES = "A request's keys are those of its whole text so far: there may be more of them than queries."
HINTS = {"must match the size": SHAPES, "is not broadcastable": SHAPES, "doesn't match the broadcast": SHAPES}
HINTS |= {"Sizes of tensors must match": SHAPES, "cannot be multiplied": SHAPES, "Expected size": SHAPES}


def attend_row(attempt: Attempt) -> None:
    """Two prompts, decodes with keys of their own, and a chunk between a decode and a prompt."""
    random = torch.Generator().manual_seed(5)
    for spans, what in [
        ([(0, 3), (0, 2)], "two prompts"),
        ([(4, 1), (2, 1)], "two decodes"),
        ([(3, 1), (4, 3), (0, 4)], "a decode, a chunk of a prompt and a prompt"),
        ([(5, 2)], "one chunk"),
        ([(2, 2), (2, 2)], "two chunks"),
    ]:
        columns = list(pairwise(accumulate((new for _, new in spans), initial=0)))
        query = torch.randn(HEADS, columns[-1][1], DIMENSION, generator=random)
        keys, values = (
            [torch.randn(HEADS, past + new, DIMENSION, generator=random) for past, new in spans] for _ in range(2)
        )
        cached = [past for past, _ in spans]
        given = f"{what}: columns {columns}, cached {cached}"
        got = attempt(query, list(keys), list(values), list(columns), given=given, hints=HINTS)
        right = _answers(query, keys, values, columns)
        if isinstance(got, list | tuple) and got and all(isinstance(each, torch.Tensor) for each in got):
            raise Wrong(f"returns {len(got)} tensors: put the answers side by side again, in one ({given}).")
        expect_tensor(got, f"the answer ({given})", right.shape, "as `query`: heads, tokens, head dim", torch.float32)
        if not torch.allclose(got.cpu(), right, atol=1e-4):
            _explain_answer(got.detach().cpu(), right, query, keys, values, columns, given)


def _answers(query, keys, values, columns: Columns, hidden=None, scale: float | None = None) -> torch.Tensor:
    """Every request's attention; `hidden` shifts or replaces the mask: (queries, keys) -> bool [queries, keys]."""
    answers = []
    for (start, end), k, v in zip(columns, keys, values, strict=True):
        mask = (hidden or _bottom_right)(end - start, k.shape[1])
        answers.append(scaled_dot_product_attention(query[None, :, start:end], k[None], v[None], mask, scale=scale)[0])
    return torch.cat(answers, dim=1)


def _bottom_right(queries: int, keys: int, shift: int = 0) -> torch.Tensor:
    return torch.ones(queries, keys).tril(keys - queries + shift) == 1


def _explain_answer(got, right, query, keys, values, columns: Columns, given: str) -> None:
    """What each misconception would have answered; it is named if it fits."""
    counts = [end - start for start, end in columns]
    several = len(columns) > 1

    def answers(of_keys=lambda each: each, **changes) -> torch.Tensor:
        return _answers(query, of_keys(keys), of_keys(values), columns, **changes)

    def own_columns(each):
        return [one[:, one.shape[1] - new :] for one, new in zip(each, counts, strict=True)]

    def together(each):
        return [torch.cat(list(each), dim=1)] * len(columns)

    def top_left(queries, keys):
        return torch.ones(queries, keys).tril() == 1

    def everything(queries, keys):
        return torch.ones(queries, keys) == 1

    stranger = "a query would see another request's text. Each has its own keys, in the list at its own place"
    aligned = (
        "the mask lines up the first query with the first key. The new tokens are a text's last ones: their first sees "
        "all that is cached, and itself"
    )
    ideas = [
        (lambda: answers(hidden=top_left), aligned),
        (lambda: answers(hidden=lambda queries, keys: top_left(queries, keys) | (queries == 1)), aligned),
        (
            lambda: answers(own_columns),
            "looks at the tokens of this pass only. What was read before is in `keys` and `values`, too, and every new "
            "token sees all of it",
        ),
        (
            lambda: answers(hidden=everything),
            "a token sees those that come after it in its own chunk: only a decode, a single token, needs no mask",
        ),
        (lambda: answers(together, hidden=everything), f"looks at everybody's keys: {stranger}"),
        (lambda: answers(together), f"puts the keys of all requests together: {stranger}"),
        (
            lambda: answers(lambda each: each[:1] * len(each)) if several else None,
            f"takes the first request's keys for all of them: {stranger}",
        ),
        (lambda: answers(lambda each: each[::-1]) if several else None, f"takes the keys backwards: {stranger}"),
        (
            lambda: torch.cat(answers().split(counts, dim=1)[::-1], dim=1),
            "the answers stand side by side in another order than the queries",
        ),
        (lambda: _answers(query, values, keys, columns), "keys and values are swapped: scores are made with the keys"),
        (
            lambda: _answers(query, keys, keys, columns),
            "sums up the keys: they make the scores, and what a query gets is made of the values",
        ),
        (
            lambda: answers(scale=1.0),
            "the scores are not divided by the square root of the head dim, and the model was trained so",
        ),
        (lambda: answers(scale=1 / DIMENSION), "the scores are divided by the head dim, not by its square root"),
        (
            lambda: answers(hidden=lambda queries, keys: _bottom_right(queries, keys, shift=-1)),
            "a token does not see itself: its own key is the last one that it looks at",
        ),
        (
            lambda: answers(hidden=lambda queries, keys: _bottom_right(queries, keys, shift=1)),
            "a token sees one that comes after it: its own key is the last one that it looks at",
        ),
        (
            lambda: answers(hidden=lambda queries, keys: ~_bottom_right(queries, keys)),
            "the mask is upside down: for attention, True means to look",
        ),
        (
            lambda: _one_text(query, keys, values, counts),
            "the row is read as one text: its tokens are several requests'",
        ),
    ]
    for answer, why in ideas:
        try:
            wrong = answer()
        except (RuntimeError, ValueError):  # this idea cannot be computed here
            continue
        if wrong is None or wrong.shape != got.shape or torch.allclose(wrong, right, atol=1e-4):
            continue
        if torch.allclose(torch.nan_to_num(got), torch.nan_to_num(wrong), atol=1e-4):
            raise Wrong(f"{why} ({given}).")
    if got.isnan().any():
        raise Wrong(f"the answer holds NaN: a query that may look at nothing. Each sees at least itself ({given}).")
    off = ((got - right).abs().amax(dim=(0, 2)) > 1e-4).nonzero().flatten().tolist()
    request = next(number for number, (_, end) in enumerate(columns) if off[0] < end)
    alone = "the others are right" if len(off) <= counts[request] else "so are later ones"
    raise Wrong(
        f"the answer in column {off[0]}, of request {request}, is not what that request alone would get; {alone} "
        f"({given})."
        if len(columns) > 1
        else f"the answer in column {off[0]} is not right ({given})."
    )


def _one_text(query, keys, values, counts: Seq[int]) -> torch.Tensor:
    """A row whose tokens see all those before them, as if it were one text."""
    k, v = (
        torch.cat([one[:, one.shape[1] - new :] for one, new in zip(each, counts, strict=True)], dim=1)
        for each in (keys, values)
    )
    return _answers(query, [k], [v], [(0, sum(counts))])


# --- on the model -------------------------------------------------------------------------------------------------


class Reader:
    """A student's `pack` and `attend_row` under a model: reads rows, and keeps everybody's keys and values.

    Args:
        pack, attend_row: the student's functions.
        model: `load_model()`'s if left out; it stays as it is.

    Attributes:
        columns: how many columns each row had so far.
    """

    def __init__(self, pack: Callable, attend_row: Callable, model=None):
        self.pack, self.attend_row = pack, attend_row
        self.model = clone_sharing_weights(model or load_model()[0])
        self.columns: list[int] = []
        self._kept: dict[tuple[Hashable, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._parts: list[tuple[Hashable, int, int]] = []  # of the row that is being read
        AttentionInterface.register("exercise", lambda *args, **kwargs: None)
        self.model.set_attn_implementation("exercise")
        self.model.config.pad_token_id = None  # there are no pads, so transformers need not warn of missing masks

    def read(self, chunks: Mapping[Hashable, Seq[int]]) -> dict[Hashable, torch.Tensor]:
        """One forward pass over {request: its next token ids}; returns {request: logits after the last of them}."""
        cached = [self._kept[request, 0][0].shape[1] if (request, 0) in self._kept else 0 for request in chunks]
        ids, positions, columns = self.pack([list(chunk) for chunk in chunks.values()], cached)
        self._parts = [(request, start, end) for request, (start, end) in zip(chunks, columns, strict=True)]
        self.columns.append(len(ids))
        AttentionInterface.register("exercise", self._attend)  # there may be other readers
        device = self.model.device
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
            ).logits[0]
        return {request: logits[end - 1] for request, _, end in self._parts}

    def forget(self, request: Hashable) -> None:
        """Drop the keys and values of a request that is done."""
        self._kept = {place: pair for place, pair in self._kept.items() if place[0] != request}

    def _attend(self, module, query, key, value, attention_mask, scaling=None, **_):
        keys, values = [], []
        for request, start, end in self._parts:
            pair = tuple(one[0, :, start:end].cpu() for one in (key, value))  # an exercise knows no devices
            if old := self._kept.get((request, module.layer_idx)):
                pair = tuple(torch.cat(both, dim=1) for both in zip(old, pair, strict=True))
            self._kept[request, module.layer_idx] = pair
            groups = query.shape[1] // key.shape[1]  # several heads may share a key
            keys.append(pair[0].repeat_interleave(groups, dim=0))
            values.append(pair[1].repeat_interleave(groups, dim=0))
        if scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)  # an exercise divides by the square root
        columns = [(start, end) for _, start, end in self._parts]
        answer = self.attend_row(query[0].cpu(), keys, values, columns)
        return answer.transpose(0, 1)[None].to(query.device), None


TASKS = {
    "padded_tokens(lengths)": (padded_tokens, "a rectangle pays for the longest request in every row, a row does not"),
    "pack(chunks, cached)": (
        pack,
        "everybody's tokens in one row, each at the place where it stands in its own text",
    ),
    "block_mask(columns)": (block_mask, "a triangle for each request, and nothing across"),
    "attend_row(query, keys, values, columns)": (
        attend_row,
        "a prompt, a chunk and a decode are the same to it, and nobody sees anybody else",
    ),
}
