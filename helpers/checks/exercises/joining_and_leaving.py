"""Lesson 3: rows join a batch and leave it: their lists, tensors and layers stay aligned, and no text changes."""

import torch
from torch.nn.functional import pad

from ... import kv_cache
from ..exercise import Exercise
from ..hand_made import LISTS, TENSORS, blank_cache, contents, hand_made

ROWS = (*LISTS, *TENSORS, "past_key_values")  # everything with an entry per row

# --- merge_masks ----------------------------------------------------------------------------------------------------

merge_masks = Exercise(
    "merge_masks(first, second)", "both masks are equally wide, and every row still ends at the right edge"
)


@merge_masks.cases
def _(random):
    wide, narrow = [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], [[1, 1, 1], [0, 1, 1], [1, 1, 1]]
    widths = random.sample(range(3, 9), 2)
    drawn = [[[0] * n + [1] * (width - n) for n in random.sample(range(width), 2)] for width in widths]
    for first, second in [(wide, narrow), (narrow, wide), (wide, narrow[:2]), (wide[:1], wide[1:]), drawn]:
        yield (torch.tensor(first), torch.tensor(second)), f"masks of {len(first[0])} and {len(second[0])} columns"


@merge_masks.reference
def stack_masks(first, second, right=False, value=0, wanted=max):
    """Merge masks, with replaceable parts: the side and the value of new columns, and the width."""
    width = wanted(first.size(1), second.size(1))
    sides = [(0, width - mask.size(1)) if right else (width - mask.size(1), 0) for mask in (first, second)]
    return torch.cat([pad(mask, side, value=value) for mask, side in zip((first, second), sides, strict=True)])


EDGE = "a row's newest token must stay at the right edge, where every row continues."
UNEQUAL = "stacks rows of unequal width: all rows of a tensor must have the same width."

for _message, _wrong in {
    f"pads on the right: {EDGE}": lambda one, two: stack_masks(one, two, right=True),
    "pads with 1, which marks the new columns as real: the row would attend to keys that do not "
    "exist.": lambda one, two: stack_masks(one, two, value=1),
    "puts the second mask's rows first: the running rows must stay on top.": lambda one, two: stack_masks(two, one),
    "reveals all pads: they must stay hidden.": lambda one, two: torch.ones_like(stack_masks(one, two)),
    "drops the second mask's rows: they have to join.": lambda one, two: stack_masks(one, two)[: len(one)],
    UNEQUAL: lambda one, two: torch.cat([one, two]),
}.items():
    merge_masks.misconception(_message, _wrong)

for _width in (min, lambda first, second: first, lambda first, second: second):
    merge_masks.misconception(
        "cuts the wider mask: its rows could no longer attend to their oldest tokens.",
        lambda one, two, _width=_width: stack_masks(one, two, wanted=_width),
    )


@merge_masks.misconception("always widens the same mask. Either of the two may be the narrower one.")
def only_the_second_is_widened(first, second):
    zeros = torch.zeros(len(second), first.size(1) - second.size(1), dtype=torch.long)
    return torch.cat([first, torch.cat([zeros, second], dim=1)])


# --- merge_batches --------------------------------------------------------------------------------------------------

merge_batches = Exercise(
    "merge_batches(first, second)",
    "masks, keys and values of all layers line up, and no row has lost a token",
    forbidden=["helpers.batching:merge_batches", "helpers.padded_batch:concatenate_rows"],
)


@merge_batches.cases
def _(random):
    wide, narrow = [("a", 4, 2), ("b", 2, 5)], [("c", 2, 3), ("d", 1, 0), ("e", 2, 1)]
    lengths = random.sample(range(2, 9), 4)
    drawn = [("b", lengths[0], 3), ("a", lengths[1], 0)], [("d", lengths[2], 7), ("c", lengths[3], 4)]
    for rows, layers in [((wide, narrow), 2), ((narrow, wide), 3), ((wide, [("f", 4, 2)]), 2), (drawn, 4)]:
        batches = [hand_made(*each, layers=layers, heads=5 - layers, dimension=layers + 1) for each in rows]
        columns = [kv_cache.length(batch["past_key_values"]) for batch in batches]
        yield tuple(batches), f"caches of {columns[0]} and {columns[1]} columns, {layers} layers"


def layers_of(batch):
    """Return (keys, values) of each layer."""
    return [(layer.keys, layer.values) for layer in batch["past_key_values"].layers]


def with_layers(batch, layers):
    """Return a batch with other keys and values."""
    cache = kv_cache.new()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return batch | {"past_key_values": cache}


