"""Lesson 3: rows join a batch: their lists, tensors and layers stay aligned, and no key moves."""

import torch
from torch.nn.functional import pad

from ... import kv_cache
from ..exercise import Exercise
from ..hand_made import LISTS, TENSORS, blank_cache, contents, hand_made

ROWS = (*LISTS, *TENSORS, "past_key_values")  # everything with an entry per row


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
    for first_layer, second_layer in zip(layers_of(first), layers_of(second), strict=True):
        pairs = zip(first_layer, second_layer, strict=True)
        layers.append([torch.cat([widened(a, first), widened(b, second)]) for a, b in pairs])
    merged = {key: first[key] + second[key] for key in LISTS}
    merged |= {key: torch.cat([first[key], second[key]]) for key in ("input_ids", "position_ids")}
    masks = []
    for mask in (first["attention_mask"], second["attention_mask"]):
        new = mask.new_zeros(len(mask), width - mask.size(1))
        masks.append(torch.cat([mask[:, :-1], new, mask[:, -1:]], dim=1))
    merged["attention_mask"] = torch.cat(masks)
    return with_layers(merged, layers)


def _pair(random, first, second, layers):
    shape = {"layers": layers, "heads": 5 - layers, "dimension": layers + 1}
    return [hand_made(*rows, **shape, late=index == layers % 2) for index, rows in enumerate((first, second))]


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


MOVED = "its keys would have to be moved. In this layout, every row starts in column 0 and stays there."
NEW_COLUMNS = "[mask[:, :-1], new, mask[:, -1:]]"
CACHE_TO_THE_LEFT = "(0, 0, 0, columns) -> (0, 0, columns, 0)"
merge_batches.add_misconceptions({
    f"pads the cache on the left, as the lesson does: {MOVED}": CACHE_TO_THE_LEFT,
    "makes the cache as wide as the mask. The mask has one more column, because the newest token is not in the "
    "cache yet.": "= width - -> = 1 + width -",
    "stacks rows of unequal width: all rows of a tensor must have the same width.":
        'width - batch["attention_mask"].size(1) -> 0',
    "puts the second batch's rows first: the running rows must stay on top.":
        lambda first, second: merge_batches.solution(second, first),
    f"pads the mask and the cache on the left, as the lesson does: {MOVED}":
        (CACHE_TO_THE_LEFT, f"{NEW_COLUMNS} -> [new, mask]"),
    "pads the mask at the right edge: the newest token, which is not in the cache yet, must stay in the last column.":
        f"{NEW_COLUMNS} -> [mask, new]",
    "pads the mask with 1, which marks columns as real: the row would attend to keys that don't exist.":
        "new_zeros -> new_ones",
    "shifts the positions by the padding. Positions belong to a row's text, and padding a row does not change its "
    "text.": "(merged, layers) -> (merged | {'position_ids': torch.cat([batch['position_ids'] + width "
        "- batch['attention_mask'].size(1) for batch in (first, second)])}, layers)",
    f"merges only layer 0. {EVERY_LAYER}": "(merged, layers) -> (merged, layers[:1] + layers_of(first)[1:])",
} | {
    f"orders the rows of `{key}` differently from the other parts: requests would get each other's data.":
        lambda first, second, key=key: (
            merge_batches.solution(first, second) | {key: merge_batches.solution(second, first)[key]})
    for key in ROWS
})  # fmt: skip


@merge_batches.ignoring
def relevant(batch, arguments=()):
    """Ignore what a hidden column holds, if it is finite, and further keys."""
    batch = contents(batch)
    if "past_key_values" in batch:
        batch["past_key_values"] = blank_cache(batch["past_key_values"], batch["attention_mask"][:, :-1] == 0)
    return batch
