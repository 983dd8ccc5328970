"""Lesson 2, a static batch: its throughput, its wasted slot-steps, left padding, and each row's own positions."""

import torch

from ...trace import RowStep, Trace, TracedPass
from ..exercise import Exercise

# --- batch_throughput -----------------------------------------------------------------------------------------------

batch_throughput = Exercise(
    "batch_throughput(lengths, seconds_per_pass)", "useful tokens count, and the batch runs as long as its longest row"
)


@batch_throughput.cases
def _(random):
    drawn = [random.randint(1, 99) for _ in range(8)]
    for lengths, seconds in [
        ([2, 10, 4], 0.5),
        ([7, 7, 1, 1, 9], 0.02),
        ([5], 0.25),
        (drawn, random.uniform(0.01, 0.1)),
    ]:
        yield (lengths, seconds), f"lengths {lengths}, {seconds:.4g} seconds per pass"


@batch_throughput.reference
def useful_tokens_per_second(lengths, seconds_per_pass):
    return sum(lengths) / (max(lengths) * seconds_per_pass)


for _message, _wrong in {
    "counts every row in every pass. A row that is done yields nothing useful any more: useful are the tokens that the "
    "requests got.": lambda n, s: len(n) / s,
    "lets every token take a pass of its own. In one pass all rows get a token: the batch takes as many passes as its "
    "longest row.": lambda n, s: 1 / s,
    "divides by the time of one pass: the batch takes many.": lambda n, s: sum(n) / s,
    "gives tokens per pass: the seconds that a pass takes are missing.": lambda n, s: sum(n) / max(n),
    "lets the batch end with its shortest row: it runs until the longest is done.": lambda n, s: sum(n) / (min(n) * s),
    "is seconds per token, the inverse of throughput.": lambda n, s: max(n) * s / sum(n),
    "is the latency of the batch: throughput is tokens per second.": lambda n, s: max(n) * s,
}.items():
    batch_throughput.misconception(_message, _wrong)

# --- wasted_slot_steps ----------------------------------------------------------------------------------------------

wasted_slot_steps = Exercise(
    "wasted_slot_steps(trace)",
    "whatever a row does in a pass, if it yields no token, it is wasted",
    forbidden=["helpers.trace:Trace.wasted_slot_steps.fget"],
)
ROW_STEPS = {
    "p": RowStep("prefill", 1, tokens=4, padding=2, new_tokens=1),
    "d": RowStep("decode", 1, tokens=1, new_tokens=1),
    "f": RowStep("finished", 1, padding=1),
    "s": RowStep("stalled", 1),
    ".": RowStep(),
}


@wasted_slot_steps.cases
def _(random):
    """Yield traces, one word per pass and one letter per row; in the first each kind of work has another count."""
    drawn = " ".join("".join(random.choices("pdfs.", k=5)) for _ in range(random.randint(6, 9)))
    for passes in ["pp. ssp fdd fdd fdd fd. pdp ddd .d. .dd", "pp dd", ".. p. ff", drawn]:
        words = passes.split()
        trace = Trace(len(words[0]))
        trace.passes = [TracedPass(tuple(map(ROW_STEPS.get, word)), float(n), 1.0) for n, word in enumerate(words)]
        yield (trace,), f"{len(words)} forward passes on {trace.rows} rows"


@wasted_slot_steps.reference
def without_a_token(trace, passes=slice(None), rows=slice(None)):
    return sum(row.new_tokens == 0 for one in trace.passes[passes] for row in one.row_steps[rows])


for _message, _wrong in {
    "counts the useful slot-steps: wanted are those that yielded no token.": lambda trace: trace.output_tokens,
    "counts all slot-steps: those that yielded a token are not wasted.": lambda trace: trace.slot_steps,
    "counts finished rows only. Empty rows and rows that waited for a prefill yielded no token, either.": (
        lambda trace: trace.work["finished"]
    ),
    "forgets the rows that were stalled: they waited for another request's prefill, and yielded nothing.": (
        lambda trace: trace.work["finished"] + trace.work["empty"]
    ),
    "forgets finished rows: they are computed, but yield nothing.": (
        lambda trace: trace.work["stalled"] + trace.work["empty"]
    ),
    "forgets empty rows: a row without a request yields nothing, either.": (
        lambda trace: trace.work["stalled"] + trace.work["finished"]
    ),
    "counts prefills as waste. A prefill reads the prompt and yields the first token.": (
        lambda trace: trace.slot_steps - trace.work["decode"]
    ),
    "counts pad tokens. A slot-step is one row in one pass, however many tokens it reads.": (
        lambda trace: sum(row.padding for one in trace.passes for row in one.row_steps)
    ),
    "counts forward passes in which something was wasted. A slot-step is *one row* in one pass.": (
        lambda trace: sum(any(not row.new_tokens for row in one.row_steps) for one in trace.passes)
    ),
    "counts forward passes. A slot-step is *one row* in one pass.": lambda trace: len(trace.passes),
    "skips the first forward pass: its rows count, too.": lambda trace: without_a_token(trace, passes=slice(1, None)),
    "skips the last forward pass: its rows count, too.": lambda trace: without_a_token(trace, passes=slice(-1)),
    "skips the first row: it counts like all others.": lambda trace: without_a_token(trace, rows=slice(1, None)),
    "skips the last row: it counts like all others.": lambda trace: without_a_token(trace, rows=slice(-1)),
    "looks at one row only: a pass has a row step for each.": lambda trace: without_a_token(trace, rows=slice(1)),
    "looks at one pass only: a trace has many.": lambda trace: without_a_token(trace, passes=slice(1)),
}.items():
    wasted_slot_steps.misconception(_message, _wrong)