@merge_batches.reference
def stack(first, second, right=(False, False), adds=lambda columns: columns, value=0.0):
    """Merge two batches, with replaceable parts: the new columns' side in keys and in values, number and value."""
    width = max(first["attention_mask"].size(1), second["attention_mask"].size(1))

    def widened(tensor, batch, on_the_right):
        columns = adds(width - batch["attention_mask"].size(1))
        return pad(tensor, (0, 0, 0, columns) if on_the_right else (0, 0, columns, 0), value=value)

    layers = []
    for one, two in zip(layers_of(first), layers_of(second), strict=True):
        parts = zip(one, two, right, strict=True)
        layers.append([torch.cat([widened(a, first, side), widened(b, second, side)]) for a, b, side in parts])
    merged = {key: first[key] + second[key] for key in LISTS}
    merged |= {key: torch.cat([first[key], second[key]]) for key in ("input_ids", "position_ids")}
    merged["attention_mask"] = stack_masks(first["attention_mask"], second["attention_mask"])
    return with_layers(merged, layers)


@merge_batches.ignoring
def _relevant(batch, arguments=()):
    """Ignore what a hidden column holds, if it is finite, and further keys."""
    batch = contents(batch)
    if "past_key_values" in batch:
        batch["past_key_values"] = blank_cache(batch["past_key_values"], batch["attention_mask"][:, :-1] == 0)
    return batch


EVERY_LAYER = "Every layer has its own keys and values, and each needs the same change."
for _message, _wrong in {
    f"pads the cache on the right: {EDGE}": lambda one, two: stack(one, two, right=(True, True)),
    "pads the keys on the left, but the values on the right: a token's key and value share a "
    "column.": lambda one, two: stack(one, two, right=(False, True)),
    "stores the keys as values, too: attention needs both.": lambda one, two: with_layers(
        both := stack(one, two), [(keys, keys) for keys, _ in layers_of(both)]
    ),
    f"merges only layer 0. {EVERY_LAYER}": lambda one, two: with_layers(
        both := stack(one, two), layers_of(both)[:1] + layers_of(one)[1:]
    ),
    "makes the cache as wide as the mask. The mask has one more column, because the newest token is not in the "
    "cache yet.": lambda one, two: stack(one, two, adds=lambda columns: columns + 1),
    "fills the new columns with values that are not finite. The mask gives these columns the weight 0, but 0 times "
    "infinity is NaN.": lambda one, two: stack(one, two, value=float("inf")),
    UNEQUAL: lambda one, two: stack(one, two, adds=lambda columns: 0),
    "puts the second batch's rows first: the running rows must stay on top.": lambda one, two: stack(two, one),
    f"pads the mask on the right: {EDGE}": lambda one, two: (
        stack(one, two) | {"attention_mask": stack_masks(one["attention_mask"], two["attention_mask"], right=True)}
    ),
}.items():
    merge_batches.misconception(_message, _wrong)


@merge_batches.misconception(
    "shifts the positions by the padding. Positions belong to a row's text, and padding a row does not change its text."
)
def positions_shifted(first, second):
    both = stack(first, second)
    columns = [both["attention_mask"].size(1) - each["attention_mask"].size(1) for each in (first, second)]
    return both | {"position_ids": torch.cat([first["position_ids"] + columns[0], second["position_ids"] + columns[1]])}


for _key in ROWS:
    merge_batches.misconception(
        f"keeps only the first batch's rows in `{_key}`: the joining rows are lost.",
        lambda one, two, _key=_key: stack(one, two) | {_key: one[_key]},
    )
    merge_batches.misconception(
        f"orders the rows of `{_key}` differently from the other parts: requests would get each other's data.",
        lambda one, two, _key=_key: stack(one, two) | {_key: stack(two, one)[_key]},
    )

# --- filter_rows ----------------------------------------------------------------------------------------------------

NAMES = "the batch", "the list of the removed rows"
filter_rows = Exercise(
    "filter_rows(batch)",
    "finished rows are gone from the lists, the tensors and every layer",
    names=NAMES,
    forbidden=["helpers.batching:filter_batch", "helpers.padded_batch:select_rows"],
)


@filter_rows.cases
def finished_rows(random):
    lengths = random.sample(range(1, 9), 5)
    ended = [0, *random.sample([0, 0, 1, 2], 3), 5]
    drawn = [(chr(ord("a") + n), length, left) for n, (length, left) in enumerate(zip(lengths, ended, strict=True))]
    for given, rows, layers in [
        ("rows 0 and 2 are finished", [("a", 6, 0), ("b", 3, 2), ("c", 5, 0), ("d", 4, 7)], 2),
        ("rows 1 and 2 are finished, the longest stays", [("a", 4, 3), ("b", 1, 0), ("c", 3, 0), ("d", 2, 1)], 3),
        ("row 1 is finished, the longest", [("a", 1, 3), ("b", 3, 0), ("c", 2, 1)], 2),
        (f"tokens remaining: {ended}", drawn, 3),
        ("no row is finished", [("a", 2, 3), ("b", 3, 1)], 2),
        ("every row is finished", [("a", 2, 0), ("b", 3, 0)], 2),
        ("the only row is finished", [("c", 4, 0)], 3),
    ]:
        yield (hand_made(*rows, layers=layers, heads=5 - layers, dimension=layers + 1),), given


