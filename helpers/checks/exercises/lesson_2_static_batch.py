"""Lesson 2, a static batch: its throughput and its waste, left padding, and positions."""

import torch

from ...trace import RowStep, Trace, TracedPass
from ..exercise import Exercise

ROW_STEPS = {
    "p": RowStep("prefill", 1, tokens=4, padding=2, new_tokens=1),
    "c": RowStep("prefill", 1, tokens=8),  # a chunk of a prompt that is not its last one
    "d": RowStep("decode", 1, tokens=1, new_tokens=1),
    "v": RowStep("decode", 1, tokens=4, new_tokens=3, drafted=3, accepted=2),
    "f": RowStep("finished", 1, padding=1),
    "s": RowStep("stalled", 1),
    ".": RowStep(),
}
batch_costs = Exercise(
    "batch_costs(trace, seconds_per_pass)",
    "only the tokens that requests receive count, and a slot-step without one is wasted, whatever its row does",
    names=("the tokens per second", "the wasted slot-steps"),
    forbidden=["helpers.trace:Trace.wasted_slot_steps.fget"],
)
batch_costs.add_misconceptions({
    "counts every row in every pass. A finished row yields nothing useful: only the tokens that the requests receive "
    "count.": lambda trace, t: trace.slot_steps / t,
    "counts a slot-step that yields several tokens once: all of them are useful.":
        lambda trace, t: (trace.slot_steps - without_a_token(trace)) / t,
}, part="rate")  # fmt: skip
batch_costs.add_misconceptions({
    "subtracts the tokens from the slot-steps: a slot-step that yields several tokens is still one.":
        lambda trace: trace.slot_steps - trace.output_tokens,
    "counts the parts of a prompt that yield no token as useful: a slot-step without a token is wasted, whatever its "
    "row computes.": lambda trace: without_a_token(trace, lambda row: row.work != "prefill"),
    "counts only finished rows. Empty rows, and rows stalled by a prefill, yielded no token either.":
        lambda trace: trace.work["finished"],
    "leaves out stalled rows: while another request's prefill ran, they yielded no token.":
        lambda trace: without_a_token(trace) - trace.work["stalled"],
    "leaves out finished rows: they are computed, but yield no token.":
        lambda trace: without_a_token(trace) - trace.work["finished"],
    "leaves out empty rows: a row without a request yields no token either.":
        lambda trace: without_a_token(trace) - trace.work["empty"],
    "counts prefills as waste. A prefill computes the prompt and yields the first token.":
        lambda trace: trace.slot_steps - trace.work["decode"],
    "counts pad tokens. A slot-step is one row in one pass, however many tokens the row computes.":
        lambda trace: sum(row.padding for one in trace.passes for row in one.row_steps),
}, part="wasted")  # fmt: skip


@batch_costs.cases
def _(random):
    """Yield traces, one word per pass and one letter per row. The first has another number of each kind of work."""
    drawn = " ".join("".join(random.choices("pcdvfs.", k=5)) for _ in range(random.randint(6, 9)))
    for what, passes, seconds in [
        ("", "pp. ssp fdd fdd fdd fd. pdp ddd .d. .dd", 0.5), ("no waste, ", "pp dd", 0.75), ("", ".. p. ff", 0.02),
        ("a batch that runs until its longest row ends, ", "pppp dddf dffd dfff", 0.25),
        ("chunks of a prompt, which yield no token, ", "cp cd cd pd dd", 2.0),
        ("rows that get several tokens at once, ", "pp vd vv fd .v", 0.5),
        ("rows that finish, run and finish again, ", "ppp fdd pfd dfp ffd", 0.1),
        ("", drawn, random.randint(10, 100) / 1000),
    ]:  # fmt: skip
        words = passes.split()
        trace = Trace(len(words[0]))
        trace.passes = [TracedPass(tuple(map(ROW_STEPS.get, word)), float(n), 1.0) for n, word in enumerate(words)]
        given = f"{what}{len(words)} forward passes on {trace.rows} rows, {seconds} seconds per pass"
        yield (trace, seconds), given


def without_a_token(trace, counts=lambda row: True, passes=slice(None), rows=slice(None)):
    steps = [row for one in trace.passes[passes] for row in one.row_steps[rows]]
    return sum(row.new_tokens == 0 and counts(row) for row in steps)


@batch_costs.reference
def useful_and_wasted(trace, seconds, rate=lambda trace, t: trace.output_tokens / t, wasted=without_a_token):
    """Return both, with replaceable parts: the rate, given the seconds of all passes, and the waste."""
    return rate(trace, len(trace.passes) * seconds), wasted(trace)


