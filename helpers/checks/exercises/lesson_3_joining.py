"""Lesson 3: rows join a batch: their lists, tensors and layers stay aligned, and no key moves."""

import torch
from torch.nn.functional import pad

from ... import kv_cache
from ..edits import edited
from ..exercise import Exercise
from ..hand_made import LISTS, TENSORS, blank_cache, contents, hand_made, mask_of

ROWS = (*LISTS, *TENSORS, "past_key_values")  # everything with an entry per row


@Exercise.declare("both masks are equally wide, no cached token moves, and the newest stays last")
def merge_masks(first, second):
    width = max(first.size(1), second.size(1))
    rows = []
    for mask in (first, second):
        new = mask.new_zeros(len(mask), width - mask.size(1))
        rows.append(torch.cat([mask[:, :-1], new, mask[:, -1:]], dim=1))
    return torch.cat(rows)


merge_masks.table([
    ("110011 111111", "111 101 111"), ("111 101 111", "110011 111111"), ("110011 111111", "111 101"),
    ("110011", "111111"), ("1010011", "01101 00101"), ("01101 00101", "1010011"), ("10011", "01101 00101"),
    ("1", "1010011"),
], lambda random: [
    [" ".join("1" * (width - n - 1) + "0" * n + "1" for n in random.sample(range(width), 2))
     for width in random.sample(range(3, 9), 2)]
], given="masks {} and {}", build=lambda random, *masks: map(mask_of, masks))  # fmt: skip

EDGE = "the newest token, which is not in the cache yet, must stay in the last column."
UNEQUAL = "stacks rows of unequal width: all rows of a tensor must have the same width."
MOVED = "its keys would have to be moved. In this layout, every row starts in column 0 and stays there."
WIDTH, NEW_COLUMNS = "max(first.size(1), second.size(1))", "[mask[:, :-1], new, mask[:, -1:]]"
TO_THE_LEFT, TO_THE_RIGHT = (f"{NEW_COLUMNS} -> [{parts}]" for parts in ("new, mask", "mask, new"))
merge_masks.add_misconceptions({
    f"pads at the right edge: {EDGE}": TO_THE_RIGHT,
    f"pads on the left, as the lesson does: {MOVED}": TO_THE_LEFT,
    "pads with 1, which marks columns as real: the row would attend to keys that don't exist.": "new_zeros -> new_ones",
    "puts the second mask's rows first: the running rows must stay on top.": "in (first, second) -> in (second, first)",
    UNEQUAL: lambda one, two: torch.cat([one, two]),
    "cuts the wider mask: its rows could no longer attend to some of their tokens.": [
        (f"{WIDTH} -> {width}", "width - mask.size(1)) -> max(0, width - mask.size(1)))",
         f"{NEW_COLUMNS}, dim=1) -> {NEW_COLUMNS}, dim=1)[:, {columns}]")
        for width in ("min(first.size(1), second.size(1))", "first.size(1)", "second.size(1)")
        for columns in ("-width:", ":width")],
    "always widens the same mask. Either of the two may be the narrower one.":
        [f"{WIDTH} -> {one}.size(1)" for one in ("first", "second")],
})  # fmt: skip

EVERY_LAYER = "Every layer has its own keys and values, and each needs the same change."


@Exercise.declare(
    "masks, keys and values of all layers line up, and no row has lost a token",
    forbidden=["helpers.batching:merge_batches", "helpers.padded_batch:concatenate_rows"],
)
def merge_batches(first, second):
    width = max(first["attention_mask"].size(1), second["attention_mask"].size(1))

    def widened(tensor, batch):
        columns = width - batch["attention_mask"].size(1)
        return pad(tensor, (0, 0, 0, columns))

    layers = []
    for one, two in zip(layers_of(first), layers_of(second), strict=True):
        layers.append([torch.cat([widened(a, first), widened(b, second)]) for a, b in zip(one, two, strict=True)])
    merged = {key: first[key] + second[key] for key in LISTS}
    merged |= {key: torch.cat([first[key], second[key]]) for key in ("input_ids", "position_ids")}
    merged["attention_mask"] = merge_masks.solution(first["attention_mask"], second["attention_mask"])
    return with_layers(merged, layers)


