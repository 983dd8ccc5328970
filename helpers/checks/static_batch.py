"""Lesson 2, a static batch: padding and masks, a row's own positions, what a batch yields and what it wastes."""

import torch
from torch.nn.functional import pad

from ..trace import RowStep, Trace, TracedPass
from .attempt import Attempt
from .differences import (
    Grids,
    Wrong,
    expect_device,
    expect_equal,
    expect_number,
    expect_numbers,
    expect_pair,
    expect_tensor,
    kind,
    recognise,
    same,
)

NEWEST = "A row's newest token must stand at the right edge, where the next one is read off and appended."


def left_pad(attempt: Attempt) -> None:
    """Unequal rows; rows in which the pad's id is also a real token; a single row."""
    rows = [[5, 6], [7, 8, 9, 4], [3]]
    for case, pad_id in [(rows, 0), ([[2, 7, 2, 6], [8, 2]], 2), ([[4, 5]], 0)]:
        given = f"{case} with pad_id {pad_id}"
        got = attempt(
            [list(row) for row in case],
            pad_id,
            given=given,
            hints={
                "expected sequence of length": "A tensor is rectangular: all rows must be filled up to one width.",
            },
        )
        expect_pair(got, "input_ids and attention_mask")
        ids, mask = got
        if isinstance(ids, list) or isinstance(mask, list):
            raise Wrong(f"should return two tensors; it returned {kind(ids)} and {kind(mask)}.")
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        expect_padded(ids, mask, case, pad_id, devices)


