"""Lesson 5, attention in a packed row: a query attends to the keys of its own request, up to its own position."""

from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attempt import Attempt
from .differences import Grids, Wrong, expect_tensor, kind, recognise

Columns = Seq[tuple[int, int]]


# --- the mask of a row ------------------------------------------------------------------------------------------------


def block_mask(attempt: Attempt) -> None:
    """Check two prompts, three of unequal or equal lengths, a single one, and single tokens."""
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
    seen = got == 0 if got.is_floating_point() and got.min() < 0 else got.bool()  # an additive mask shows at 0
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


# --- attention to cached keys -----------------------------------------------------------------------------------------

HEADS, DIMENSION = 2, 4
SHAPES = "A request's keys are those of its whole text so far: there may be more of them than queries."
HINTS = {"must match the size": SHAPES, "is not broadcastable": SHAPES, "doesn't match the broadcast": SHAPES}
HINTS |= {"Sizes of tensors must match": SHAPES, "cannot be multiplied": SHAPES, "Expected size": SHAPES}


def attend_row(attempt: Attempt) -> None:
    """Check two prompts, two decodes, chunks, and a chunk between a decode and a prompt."""
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
    """Return the attention of all requests, one after the other along the row.

    `hidden` replaces the causal mask: (queries, keys) -> bool [queries, keys], True where a query attends to a key.
    """
    answers = []
    for (start, end), k, v in zip(columns, keys, values, strict=True):
        mask = (hidden or _bottom_right)(end - start, k.shape[1])
        answers.append(scaled_dot_product_attention(query[None, :, start:end], k[None], v[None], mask, scale=scale)[0])
    return torch.cat(answers, dim=1)


def _bottom_right(queries: int, keys: int, shift: int = 0) -> torch.Tensor:
    return torch.ones(queries, keys).tril(keys - queries + shift) == 1


def _explain_answer(got, right, query, keys, values, columns: Columns, given: str) -> None:
    """Raise `Wrong` with the misconception that gives the same answer, or else with the first wrong column."""
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
        except (RuntimeError, ValueError):  # this misconception cannot be computed here
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
    """Return the attention over the row as if it were a single text."""
    k, v = (
        torch.cat([one[:, one.shape[1] - new :] for one, new in zip(each, counts, strict=True)], dim=1)
        for each in (keys, values)
    )
    return _answers(query, [k], [v], [(0, sum(counts))])


TASKS = {
    "block_mask(columns)": (block_mask, "a triangle for each request, and nothing across"),
    "attend_row(query, keys, values, columns)": (
        attend_row,
        "a prompt, a chunk and a decode are the same to it, and nobody sees anybody else",
    ),
}
