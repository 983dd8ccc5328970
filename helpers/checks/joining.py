"""Lesson 3, rows that join: masks, keys and values of all layers become equally wide, and no text moves."""

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from .. import batching
from .attempt import Attempt
from .differences import Grids, Wrong, expect_device, expect_equal, expect_tensor, recognise, same
from .hand_made import Reason, expect_batch, expect_cache, hand_made

EDGE = "its newest token must stay at the right edge"
UNEQUAL = "The two are of unequal width, and rows can only be stacked when all are equally wide."
WIDTHS = {
    "Sizes of tensors must match": UNEQUAL,
    "must match the existing size": UNEQUAL,
    "to be of equal size": UNEQUAL,
    "negative": "Either of the two may be the wider one.",
}


def merge_masks(attempt: Attempt) -> None:
    """The first narrower, the second narrower, both equally wide; unequal and equal numbers of rows."""
    wide, narrow = [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], [[1, 1, 1], [0, 1, 1], [1, 1, 1]]
    for first, second in [(wide, narrow), (narrow, wide), (wide, narrow[:2]), (wide[:1], wide[1:])]:
        one, other = torch.tensor(first), torch.tensor(second)
        got = attempt(one, other, given=_sizes("masks", one, other), hints=WIDTHS)
        expect_merged_mask(got, one, other, "the merged mask")


def _sizes(what: str, one: torch.Tensor, other: torch.Tensor) -> str:
    return f"{what} of {one.size(1)} and {other.size(1)} columns"


def expect_merged_mask(got, first: torch.Tensor, second: torch.Tensor, what: str) -> None:
    """Say in words if a mask is not the rows of both, padded on the left to one width."""
    expect_device(got, what, [first.device])
    masks = [first.cpu(), second.cpu()]
    width = max(mask.size(1) for mask in masks)
    adds = [width - mask.size(1) for mask in masks]
    narrow = min(mask.size(1) for mask in masks)
    row = 0 if adds[0] else masks[0].size(0)  # the first one that has to be padded

    def padded(side: str, value: int = 0) -> list[torch.Tensor]:
        pairs = zip(masks, adds, strict=True)
        return [pad(mask, (n, 0) if side == "left" else (0, n), value=value) for mask, n in pairs]

    right = torch.cat(padded("left"))
    if isinstance(got, torch.Tensor) and got.dim() == 2:
        got = got.cpu()
        recognise(
            got,
            right,
            [
                (
                    torch.cat(padded("right")),
                    f"row {row} of {what} is padded on the right: {EDGE}, where all rows continue together.",
                ),
                (
                    torch.cat(padded("left", 1)),
                    f"row {row} of {what} is padded with 1, which says that the new columns are real: the row would "
                    f"look at keys that do not exist.",
                ),
                (
                    torch.cat(padded("right", 1)),
                    f"row {row} of {what} is padded on the right and with 1: {EDGE}, and pads must be hidden.",
                ),
                (torch.cat(padded("left")[::-1]), f"{what} has the second batch's rows first, before the first's."),
                (masks[0], f"{what} has the rows of the first batch only: the newcomers have none."),
                (masks[1], f"{what} has the rows of the second batch only: those that were running have none."),
                (
                    torch.cat([mask[:, -narrow:] for mask in masks]),
                    f"{what} is cut to the narrower width: the wider batch's oldest tokens are no longer seen.",
                ),
                (
                    torch.cat([mask[:, :narrow] for mask in masks]),
                    f"{what} is cut to the narrower width: the wider batch's newest tokens are no longer seen.",
                ),
                (torch.ones_like(right), f"{what} is 1 everywhere: pads must stay hidden, old and new ones."),
                (
                    right[:, 1:],
                    f"{what} has a column too few: it covers the cache and the newest token, which is not in it yet.",
                ),
                *(
                    [(torch.cat(masks, dim=1), f"{what} puts the masks side by side: rows are stacked, not columns.")]
                    if masks[0].size(0) == masks[1].size(0)
                    else []
                ),
            ],
            Grids(right.tolist(), got.long().tolist(), "attention_mask", (None, 0)),
        )
    expect_tensor(got, what, right.shape, "the rows of both, as wide as the wider")
    expect_equal(got, right, what, "attention_mask", (None, 0))


def merge_batches(attempt: Attempt) -> None:
    """The first narrower, the second narrower, both equally wide."""
    wide, narrow = [("a", 4, 2), ("b", 2, 5)], [("c", 2, 3), ("d", 1, 4), ("e", 2, 1)]
    for first, second in [(wide, narrow), (narrow, wide), (wide, [("f", 4, 2)])]:
        one, other = hand_made(*first), hand_made(*second)
        given = _sizes("caches", one["attention_mask"][:, 1:], other["attention_mask"][:, 1:])
        got = attempt(one, other, given=given, hints=WIDTHS)
        expect_batch(got)
        _expect_merged(got, one, other)


