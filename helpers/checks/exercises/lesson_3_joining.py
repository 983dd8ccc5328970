"""Lesson 3: rows join a batch: their lists, tensors and layers stay aligned, and no key moves."""

import torch
from torch.nn.functional import pad

from ... import kv_cache
from ..exercise import Exercise
from ..hand_made import LISTS, TENSORS, blank_cache, contents, hand_made

ROWS = (*LISTS, *TENSORS, "past_key_values")  # everything with an entry per row
EDGE = "the newest token, which is not in the cache yet, must stay in the last column."
MOVED = "its keys would have to be moved. In this layout, every row starts in column 0 and stays there."
UNEQUAL = "stacks rows of unequal width: all rows of a tensor must have the same width."
merge_masks = Exercise(
    "merge_masks(first, second)", "both masks are equally wide, no cached token moves, and the newest stays last"
)
merge_masks.add_misconceptions({
    f"pads at the right edge: {EDGE}": {"side": "right"},
    f"pads on the left, as the lesson does: {MOVED}": {"side": "left"},
    "pads with 1, which marks the new columns as real: the row would attend to keys that do not exist.": {"value": 1},
    "puts the second mask's rows first: the running rows must stay on top.": lambda one, two: stack_masks(two, one),
    UNEQUAL: lambda one, two: torch.cat([one, two]),
    "cuts the wider mask: its rows could no longer attend to some of their tokens.":
        [{"wanted": wanted} for wanted in (min, lambda first, second: first, lambda first, second: second)],
    "always widens the same mask. Either of the two may be the narrower one.": lambda one, two: torch.cat([
        one, torch.cat([two[:, :-1], two.new_zeros(len(two), one.size(1) - two.size(1)), two[:, -1:]], dim=1)]),
})  # fmt: skip