def _pair(random, first, second, layers):
    shape = {"layers": layers, "heads": 5 - layers, "dimension": layers + 1}
    return [hand_made(*rows, **shape, late=place == layers % 2) for place, rows in enumerate((first, second))]


WIDE, NARROW = [("a", 4, 2), ("b", 2, 5)], [("c", 2, 3), ("d", 1, 0), ("e", 2, 1)]
GAPS = [("g", "1010011", 2), ("h", "0110101", 0)], [("k", "0010", 4), ("m", "1101", 2)]
merge_batches.table([
    (WIDE, NARROW, 2), (NARROW, WIDE, 3), (WIDE, [("f", 4, 2)], 2), (*GAPS, 2), (*GAPS[::-1], 3),
], lambda random: [
    ([("b", random.randint(2, 8), 3), ("a", random.randint(2, 8), 0)], [("d", 5, 7), ("c", random.randint(2, 8), 4)], 4)
], given="rows (name, tokens in the cache, tokens remaining) {} and {}, {} layers", build=_pair)  # fmt: skip


def layers_of(batch):
    """Return (keys, values) of each layer."""
    return [(layer.keys, layer.values) for layer in batch["past_key_values"].layers]


def with_layers(batch, layers):
    """Return a batch with other keys and values."""
    cache = kv_cache.new()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return batch | {"past_key_values": cache}


masks_to_the_left, masks_to_the_right = (edited(merge_masks.solution, edit) for edit in (TO_THE_LEFT, TO_THE_RIGHT))
CACHE_TO_THE_LEFT = "(0, 0, 0, columns) -> (0, 0, columns, 0)"
IS_OF_VALUES = "any(tensor is values for _, values in layers_of(batch))"
merge_batches.add_misconceptions({
    f"pads the cache on the left, as the lesson does: {MOVED}": CACHE_TO_THE_LEFT,
    "pads the keys on one side and the values on the other: a token's key and value share a column.":
        f"{CACHE_TO_THE_LEFT} if {IS_OF_VALUES} else (0, 0, 0, columns)",
    "makes the cache as wide as the mask. The mask has one more column, because the newest token is not in the "
    "cache yet.": "= width - -> = 1 + width -",
    "fills the new columns with values that are not finite. The mask gives these columns the weight 0, but 0 times "
    "infinity is NaN.": "columns)) -> columns), value=float('inf'))",
    UNEQUAL: 'width - batch["attention_mask"].size(1) -> 0',
    "puts the second batch's rows first: the running rows must stay on top.":
        lambda one, two: merge_batches.solution(two, one),
    f"pads the mask and the cache on the left, as the lesson does: {MOVED}":
        (CACHE_TO_THE_LEFT, "merge_masks.solution( -> masks_to_the_left("),
    f"pads the mask at the right edge: {EDGE}": "merge_masks.solution( -> masks_to_the_right(",
    "shifts the positions by the padding. Positions belong to a row's text, and padding a row does not change its "
    "text.": "(merged, layers) -> (merged | {'position_ids': torch.cat([one['position_ids'] + width "
        "- one['attention_mask'].size(1) for one in (first, second)])}, layers)",
    "stores keys as values: both are needed.": "(merged, layers) -> (merged, [(keys, keys) for keys, _ in layers])",
    f"merges only layer 0. {EVERY_LAYER}": "(merged, layers) -> (merged, layers[:1] + layers_of(first)[1:])",
} | {
    f"orders the rows of `{key}` differently from the other parts: requests would get each other's data.":
        lambda one, two, key=key: merge_batches.solution(one, two) | {key: merge_batches.solution(two, one)[key]}
    for key in ROWS
})  # fmt: skip


@merge_batches.ignoring
def relevant(batch, arguments=()):
    """Ignore what a hidden column holds, if it is finite, and further keys."""
    batch = contents(batch)
    if "past_key_values" in batch:
        batch["past_key_values"] = blank_cache(batch["past_key_values"], batch["attention_mask"][:, :-1] == 0)
    return batch
