"""Lesson 3: rows leave a batch: their lists, tensors and layers stay aligned, and no text changes."""

import torch

from ... import kv_cache
from ..exercise import Exercise
from ..hand_made import LISTS, TENSORS, hand_made
from .joining import EVERY_LAYER, ROWS, layers_of, relevant, with_layers

# --- filter_rows ----------------------------------------------------------------------------------------------------

NAMES = "the batch", "the list of the removed rows"
filter_rows = Exercise(
    "filter_rows(batch)",
    "finished rows are gone from the lists, the tensors and every layer, and no row moves without need",
    names=NAMES,
    forbidden=["helpers.batching:filter_batch", "helpers.padded_batch:select_rows"],
)


@filter_rows.cases
def finished_rows(random):
    lengths = random.sample(range(1, 9), 5)
    ended = [0, *random.sample([0, 0, 1, 2], 3), 5]
    drawn = [(chr(ord("a") + n), length, left) for n, (length, left) in enumerate(zip(lengths, ended, strict=True))]
    for given, rows, layers, late in [
        ("rows 0 and 2 are finished", [("a", 6, 0), ("b", 3, 2), ("c", 5, 0), ("d", 4, 7)], 2, 2),
        ("rows 1 and 2 are finished, the longest stays", [("a", 4, 3), ("b", 1, 0), ("c", 3, 0), ("d", 2, 1)], 3, 0),
        ("row 1 is finished, the longest", [("a", 1, 3), ("b", 3, 0), ("c", 2, 1)], 2, 0),
        ("row 0 is finished, the longest", [("a", 6, 0), ("b", 3, 3), ("c", 2, 1), ("d", 4, 5)], 2, 1),
        ("rows 0 and 1 are finished", [("a", 2, 0), ("b", 4, 0), ("c", 3, 1), ("d", 2, 2), ("e", 3, 9)], 2, 1),
        (f"tokens remaining: {ended}", drawn, 3, 1),
        ("the last row is finished", [("a", 2, 3), ("b", 3, 1), ("c", 5, 0)], 2, 2),
        ("no row is finished", [("a", 2, 3), ("b", 3, 1)], 2, 0),
        ("every row is finished", [("a", 2, 0), ("b", 3, 0)], 2, 1),
        ("the only row is finished", [("c", 4, 0)], 3, 0),
    ]:
        yield (hand_made(*rows, late=late, layers=layers, heads=5 - layers, dimension=layers + 1),), given


def split(batch):
    """Return the rows that stay, each free place filled by the last of them, and those that are finished."""
    left = batch["tokens_remaining"]
    stay = [row for row in range(len(left)) if left[row] > 0]
    order = [row if left[row] > 0 else stay.pop() for row in range(len(stay))]
    return order, [row for row in range(len(left)) if left[row] == 0]


def select(batch, rows, columns=None):
    """Return some rows, and some columns of the mask, a bool for each; the cache lacks the last one."""
    kept = {key: [batch[key][row] for row in rows] for key in LISTS} | {key: batch[key][rows] for key in TENSORS}
    columns = torch.ones_like(batch["attention_mask"][0]).bool() if columns is None else columns
    kept["attention_mask"] = kept["attention_mask"][:, columns]
    return with_layers(kept, [[each[rows][:, :, columns[:-1]] for each in pair] for pair in layers_of(batch)])


@filter_rows.reference
def unfinished(batch):
    return select(batch, split(batch)[0]), split(batch)[1]


@filter_rows.ignoring
def relevant_or_empty(result, arguments):
    """Compare only the request ids if no row stays."""
    batch, removed = result
    return relevant(batch) if any(arguments[0]["tokens_remaining"]) else {"request_ids": batch["request_ids"]}, removed


for _message, _wrong in {
    "keeps the finished rows and drops the others.": lambda batch, new, stay, gone: (select(batch, gone), gone),
    "moves up every row behind a finished one. Only as many rows should move as there are free places: a row is "
    "large.": lambda batch, new, stay, gone: (select(batch, sorted(stay)), gone),
    "reverses the rows that stay.": lambda batch, new, stay, gone: (select(batch, stay[::-1]), gone),
    "fills the free places with the first of the rows behind them: the task asks for the last.": (
        lambda batch, new, stay, gone: (select(batch, first_into_places(stay)), gone)
    ),
    "lists the rows that stay: the task asks for those that were removed.": lambda batch, new, stay, gone: (new, stay),
    "lists the request ids of the removed rows: the task asks for their indices.": lambda batch, new, stay, gone: (
        new,
        [batch["request_ids"][row] for row in gone],
    ),
    "removes columns: this task removes rows and keeps all columns.": lambda batch, *_: trimmed(batch),
    f"removes the rows only from layer 0. {EVERY_LAYER}": lambda batch, new, stay, gone: (
        (with_layers(new, layers_of(new)[:1] + layers_of(batch)[1:]), gone)
    ),
    "removes the rows from the keys, but not from the values: a token has both.": lambda batch, new, stay, gone: (
        (with_layers(new, [(a[0], b[1]) for a, b in zip(layers_of(new), layers_of(batch), strict=True)]), gone)
    ),
    "indexes with an empty tensor of floats. When every row is finished, no index is left, but the tensor of "
    "indices must still hold integers.": lambda batch, new, stay, gone: (
        (new | {"attention_mask": batch["attention_mask"][torch.tensor(stay)]}, gone)
    ),
}.items():
    filter_rows.misconception(_message, lambda batch, _wrong=_wrong: _wrong(batch, unfinished(batch)[0], *split(batch)))