def _sides(rows: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, padded on the left and on the right."""
    width = max(map(len, rows))
    tensors = [torch.tensor(row) for row in rows]
    return tuple(
        torch.stack(
            [pad(row, (0, width - len(row)) if right else (width - len(row), 0), value=pad_id) for row in tensors]
        )
        for right in (False, True)
    )


def expect_padded(ids, mask, rows: list[list[int]], pad_id: int, devices: list[str]) -> None:
    """Say in words if `ids` and `mask` are not the rows, padded on the left with `pad_id`, and their mask."""
    left, right = _sides(rows, pad_id)
    ones = [[1] * len(row) for row in rows]
    left_mask, right_mask = _sides(ones, 0)
    width, short = left.size(1), min(map(len, rows))
    row = next((row for row in range(len(rows)) if len(rows[row]) < width), 0)

    expect_device(ids, "input_ids", devices)
    expect_device(mask, "attention_mask", devices)
    if same(ids, left_mask) and same(mask, left):
        raise Wrong("returns the mask first. Wanted are input_ids, then attention_mask.")
    if isinstance(ids, torch.Tensor) and ids.dim() == 2:
        grids = Grids(left.tolist(), ids.tolist(), "input_ids")
        lined = torch.tensor([each[:short] for each in rows])
        recognise(
            ids,
            left,
            [
                (
                    right,
                    f"row {row} is padded on the right: in its last column stands a pad, and the model would "
                    f"continue the pad. {NEWEST}",
                ),
                (_sides(rows, 0)[0], f"fills up with 0 where the pad's id is {pad_id}: every tokenizer has its own."),
                (left.flip(0), "turns the order of the rows around: row 0 must stay request 0."),
                (_sides([each[::-1] for each in rows], pad_id)[0], "turns the tokens of each row around."),
                (
                    _sides(sorted(rows, key=len), pad_id)[0],
                    "sorts the rows by their length. Row i must stay request i: somebody waits for the answer.",
                ),
                (
                    _sides(sorted(rows, key=len, reverse=True), pad_id)[0],
                    "sorts the rows by their length. Row i must stay request i: somebody waits for the answer.",
                ),
                (lined, "cuts all rows to the shortest one: tokens of the longer prompts are lost."),
                (
                    torch.tensor([each[-short:] for each in rows]),
                    "cuts all rows to the shortest one: tokens of the longer prompts are lost.",
                ),
            ],
            grids,
        )
        if ids.size(0) == len(rows) and ids.size(1) > width:
            raise Wrong(
                f"makes the rows {ids.size(1)} wide where the longest has {width} tokens: a column in which every row "
                f"has a pad is computed for nobody.",
                grids,
            )
    expect_tensor(ids, "input_ids", left.shape, "a row for each request, as wide as the longest", devices=devices)
    expect_equal(ids, left, "input_ids", "input_ids")

    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        grids = Grids(left_mask.tolist(), mask.long().tolist(), "attention_mask", (None, 0))
        from_ids = (left != pad_id).long()
        recognise(
            mask,
            left_mask,
            [
                (
                    right_mask,
                    f"row {row}'s mask is padded on the right, its tokens on the left: the mask hides real "
                    f"tokens and shows pads.",
                ),
                (1 - left_mask, "has the mask upside down: 1 is a real token, 0 a pad."),
                (
                    from_ids,
                    f"takes every token with the id {pad_id} for a pad. A text may contain that token (GPT-2's "
                    f"pad is its EOS): the mask follows from where you padded, not from the ids.",
                ),
                (
                    torch.ones_like(left_mask),
                    f"shows the pads: the mask is 1 everywhere, and row {row}'s tokens would "
                    f"look at the pads as if they were text.",
                ),
                (left_mask.flip(0), "turns the order of the mask's rows around."),
            ],
            grids,
        )
    expect_tensor(mask, "attention_mask", left.shape, "one number for each of the input_ids", devices=devices)
    expect_equal(mask, left_mask, "attention_mask", "attention_mask", (None, 0))


def position_ids(attempt: Attempt) -> None:
    """A batch of prompts, and a mask that has grown, its rows unequal in both."""
    for rows in ([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], [[0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]]):
        mask = torch.tensor(rows)
        got = attempt(mask, given=f"the mask {rows}")
        expect_positions(got, mask)


def expect_positions(got, mask: torch.Tensor, name: str = "") -> None:
    """Say in words if a batch's positions are not those of each row's own tokens; pads may have any from 0 on."""
    expect_device(got, name or "the result", [mask.device])
    if isinstance(got, torch.Tensor):
        got, mask = got.cpu(), mask.cpu()
    prefix = f"{name} " if name else ""
    counted = mask.cumsum(dim=1)
    right = counted - 1
    columns = torch.arange(mask.size(1)).expand_as(mask)
    padded = [row for row in range(mask.size(0)) if not mask[row, 0]] or [0]
    row, first = padded[0], mask[padded[0]].tolist().index(1)
    if isinstance(got, torch.Tensor) and got.shape == mask.shape:
        seen = torch.where(mask == 1, got, torch.zeros_like(got))
        grids = Grids(_real(right, mask), _real(got, mask), "position ids")
        wrong = [
            (
                columns,
                f"numbers the columns, pads included: row {row}'s first real token is at position {first}. "
                f"Positions count a row's own tokens, from 0, wherever it stands in the tensor.",
            ),
            (counted, f"starts with 1: row {row}'s first real token is at position 1, and must be at 0."),
            (mask.flip(1).cumsum(dim=1).flip(1) - 1, "counts from the right: a row's *first* real token is at 0."),
            (mask, "gives every real token position 1: they must count up from 0."),
            ((1 - mask).cumsum(dim=1), "counts the pads. Positions count real tokens."),
            (
                columns + 1,
                f"numbers the columns, pads included: row {row}'s first real token is at position "
                f"{first + 1}, and must be at 0.",
            ),
        ]
        hidden = [(torch.where(mask == 1, result, torch.zeros_like(result)), prefix + text) for result, text in wrong]
        recognise(seen, torch.where(mask == 1, right, torch.zeros_like(right)), hidden, grids)
    expect_tensor(got, name or "the result", mask.shape, "a position for each number of the mask")
    different = ((got != right) & (mask == 1)).nonzero()
    if len(different):
        y, x = different[0].tolist()
        raise Wrong(
            f"{prefix}row {y}, column {x}: expected position {right[y, x].item()}, got {got[y, x].item()}.",
            Grids(_real(right, mask), _real(got, mask), "position ids"),
        )
    if (got < 0).any():
        y, x = (got < 0).nonzero()[0].tolist()
        raise Wrong(
            f"{prefix}gives the pad in row {y}, column {x} position {got[y, x].item()}. The mask hides it, but the "
            f"model looks its position up in a table all the same: any value from 0 on is fine."
        )


def _real(positions: torch.Tensor, mask: torch.Tensor) -> list[list]:
    """Rows of cells, None for pads."""
    pairs = zip(positions.tolist(), mask.tolist(), strict=True)
    return [[value if real else None for value, real in zip(*pair, strict=True)] for pair in pairs]


def batch_throughput(attempt: Attempt) -> None:
    """Two batches whose rows end after unequal lengths."""
    cases = [([10, 2, 4], 0.5), ([7, 7, 1, 1, 9], 0.02)]
    for lengths, seconds in cases:
        expect_number(attempt(list(lengths), seconds))
    got = [float(attempt(list(lengths), seconds)) for lengths, seconds in cases]

    def each(formula) -> list[float]:
        return [formula(lengths, seconds) for lengths, seconds in cases]

    expect_numbers(
        got,
        each(lambda n, s: sum(n) / (max(n) * s)),
        [
            (
                each(lambda n, s: len(n) / s),
                "counts every row in every pass. A row that is done yields nothing useful "
                "any more: useful are the tokens that the requests got.",
            ),
            (
                each(lambda n, s: 1 / s),
                "lets every token take a pass of its own. In one pass all rows get a token: the "
                "batch takes as many passes as its longest row.",
            ),
            (each(lambda n, s: sum(n) / s), "divides by the time of one pass: the batch takes many."),
            (
                each(lambda n, s: sum(n) / max(n)),
                "gives tokens for each pass: the seconds that a pass takes are missing.",
            ),
            (
                each(lambda n, s: sum(n) / (min(n) * s)),
                "lets the batch end with its shortest row: it runs until the longest is done.",
            ),
            (
                each(lambda n, s: sum(n) / (sum(n) / len(n) * s)),
                "counts every row in every pass. A row that is done yields nothing useful any more.",
            ),
            (each(lambda n, s: max(n) * s / sum(n)), "is seconds for each token, the inverse of throughput."),
            (
                each(lambda n, s: max(n) / (max(n) * s)),
                "counts the longest row only: the others got their tokens, too.",
            ),
            (each(lambda n, s: max(n) * s), "is the latency of the batch: throughput is tokens a second."),
        ],
        [f"lengths {lengths}, {seconds} seconds a pass" for lengths, seconds in cases],
    )


def wasted_slot_steps(attempt: Attempt) -> None:
    """Two small traces: one with every kind of work, each as often as no other, and one in which nothing is wasted."""
    trace = _trace("pp. ssp fdd fdd fdd fd. pdp ddd .d. .dd")
    got = attempt(trace)
    expect_number(got)
    work = trace.work
    expect_numbers(
        [float(got)],
        [trace.wasted_slot_steps],
        [
            ([trace.output_tokens], "counts the useful slot-steps: wanted are those that yielded no token."),
            ([trace.slot_steps], "counts all slot-steps: those that yielded a token are not wasted."),
            (
                [work["finished"]],
                "counts finished rows only. Rows that stood empty or waited for a prefill yielded no token, either.",
            ),
            ([work["empty"]], "counts empty rows only. A finished or stalled row yielded no token, either."),
            (
                [work["finished"] + work["empty"]],
                "forgets the rows that were stalled: they waited while another "
                "request's prompt was read, and yielded nothing.",
            ),
            ([work["stalled"] + work["empty"]], "forgets finished rows: they are computed, but yield nothing."),
            (
                [trace.slot_steps - work["decode"]],
                "counts prefills as waste. A prefill reads the prompt and yields the first token.",
            ),
            (
                [sum(row.padding for one in trace.passes for row in one.row_steps)],
                "counts pad tokens. A slot-step is one row in one pass, however many tokens it reads.",
            ),
            (
                [sum(any(not row.new_tokens for row in one.row_steps) for one in trace.passes)],
                "counts forward passes in which something was wasted. A slot-step is *one row* in one pass.",
            ),
            ([len(trace.passes)], "counts forward passes. A slot-step is *one row* in one pass."),
        ],
        ["a trace of 10 forward passes on 3 rows"],
    )

    got = attempt(_trace("pp dd"), given="a trace in which every slot-step yields a token")
    expect_number(got)
    if got != 0:
        raise Wrong(f"counts {got} in a trace in which every slot-step yields a token.")


def _trace(passes: str) -> Trace:
    """Return a trace from one word per pass and one letter per row (prefill, decode, finished, stalled, . empty)."""
    row_steps = {
        "p": lambda row: RowStep("prefill", row, tokens=4, padding=4 if row == 0 else 0, new_tokens=1),
        "d": lambda row: RowStep("decode", row, tokens=1, new_tokens=1),
        "f": lambda row: RowStep("finished", row, padding=1),
        "s": lambda row: RowStep("stalled", row),
        ".": lambda row: RowStep(),
    }
    words = passes.split()
    trace = Trace(len(words[0]))
    trace.passes = [
        TracedPass(tuple(row_steps[letter](row) for row, letter in enumerate(word)), float(number), 1.0)
        for number, word in enumerate(words)
    ]
    return trace


TASKS = {
    "left_pad(rows, pad_id)": (left_pad, "pads stand on the left, hidden by the mask, and every row ends at the edge"),
    "position_ids(attention_mask)": (position_ids, "every row counts its own tokens from 0, wherever it stands"),
    "batch_throughput(lengths, seconds_per_pass)": (
        batch_throughput,
        "useful tokens count, and the batch takes as long as its longest row",
    ),
    "wasted_slot_steps(trace)": (wasted_slot_steps, "whatever a row does in a pass, what yields no token is wasted"),
}
