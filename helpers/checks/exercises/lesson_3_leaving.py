"""Lesson 3: rows leave a batch: their lists, tensors and layers stay aligned, and no text changes."""

import torch

from ... import kv_cache
from ..exercise import Exercise
from ..hand_made import LISTS, TENSORS, hand_made
from .lesson_3_joining import EVERY_LAYER, ROWS, layers_of, relevant, with_layers


@Exercise.declare(
    "finished rows are gone, and so is every column in which no other row has a token",
    names=("the batch", "the list of the removed rows"),
    forbidden=[
        "helpers.batching:filter_batch",
        "helpers.padded_batch:select_rows",
        "helpers.padded_batch:keep_last_columns",
    ],
)
def filter_batch(batch):
    stay, removed = split(batch)
    new = select(batch, stay, used_columns(batch["attention_mask"][stay]))
    return new, removed


filter_batch.table([
    ("rows 0 and 2 are finished", [("a", 6, 0), ("b", 3, 2), ("c", 5, 0), ("d", 4, 7)], 2, 2),
    ("rows 1 and 2 are finished, the longest stays", [("a", 4, 3), ("b", 1, 0), ("c", 3, 0), ("d", 2, 1)], 3, 0),
    ("row 1 is finished, the longest", [("a", 1, 3), ("b", 3, 0), ("c", 2, 1)], 2, 0),
    ("row 0 is finished, the longest", [("a", 6, 0), ("b", 3, 3), ("c", 2, 1), ("d", 4, 5)], 2, 1),
    ("rows 0 and 1 are finished", [("a", 2, 0), ("b", 4, 0), ("c", 3, 1), ("d", 2, 2), ("e", 3, 9)], 2, 1),
    ("rows 0 and 2 are finished, and row 1 has two gaps",
     [("a", "1111111", 0), ("b", "1100101", 4), ("c", "1111000", 0)], 2, 0),
    ("row 1 is finished, and the others have gaps in the same two places",
     [("a", "11010010", 4), ("b", "11111111", 0), ("c", "10000010", 1)], 3, 0),
    ("rows 1 and 3 are finished, and one gap is at the end of the cache",
     [("a", "101100", 4), ("b", "111111", 0), ("c", "110000", 1), ("d", "100001", 0)], 2, 0),
    ("row 0 is finished, and the first column is no longer needed", [("a", "11111", 0), ("b", "01101", 3)], 2, 0),
    ("the last row is finished", [("a", 2, 3), ("b", 3, 1), ("c", 5, 0)], 2, 2),
    ("no row is finished", [("a", 2, 3), ("b", 3, 1)], 2, 0),
    ("no row is finished, and a column holds no token", [("a", "1101", 3), ("b", "1001", 1)], 2, 0),
    ("every row is finished", [("a", 2, 0), ("b", 3, 0)], 2, 1), ("the only row is finished", [("c", 4, 0)], 3, 0),
], lambda random: [
    (list(zip("abcde", random.sample(range(1, 9), 5), [0, *random.sample([0, 0, 1, 2], 3), 5], strict=True)), 3, 1),
], given="(row, tokens in the cache, tokens remaining) {}, {} layers, the newest {} apart",
   build=lambda random, rows, layers, late: [
    hand_made(*rows, late=late, layers=layers, heads=5 - layers, dimension=layers + 1)])  # fmt: skip


def split(batch):
    """Return the rows that stay, and those that are finished."""
    left = batch["tokens_remaining"]
    return [row for row, each in enumerate(left) if each > 0], [row for row, each in enumerate(left) if each == 0]


def select(batch, rows, columns=None):
    """Return some rows, and some columns of the mask, a bool for each; the cache lacks the last one."""
    kept = {key: [batch[key][row] for row in rows] for key in LISTS} | {key: batch[key][rows] for key in TENSORS}
    columns = torch.ones_like(batch["attention_mask"][0]).bool() if columns is None else columns
    kept["attention_mask"] = kept["attention_mask"][:, columns]
    return with_layers(kept, [[each[rows][:, :, columns[:-1]] for each in pair] for pair in layers_of(batch)])


def used_columns(mask):
    """Return for each column whether a row has a token in it, bool [columns]."""
    return mask.any(dim=0)


def first_columns(mask):
    """Return as many of the first columns as the longest row needs."""
    return torch.arange(mask.size(1), device=mask.device) < (mask.sum(dim=1).max() if len(mask) else 1)


STAYING = 'batch["attention_mask"][stay]'
filter_batch.add_misconceptions({
    "trims the left side, as the lesson does. In this layout, the rows' first tokens are there, and the columns "
    "without a token are behind them.": f"used_columns({STAYING}) -> first_columns({STAYING}).flip(0)",
    "trims the right side, where the newest tokens are.": "used_columns( -> first_columns(",
    "trims columns in which some row has no token. A column can go only if no row that stays has a token in it.":
        f"used_columns({STAYING}) -> {STAYING}.all(dim=0)",
    "keeps columns in which only finished rows have tokens: without those rows, no token is left in them.":
        [f"used_columns({STAYING}) -> None", f'{STAYING} -> batch["attention_mask"]'],
    "shifts the positions by the trimmed columns. Positions belong to a row's text, and trimming pads does not "
    "change its text.": 'return new -> new["position_ids"] += new["attention_mask"].size(1) '
        '- batch["attention_mask"].size(1); return new',
    "trims the mask, but not the cache: the columns of both must stay aligned.":
        "return new -> return new | {'past_key_values': select(batch, stay)['past_key_values']}",
    f"removes the rows only from layer 0. {EVERY_LAYER}":
        "return new -> return with_layers(new, layers_of(new)[:1] + layers_of(batch)[1:])",
} | {
    f"leaves the finished rows in `{key}`: lists, tensors and cache must hold the same rows.":
        f"return new -> return new | {{'{key}': batch['{key}']}}" for key in ROWS
})  # fmt: skip


@filter_batch.ignoring
def relevant_or_empty(result, arguments):
    """Compare only the request ids if no row stays."""
    batch, removed = result
    return relevant(batch) if any(arguments[0]["tokens_remaining"]) else {"request_ids": batch["request_ids"]}, removed


@filter_batch.rule
def keeps_its_columns_and_rows(arguments, outcome, right):
    (got, _), (wanted, _) = outcome.result, right.result
    if not wanted["request_ids"]:
        return None
    widths = [(batch["attention_mask"].size(1), kv_cache.length(batch["past_key_values"])) for batch in (got, wanted)]
    for what, came, due in zip(("mask", "cache"), *widths, strict=True):
        count = "one column" if abs(came - due) == 1 else f"{abs(came - due)} columns"
        if came > due:
            return f"leaves {count} without a token in the {what}: attention would compute them in every later step"
        if came < due:
            return f"trims {count} too many from the {what}: a token of a row that stays is gone"
    if (ids := list(got["request_ids"])) != wanted["request_ids"] and sorted(ids) == wanted["request_ids"]:
        return f"orders the rows {ids} anew: those that stay keep their order, so that no other row has to move"
    return None