# --- left_pad -------------------------------------------------------------------------------------------------------

left_pad = Exercise(
    "left_pad(rows, pad_id, max_length)",
    "pads stand on the left, hidden by the mask, and every row ends with its newest token, at the right edge",
    names=("input_ids", "attention_mask"),
    forbidden=["helpers.padded_batch:left_padded"],
)
NEWEST = "A row's newest token must stand at the right edge, where the next one is read off and appended."


@left_pad.cases
def _(random):
    drawn = [[random.randint(0, 5) for _ in range(random.randint(1, 7))] for _ in range(5)]
    for rows, pad_id, max_length in [
        ([[5, 6], [7, 8, 9, 4], [3]], 0, 8),
        ([[2, 7, 2, 6], [8, 2], [2]], 2, 4),  # texts that contain the pad's id
        ([[1, 2, 3, 4, 5], [6, 7], [8, 9, 1, 2]], 0, 3),
        ([[4, 5]], 0, 6),
        ([[3, 1, 4], [1, 5, 9]], 7, 2),
        ([[6, 8, 9], [9, 3]], 1, 1),
        (drawn, 3, random.randint(3, 6)),
    ]:
        yield (rows, pad_id, max_length), f"rows {rows}, pad_id {pad_id}, max_length {max_length}"


def padded(rows, pad_id, max_length, left=True, mask_left=True, width=None, cut=lambda row, length: row[-length:]):
    """Pad rows, with parts to be broken."""
    rows = [cut(row, max_length) for row in rows]
    width = width or max(map(len, rows))

    def tensor(rows, fill, left):
        fills = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([pads + row if left else row + pads for pads, row in zip(fills, rows, strict=True)])

    return tensor(rows, pad_id, left), tensor([[1] * len(row) for row in rows], 0, mask_left)


left_pad.reference(padded)

for _message, _wrong in {
    "pads on the right: in the last column of a short row stands a pad, and the model would continue the pad. "
    + NEWEST: lambda rows, pad, n: padded(rows, pad, n, left=False, mask_left=False),
    "pads the mask on the right and the tokens on the left: the mask hides real tokens and shows pads.": (
        lambda rows, pad, n: padded(rows, pad, n, mask_left=False)
    ),
    "fills up with 0. The pad's id is an argument: every tokenizer has its own.": (
        lambda rows, pad, n: padded(rows, 0, n)
    ),
    "takes every token with the pad's id for a pad. A text may contain that token (GPT-2's pad is its EOS): the mask "
    "follows from where you padded, not from the ids.": (
        lambda rows, pad, n: ((ids := padded(rows, pad, n)[0]), (ids != pad).long())
    ),
    "has the mask upside down: 1 is a real token, 0 a pad.": (
        lambda rows, pad, n: (padded(rows, pad, n)[0], 1 - padded(rows, pad, n)[1])
    ),
    "shows the pads: the mask is 1 everywhere, and a short row's tokens would attend to pads as if they were text.": (
        lambda rows, pad, n: ((ids := padded(rows, pad, n)[0]), torch.ones_like(ids))
    ),
    "keeps the first tokens of a row that is too long: what the model would continue is cut off. "
    + NEWEST: lambda rows, pad, n: padded(rows, pad, n, cut=lambda row, n: row[:n]),
    "never cuts: no row may be longer than `max_length`.": lambda rows, pad, n: padded(rows, pad, 99),
    "makes every batch `max_length` wide. Where its longest row is shorter, each pass computes columns of nothing but "
    "pads.": lambda rows, pad, n: padded(rows, pad, n, width=n),
    "cuts all rows to the shortest one: tokens of the longer prompts are lost.": (
        lambda rows, pad, n: padded(rows, pad, min(n, *map(len, rows), 99))
    ),
    "makes no rectangle: in a tensor, all rows must be filled up to one width.": (
        lambda rows, pad, n: (ids := torch.tensor([row[-n:] for row in rows]), torch.ones_like(ids))
    ),
    "reverses the tokens of each row.": lambda rows, pad, n: padded(rows, pad, n, cut=lambda row, n: row[-n:][::-1]),
    "sorts the rows by length: row i must stay request i, or a client gets another one's output.": (
        lambda rows, pad, n: padded(sorted(rows, key=len), pad, n)
    ),
    "sorts the rows by length, longest first: row i must stay request i, or a client gets another one's output.": (
        lambda rows, pad, n: padded(sorted(rows, key=len, reverse=True), pad, n)
    ),
}.items():
    left_pad.misconception(_message, _wrong)