@merge_masks.cases
def _(random):
    wide, narrow = [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]], [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
    widths = random.sample(range(3, 9), 2)
    drawn = [[[1] * (width - n - 1) + [0] * n + [1] for n in random.sample(range(width), 2)] for width in widths]
    two_gaps, both_ends = [[1, 0, 1, 0, 0, 1, 1]], [[0, 1, 1, 0, 1], [0, 0, 1, 0, 1]]
    for first, second in [
        (wide, narrow), (narrow, wide), (wide, narrow[:2]), (wide[:1], wide[1:]), (two_gaps, both_ends),
        (both_ends, two_gaps), ([[1, 0, 0, 1, 1]], both_ends), ([[1]], two_gaps),
        drawn,
    ]:  # fmt: skip
        what = f"masks of {len(first[0])} and {len(second[0])} columns"
        yield (torch.tensor(first), torch.tensor(second)), f"{what}: {first} and {second}"


@merge_masks.reference
def stack_masks(first, second, side="middle", value=0, wanted=max):
    """Merge masks, with replaceable parts: where new columns go, their value, and the width."""
    width = wanted(first.size(1), second.size(1))

    def widened(mask):
        columns = width - mask.size(1)
        if side == "middle" and columns > 0:
            return torch.cat([pad(mask[:, :-1], (0, columns), value=value), mask[:, -1:]], dim=1)
        return pad(mask, (columns, 0) if side == "left" or columns < 0 else (0, columns), value=value)

    return torch.cat([widened(mask) for mask in (first, second)])


EVERY_LAYER = "Every layer has its own keys and values, and each needs the same change."
merge_batches = Exercise(
    "merge_batches(first, second)",
    "masks, keys and values of all layers line up, and no row has lost a token",
    forbidden=["helpers.batching:merge_batches", "helpers.padded_batch:concatenate_rows"],
)
merge_batches.add_misconceptions({
    f"pads the cache on the left, as the lesson does: {MOVED}": {"left": (True, True)},
    "pads the keys on one side and the values on the other: a token's key and value share a column.":
        {"left": (False, True)},
    "makes the cache as wide as the mask. The mask has one more column, because the newest token is not in the "
    "cache yet.": {"adds": lambda columns: columns + 1},
    "fills the new columns with values that are not finite. The mask gives these columns the weight 0, but 0 times "
    "infinity is NaN.": {"value": float("inf")},
    UNEQUAL: {"adds": lambda columns: 0},
    "puts the second batch's rows first: the running rows must stay on top.": lambda one, two: stack(two, one),
})  # fmt: skip
merge_batches.add_wrong_results({
    f"pads the mask and the cache on the left, as the lesson does: {MOVED}": lambda both, one, two: (
        stack(one, two, left=(True, True)) | mask_padded_on(one, two, "left")),
    f"pads the mask at the right edge: {EDGE}": lambda both, one, two: mask_padded_on(one, two, "right"),
    "stores the keys as values, too: attention needs both.":
        lambda both, *_: with_layers(both, [(keys, keys) for keys, _ in layers_of(both)]),
    f"merges only layer 0. {EVERY_LAYER}":
        lambda both, one, two: with_layers(both, layers_of(both)[:1] + layers_of(one)[1:]),
    "shifts the positions by the padding. Positions belong to a row's text, and padding a row does not change its "
    "text.": lambda both, *given: {"position_ids": torch.cat([
        one["position_ids"] + both["attention_mask"].size(1) - one["attention_mask"].size(1) for one in given])},
} | {
    f"orders the rows of `{key}` differently from the other parts: requests would get each other's data.":
        lambda both, one, two, key=key: {key: stack(two, one)[key]} for key in ROWS
})  # fmt: skip


def mask_padded_on(first, second, side):
    return {"attention_mask": stack_masks(first["attention_mask"], second["attention_mask"], side=side)}


@merge_batches.cases
def _(random):
    wide, narrow = [("a", 4, 2), ("b", 2, 5)], [("c", 2, 3), ("d", 1, 0), ("e", 2, 1)]
    lengths = random.sample(range(2, 9), 4)
    drawn = [("b", lengths[0], 3), ("a", lengths[1], 0)], [("d", lengths[2], 7), ("c", lengths[3], 4)]
    gaps = [("g", "1010011", 2), ("h", "0110101", 0)], [("k", "0010", 4), ("m", "1101", 2)]
    for rows, layers in [
        ((wide, narrow), 2), ((narrow, wide), 3), ((wide, [("f", 4, 2)]), 2), (gaps, 2), (gaps[::-1], 3), (drawn, 4),
    ]:  # fmt: skip
        shape = {"layers": layers, "heads": 5 - layers, "dimension": layers + 1}
        batches = [hand_made(*each, **shape, late=place == layers % 2) for place, each in enumerate(rows)]
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
def stack(first, second, left=(False, False), adds=lambda columns: columns, value=0.0):
    """Merge two batches, with replaceable parts: the new columns' side in keys and in values, number and value."""
    width = max(first["attention_mask"].size(1), second["attention_mask"].size(1))

    def widened(tensor, batch, on_the_left):
        columns = adds(width - batch["attention_mask"].size(1))
        return pad(tensor, (0, 0, columns, 0) if on_the_left else (0, 0, 0, columns), value=value)

    layers = []
    for one, two in zip(layers_of(first), layers_of(second), strict=True):
        parts = zip(one, two, left, strict=True)
        layers.append([torch.cat([widened(a, first, side), widened(b, second, side)]) for a, b, side in parts])
    merged = {key: first[key] + second[key] for key in LISTS}
    merged |= {key: torch.cat([first[key], second[key]]) for key in ("input_ids", "position_ids")}
    merged["attention_mask"] = stack_masks(first["attention_mask"], second["attention_mask"])
    return with_layers(merged, layers)


@merge_batches.ignoring
def relevant(batch, arguments=()):
    """Ignore what a hidden column holds, if it is finite, and further keys."""
    batch = contents(batch)
    if "past_key_values" in batch:
        batch["past_key_values"] = blank_cache(batch["past_key_values"], batch["attention_mask"][:, :-1] == 0)
    return batch