def split(batch):
    """Return the rows that stay and those that are finished."""
    left = batch["tokens_remaining"]
    return [row for row in range(len(left)) if left[row] > 0], [row for row in range(len(left)) if left[row] == 0]


def select(batch, rows, columns=slice(None)):
    """Return some rows, and some columns of the mask and the cache."""
    kept = {key: [batch[key][row] for row in rows] for key in LISTS} | {key: batch[key][rows] for key in TENSORS}
    kept["attention_mask"] = kept["attention_mask"][:, columns]
    return with_layers(kept, [[each[rows][:, :, columns] for each in pair] for pair in layers_of(batch)])


@filter_rows.reference
def unfinished(batch):
    return select(batch, split(batch)[0]), split(batch)[1]


@filter_rows.ignoring
def relevant_or_empty(result, arguments):
    """Ignore what an empty batch holds beside an empty list of request ids."""
    batch, removed = result
    return _relevant(batch) if batch["request_ids"] else {"request_ids": batch["request_ids"]}, removed


def popped(batch, rows, remove=list.pop):
    """Remove rows from the lists one by one."""
    lists = {key: list(batch[key]) for key in LISTS}
    for row in rows(lists["tokens_remaining"]):
        for each in lists.values():
            remove(each, row)
    return unfinished(batch)[0] | lists


for _remove in (list.pop, lambda each, row: each.__delitem__(slice(row, row + 1))):  # pop raises IndexError
    filter_rows.misconception(
        "removes the wrong row: once a row is removed, the rows below it move up and their indices change.",
        lambda batch, _remove=_remove: (popped(batch, lambda left: split(batch)[1], _remove), split(batch)[1]),
    )


@filter_rows.misconception("changes a list while iterating over it: the entry after each removed one is skipped.")
def popped_while_iterating(batch):
    removed = []
    lists = popped(batch, lambda each: (removed.append(row) or row for row, left in enumerate(each) if left == 0))
    others = [row for row in range(len(batch["request_ids"])) if row not in removed]
    return select(batch, others) | {key: lists[key] for key in LISTS}, removed


for _message, _wrong in {
    "keeps the finished rows and drops the others.": lambda batch, new, stay, gone: (select(batch, gone), gone),
    "changes the order of the rows that stay.": lambda batch, new, stay, gone: (select(batch, stay[::-1]), gone),
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


@filter_rows.rule
def is_a_new_batch(arguments, outcome, right):
    """Report a result that is the argument itself."""
    if outcome.result[0] is not outcome.arguments[0]:
        return None
    return "returns the batch that it was given. Return a new one: otherwise, a later change to one changes the other"


# --- filter_batch ---------------------------------------------------------------------------------------------------

filter_batch = Exercise(
    "filter_batch(batch)",
    "finished rows are gone, and so is the padding that the other rows share",
    names=NAMES,
    forbidden=["helpers.batching:filter_batch", "helpers.padded_batch:select_rows", "helpers.padded_batch:trim"],
)
filter_batch.cases(finished_rows)
filter_batch.ignoring(relevant_or_empty)
filter_batch.rule(is_a_new_batch)


def shared_padding(mask):
    """Return the number of columns in which no row has a token."""
    return mask.size(1) - int(mask.sum(dim=1).max()) if len(mask) else 0


@filter_batch.reference
def trimmed(batch):
    stay, removed = split(batch)
    return select(batch, stay, slice(shared_padding(batch["attention_mask"][stay]), None)), removed


@filter_batch.misconception(
    "shifts the positions by the trimmed columns. Positions belong to a row's text, and trimming pads does not "
    "change its text."
)
def positions_moved(batch):
    new, removed = trimmed(batch)
    columns = batch["attention_mask"].size(1) - new["attention_mask"].size(1)
    return new | {"position_ids": new["position_ids"] - columns}, removed


for _mask in (True, False):
    filter_batch.misconception(
        "trims the right side, where the newest tokens are: the padding is on the left.",
        lambda batch, _mask=_mask: trimmed_on_the_right(batch, _mask),
    )


def trimmed_on_the_right(batch, mask):
    """Trim the right side of the cache, and of the mask or not."""
    (new, removed), (stay, _) = trimmed(batch), split(batch)
    wrong = select(batch, stay, slice(-shared_padding(batch["attention_mask"][stay]) or None))
    return (wrong if mask else new | {"past_key_values": wrong["past_key_values"]}), removed


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
    longest = int(wanted["attention_mask"].sum(dim=1).argmax())
    widths = [(one["attention_mask"].size(1), kv_cache.length(one["past_key_values"])) for one in (got, wanted)]
    for what, came, due in zip(("mask", "cache"), *widths, strict=True):
        count = "one column" if abs(came - due) == 1 else f"{abs(came - due)} columns"
        if came > due:
            return f"leaves {count} of shared padding in the {what}: attention would compute it in every later step"
        if came < due:
            return f"trims {count} too many from the {what}: row {longest}'s first real token is gone"
    return None