for _key in ROWS:
    filter_rows.misconception(
        f"leaves the finished rows in `{_key}`: lists, tensors and cache must hold the same rows.",
        lambda batch, _key=_key: (unfinished(batch)[0] | {_key: batch[_key]}, split(batch)[1]),
    )


def first_into_places(stay):
    """Return the rows that stay, those behind the places that are left in their order."""
    moved = iter(sorted(row for row in stay if row >= len(stay)))
    return [row if row in stay else next(moved) for row in range(len(stay))]


filter_rows.requires_new("batch")

# --- filter_batch ---------------------------------------------------------------------------------------------------

filter_batch = Exercise(
    "filter_batch(batch)",
    "finished rows are gone, and so is every column in which no other row has a token",
    names=NAMES,
    forbidden=["helpers.batching:filter_batch", "helpers.padded_batch:select_rows", "helpers.padded_batch:trim"],
)
filter_batch.cases(finished_rows)
filter_batch.ignoring(relevant_or_empty)
filter_batch.requires_new("batch")


def used_columns(mask):
    """Return for each column whether a row has a token in it, bool [columns]."""
    return mask.any(dim=0)


@filter_batch.reference
def trimmed(batch, columns=used_columns):
    stay, removed = split(batch)
    return select(batch, stay, columns(batch["attention_mask"][stay])), removed


@filter_batch.misconception(
    "shifts the positions by the trimmed columns. Positions belong to a row's text, and trimming pads does not "
    "change its text."
)
def positions_moved(batch):
    new, removed = trimmed(batch)
    columns = batch["attention_mask"].size(1) - new["attention_mask"].size(1)
    return new | {"position_ids": new["position_ids"] - columns}, removed


def at_one_end(mask, left=True):
    """Return as many columns as the longest row needs, from one end."""
    count = int(mask.sum(dim=1).max()) if len(mask) else 1
    place = torch.arange(mask.size(1), device=mask.device)
    return place >= len(place) - count if left else place < count


filter_batch.add_misconceptions({
    "trims the left side, as the lesson does. In this layout, the rows' first tokens are there, and the columns "
    "without a token are behind them.": at_one_end,
    "trims the right side, where the newest tokens are.": lambda mask: at_one_end(mask, left=False),
    "trims columns in which some row has no token. A column can go only if no row that stays has a token in it.": (
        lambda mask: mask.all(dim=0)
    ),
    "keeps columns in which only finished rows have tokens: without those rows, no token is left in them.": (
        lambda mask: torch.ones_like(used_columns(mask))
    ),
}, part="columns")  # fmt: skip

filter_batch.misconception(
    "trims the mask, but not the cache: the columns of both must stay aligned.",
    lambda batch: (trimmed(batch)[0] | {"past_key_values": unfinished(batch)[0]["past_key_values"]}, split(batch)[1]),
)

for _longest in (lambda mask: mask.sum(dim=1).max(), lambda mask: max(mask.sum(dim=1).tolist())):
    filter_batch.misconception(
        "assumes that a longest row exists: when every row is finished, no row is left.",
        lambda batch, _longest=_longest: (_longest(unfinished(batch)[0]["attention_mask"]), trimmed(batch))[1],
    )


@filter_batch.rule
def trims_all_padding_and_nothing_else(arguments, outcome, right):
    """Report a mask or a cache that has more columns or fewer than the longest row needs."""
    (got, _), (wanted, _) = outcome.result, right.result
    if not wanted["request_ids"]:
        return None
    widths = [(one["attention_mask"].size(1), kv_cache.length(one["past_key_values"])) for one in (got, wanted)]
    for what, came, due in zip(("mask", "cache"), *widths, strict=True):
        count = "one column" if abs(came - due) == 1 else f"{abs(came - due)} columns"
        if came > due:
            return f"leaves {count} without a token in the {what}: attention would compute them in every later step"
        if came < due:
            return f"trims {count} too many from the {what}: a token of a row that stays is gone"
    return None