def _expect_merged(got: dict, one: dict, other: dict) -> None:
    ids = one["request_ids"] + other["request_ids"]
    recognise(
        got["request_ids"],
        ids,
        [
            (one["request_ids"], "`request_ids` has the first batch's rows only: nobody knows whose the others are."),
            (
                other["request_ids"],
                "`request_ids` has the second batch's rows only: nobody knows whose the others are.",
            ),
            (
                other["request_ids"] + one["request_ids"],
                "puts the second batch's rows before the first's: those that are running stay where they are.",
            ),
        ],
    )
    if got["request_ids"] != ids:
        raise Wrong(f"`request_ids` should be {ids}, and is {got['request_ids']}.")
    expect_merged_mask(got["attention_mask"], one["attention_mask"], other["attention_mask"], "the mask")

    right = batching.merge_batches(one, other)
    expect_cache(got["past_key_values"], right, _why_not_merged(one, other))

    adds = [right["attention_mask"].size(1) - batch["attention_mask"].size(1) for batch in (one, other)]
    shifted = [batch["position_ids"].cpu() + n for batch, n in zip((one, other), adds, strict=True)]
    rows = len(ids)
    for key in ("input_ids", "position_ids"):
        expect_device(got[key], f"`{key}`", [right[key].device])
        wrong = [
            (one[key], f"`{key}` has the first batch's rows only."),
            (other[key], f"`{key}` has the second batch's rows only."),
            (
                torch.cat([other[key], one[key]]),
                f"`{key}` has the rows in another order than `request_ids`: a row would read another row's token.",
            ),
        ]
        if key == "position_ids":
            moved = (
                "the positions move with the padding. They belong to a row's text, and padding a row does not move it."
            )
            wrong += [(torch.cat(shifted), moved)]
            wrong += [(torch.full((rows, 1), right["attention_mask"].size(1) - 1), moved)]
        recognise(got[key], right[key], wrong)
        expect_tensor(got[key], f"`{key}`", [rows, 1], "the newest token of each row")
        expect_equal(got[key], right[key].cpu(), f"`{key}`", key)

    for key in ("token_ids", "tokens_remaining"):
        recognise(
            got[key],
            right[key],
            [
                (one[key], f"`{key}` has the first batch's rows only."),
                (other[key], f"`{key}` has the second batch's rows only."),
                (
                    other[key] + one[key],
                    f"`{key}` has the rows in another order than `request_ids`: they are mixed up.",
                ),
            ],
        )
        if got[key] != right[key]:
            raise Wrong(f"`{key}` should be {right[key]}, and is {got[key]}.")


def _why_not_merged(one: dict, other: dict) -> Reason:
    widths = [batch["attention_mask"].size(1) - 1 for batch in (one, other)]
    narrow = one if widths[0] < widths[1] else other
    first_row = 0 if narrow is one else len(one["request_ids"])
    add = abs(widths[0] - widths[1])

    def why(got, right, of: Callable[[dict], torch.Tensor], name: str) -> str | None:
        small = of(narrow)
        if same(got, of(one)):
            return f"the {name} are those of the first batch only, the other's rows are missing"
        if same(got, of(other)):
            return f"the {name} are those of the second batch only, the other's rows are missing"
        if got.dim() != 4 or got.shape[1] != right.shape[1] or got.shape[3] != right.shape[3]:
            return None
        if got.shape[0] == right.shape[0]:
            rows = slice(first_row, first_row + len(narrow["request_ids"]))
            if got.shape == right.shape and add and torch.equal(got[rows, :, : small.shape[2]], small):
                return f"row {first_row}'s {name} are padded on the right: {EDGE}"
            if got.shape[2] == small.shape[2] < right.shape[2]:
                return f"the {name} are cut to the narrower width: tokens of the wider batch are lost"
            if got.shape[2] == right.shape[2] + 1:
                return (
                    f"the {name} have one column too many: the mask is a column wider than the cache, since the newest "
                    f"token is not in the cache yet"
                )
        if got.shape == right.shape and torch.equal(got, -right):
            return f"the {name} hold the {'keys' if name == 'values' else 'values'}: each token has one of both"
        if got.shape == right.shape:
            n = len(other["request_ids"])
            swapped = torch.cat([right[-n:], right[:-n]])
            if torch.equal(got[:n, :, -1], swapped[:n, :, -1]) and torch.equal(got[n:, :, -1], swapped[n:, :, -1]):
                return f"the {name} have the rows in another order than `request_ids`: rows would read others' texts"
        if got.shape[0] == right.shape[0] and got.shape[2] == sum(widths):
            return f"the {name} are as wide as both together: rows share their columns, as wide as the wider batch"
        if len(one["request_ids"]) == len(other["request_ids"]) == got.shape[0]:
            return f"the {name} of the two batches stand side by side in a row: rows are stacked, not columns"
        return None

    return why


TASKS = {
    "merge_masks(first, second)": (merge_masks, "both are equally wide, and every row still ends at the right edge"),
    "merge_batches(first, second)": (
        merge_batches,
        "masks, keys and values of all layers line up, and no row has lost a token",
    ),
}