@left_pad.rule
def ids_come_first(arguments, outcome, right):
    """Report the two tensors in the other order."""
    swapped = all(got.equal(wanted) for got, wanted in zip(outcome.result[::-1], right.result, strict=True))
    same = right.result[0].equal(right.result[1])
    return None if same or not swapped else "returns the mask first. Wanted are input_ids, then attention_mask"


# --- position_ids ---------------------------------------------------------------------------------------------------

position_ids = Exercise(
    "position_ids(attention_mask, new_tokens)",
    "every row counts its own tokens from 0, cached ones included, wherever they stand",
    forbidden=["helpers.padded_batch:left_padded"],
)


@position_ids.cases
def _(random):
    drawn = [random.randint(1, 9) for _ in range(4)]
    for what, lengths, new_tokens in [
        ("prompts", [3, 5, 1], 5),
        ("one new token", [6, 3, 7], 1),
        ("3 new tokens", [7, 2, 5], 3),
        ("a prompt", [4], 4),
        ("new tokens", drawn, random.randint(1, max(drawn))),
    ]:
        rows = [[0] * (max(lengths) - length) + [1] * length for length in lengths]
        yield (torch.tensor(rows), new_tokens), f"{what}: the mask {rows}, new_tokens {new_tokens}"


@position_ids.reference
def places_among_real_tokens(attention_mask, new_tokens):
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -new_tokens:]


@position_ids.ignoring
def pads(positions, arguments):
    mask, new_tokens = arguments
    return torch.where(mask[:, -new_tokens:] == 1, positions, torch.zeros_like(positions))


for _message, _wrong in {
    "numbers the columns, pads included. Positions count a row's own tokens, from 0, wherever they stand.": (
        lambda mask, n: torch.arange(mask.size(1)).expand_as(mask)[:, -n:]
    ),
    "numbers the columns, pads included, and starts with 1. Positions count a row's own tokens, from 0.": (
        lambda mask, n: torch.arange(1, mask.size(1) + 1).expand_as(mask)[:, -n:]
    ),
    "starts with 1: a row's first real token is at position 0.": lambda mask, n: mask.cumsum(dim=1)[:, -n:],
    "counts from the right: a row's *first* real token is at 0.": (
        lambda mask, n: (mask.flip(1).cumsum(dim=1).flip(1) - 1)[:, -n:]
    ),
    "gives every real token position 1: they must count up from 0.": lambda mask, n: mask[:, -n:],
    "counts the pads. Positions count real tokens.": lambda mask, n: (1 - mask).cumsum(dim=1)[:, -n:],
    "starts over in every pass. The cached tokens come first in the text, and the new ones go on from there.": (
        lambda mask, n: mask[:, -n:].cumsum(dim=1) - 1
    ),
    "starts over in every pass, and counts pads. A token's position is the number of real tokens before it.": (
        lambda mask, n: torch.arange(n).expand(len(mask), n)
    ),
    "gives positions to the cached tokens, too. Wanted are those of the last `new_tokens` columns, which the pass "
    "computes.": lambda mask, n: mask.cumsum(dim=1) - 1,
    "gives the positions of the first columns. The pass computes the last ones.": (
        lambda mask, n: (mask.cumsum(dim=1) - 1)[:, :n]
    ),
}.items():
    position_ids.misconception(_message, _wrong)


@position_ids.rule
def can_be_looked_up(arguments, outcome, right):
    """Report positions of pads that need not exist in the model's table."""
    mask, new_tokens = arguments
    for position in outcome.result[mask[:, -new_tokens:] == 0].tolist():
        if not 0 <= position < mask.size(1):
            return (
                f"gives a pad position {position}. The mask hides the pad, but the model looks up its position all the "
                f"same: it must be one that a token of the batch could have"
            )
    return None