NEWEST = "A row's newest token must be in the last column, where the next token is predicted and appended."
left_pad = Exercise(
    "left_pad(rows, pad_id, max_length)",
    "the pads are on the left and hidden by the mask, and every row ends with its newest token at the right edge",
    names=("input_ids", "attention_mask"),
    forbidden=["helpers.padded_batch:left_padded"],
)
left_pad.table([
    ([[5, 6], [7, 8, 9, 4], [3]], 0, 8),
    ([[2, 7, 2, 6], [8, 2], [2]], 2, 4),  # texts that contain the pad's id
    ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 1, 2]], 0, 3), ([[4, 5]], 0, 6), ([[3, 1, 4], [1, 5, 9]], 7, 2),
    ([[6, 8, 9], [9, 3]], 1, 1),
    ([[0, 5, 0], [0], [6, 0]], 50256, 3),  # an id of 0, and a large pad
    ([[300, 4000], [7]], 300, 2),
], lambda random: [
    ([random.choices(range(6), k=random.randint(1, 7)) for _ in range(5)], 3, random.randint(3, 6)),
])  # fmt: skip
left_pad.add_misconceptions({
    f"pads on the right: the last column of a short row then holds a pad, and the model would continue the pad. "
    f"{NEWEST}": {"left": False, "mask_left": False},
    "pads the mask on the right and the tokens on the left: the mask then hides real tokens and shows pads.":
        {"mask_left": False},
    "pads with 0. The pad's id is an argument, because every tokenizer has its own.":
        lambda rows, pad, n: padded(rows, 0, n),
    f"keeps the first tokens of a row that is too long, and cuts off the end that the model has to continue. {NEWEST}":
        {"cut": lambda row, n: row[:n]},
    "makes every batch `max_length` wide. If the longest row is shorter, each pass computes columns that hold only "
    "pads.": lambda rows, pad, n: padded(rows, pad, n, width=n),
    "sorts the rows by length: row i belongs to request i, and a client would receive another client's output.":
        lambda rows, *case: padded(sorted(rows, key=len), *case),
    "finds the width before it cuts the rows: a row that is cut makes no batch wider.":
        lambda rows, *case: padded(rows, *case, width=max(map(len, rows))),
})  # fmt: skip
left_pad.add_wrong_results({
    "treats every token with the pad's id as a pad. A text may contain that token (GPT-2 is padded with its EOS): "
    "the mask follows from where you padded, not from the ids.":
        lambda ids, mask, rows, pad, n: (ids, (ids != pad).long()),
    "inverts the mask: 1 marks a real token, 0 a pad.": lambda ids, mask, *case: (ids, 1 - mask),
    "leaves the pads visible: with a mask of 1 everywhere, the tokens of a short row attend to pads as if they "
    "were text.": lambda ids, mask, *case: (ids, torch.ones_like(mask)),
    "treats id 0 as a pad: the mask follows from where you padded, not from the ids.":
        lambda ids, mask, *case: (ids, (ids != 0).long()),
})  # fmt: skip


@left_pad.reference
def padded(rows, pad_id, max_length, left=True, mask_left=True, width=None, cut=lambda row, length: row[-length:]):
    rows = [cut(row, max_length) for row in rows]
    width = width or max(map(len, rows))

    def tensor(rows, fill, left):
        fills = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([pads + row if left else row + pads for pads, row in zip(fills, rows, strict=True)])

    return tensor(rows, pad_id, left), tensor([[1] * len(row) for row in rows], 0, mask_left)


position_ids = Exercise(
    "position_ids(attention_mask, new_tokens)",
    "every row counts its own tokens from 0, cached ones included, whatever columns they are in",
    forbidden=["helpers.padded_batch:left_padded"],
)
position_ids.reference(lambda mask, new_tokens: (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new_tokens:])
position_ids.add_misconceptions({
    "numbers the columns, pads included. Positions count a row's own tokens from 0, whatever columns they are in.":
        lambda mask, n: torch.arange(mask.size(1)).expand_as(mask)[:, -n:],
    "numbers the columns, pads included, and starts at 1. Positions count a row's own tokens from 0.":
        lambda mask, n: torch.arange(1, mask.size(1) + 1).expand_as(mask)[:, -n:],
    "counts the pads. Positions count real tokens.": lambda mask, n: (1 - mask).cumsum(dim=1)[:, -n:],
    "restarts at 0 in every pass. The cached tokens come first in the text, and the new positions continue from "
    "there.": lambda mask, n: mask[:, -n:].cumsum(dim=1) - 1,
    "restarts at 0 in every pass, and counts pads. A token's position is the number of real tokens before it.":
        lambda mask, n: torch.arange(n).expand(len(mask), n),
    "returns positions for the cached tokens, too. The pass computes only the last `new_tokens` columns, and needs "
    "only their positions.": lambda mask, n: mask.cumsum(dim=1) - 1,
    "returns the positions of the first columns. The pass computes the last ones.":
        lambda mask, n: (mask.cumsum(dim=1) - 1)[:, :n],
})  # fmt: skip


@position_ids.cases
def _(random):
    drawn = [random.randint(1, 9) for _ in range(4)]
    for what, lengths, new_tokens in [
        ("prompts", [3, 5, 1], 5), ("one new token", [6, 3, 7], 1), ("3 new tokens", [7, 2, 5], 3),
        ("a prompt", [4], 4), ("new tokens", drawn, random.randint(1, max(drawn))),
    ]:  # fmt: skip
        rows = [[0] * (max(lengths) - length) + [1] * length for length in lengths]
        yield (torch.tensor(rows), new_tokens), f"{what}: the mask {rows}, new_tokens {new_tokens}"


@position_ids.ignoring
def pads(positions, arguments):
    return torch.where(arguments[0][:, -arguments[1] :] == 1, positions, torch.zeros_like(positions))


@position_ids.rule
def can_be_looked_up(arguments, outcome, right):
    mask, new_tokens = arguments
    for position in outcome.result[mask[:, -new_tokens:] == 0].tolist():
        if not 0 <= position < mask.size(1):
            return (
                f"gives a pad the position {position}. The mask hides the pad, but the model still looks up its "
                "position: it must be at least 0 and less than the number of columns"
            )
    return None
