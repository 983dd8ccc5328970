"""Lesson 3, rows that leave: out of the lists, the tensors and all layers, and with them the padding they caused."""

from collections.abc import Callable

import torch

from .. import kv_cache
from .attempt import Attempt
from .differences import Grids, Wrong, expect_device, expect_equal, expect_pair, expect_tensor, kind, recognise, same
from .hand_made import LISTS, Reason, expect_batch, expect_cache, hand_made

LEAVING = {
    "indices": "When every row is finished, no index is left, and an empty index must still be one of whole numbers.",
    "max(): Expected reduction": "When every row is finished there is no longest row.",
    "max() arg is an empty sequence": "When every row is finished there is no longest row.",
    "max() iterable argument is empty": "When every row is finished there is no longest row.",
}


def filter_rows(attempt: Attempt) -> None:
    """Finished rows at the front and in the middle, side by side, all, none."""
    _filter(attempt, trims=False)


def filter_batch(attempt: Attempt) -> None:
    """As filter_rows, with two columns, one or none to be trimmed."""
    _filter(attempt, trims=True)


def _filter(attempt: Attempt, trims: bool) -> None:
    cases = {
        "rows 0 and 2 are finished": [("a", 6, 0), ("b", 3, 2), ("c", 5, 0), ("d", 4, 7)],
        "rows 1 and 2 are finished, the longest stays": [("a", 4, 3), ("b", 1, 0), ("c", 3, 0), ("d", 2, 1)],
        "row 1 is finished, the longest": [("a", 1, 3), ("b", 3, 0), ("c", 2, 1)],
        "no row is finished": [("a", 2, 3), ("b", 3, 1)],
        "every row is finished": [("a", 2, 0), ("b", 3, 0)],
    }
    for given, rows in cases.items():
        batch = hand_made(*rows)
        got = attempt(batch, given=given, hints=LEAVING)
        expect_pair(got, "the batch without its finished rows and the list of the removed rows")
        got, removed = got
        if isinstance(removed, dict) and not isinstance(got, dict):
            raise Wrong("returns the removed rows first. Wanted are the batch, then the list of removed rows.")
        stay = [row for row, (_, _, left) in enumerate(rows) if left]
        gone = [row for row, (_, _, left) in enumerate(rows) if not left]
        _expect_removed(removed, gone, stay, [batch["request_ids"][row] for row in gone], given)
        if not stay:
            if not isinstance(got, dict) or got.get("request_ids") != []:
                raise Wrong(f"an empty batch should remain ({given}): a batch whose `request_ids` is an empty list.")
            continue
        expect_batch(got)
        _expect_filtered(got, batch, stay, gone, given, trims)


def _expect_removed(removed, gone: list[int], stay: list[int], ids: list, given: str) -> None:
    if not isinstance(removed, list):
        raise Wrong(f"the removed rows should come as a list of row numbers, and are {kind(removed)}.")
    recognise(
        removed,
        gone,
        [
            (stay, f"lists the rows that stay, {stay}. Wanted are those that were removed ({given})."),
            (ids, f"lists the request ids of the removed rows. Wanted are their row numbers ({given})."),
            (gone[::-1], f"lists the removed rows backwards: {removed}, and should list {gone} ({given})."),
        ],
    )
    if removed != gone:
        raise Wrong(f"the removed rows should be {gone}, and are {removed} ({given}).")


def _expect_filtered(got: dict, batch: dict, stay: list[int], gone: list[int], given: str, trims: bool) -> None:
    for key in LISTS:
        had, right = batch[key], [batch[key][row] for row in stay]
        popped = list(had)
        for row in gone:
            del popped[row : row + 1]
        recognise(
            got[key],
            right,
            [
                (had, f"`{key}` still has the finished rows ({given}): the lists and the tensors would not line up."),
                ([had[row] for row in gone], f"`{key}` keeps the finished rows and drops the others ({given})."),
                (popped, f"`{key}` loses a wrong row ({given}): when a row is out, those behind it move up."),
                (right[::-1], f"`{key}` has the rows in another order than before ({given})."),
            ],
        )
        if got[key] != right:
            raise Wrong(f"`{key}` should be {right}, and is {got[key]} ({given}).")

    mask = batch["attention_mask"].cpu()
    width = mask.size(1)
    columns = width - int(mask[stay].sum(dim=1).max()) if trims else 0
    for key in ("input_ids", "position_ids"):
        expect_device(got[key], f"`{key}`", [batch[key].device])
        had, right = batch[key].cpu(), batch[key].cpu()[stay]
        recognise(
            got[key],
            right,
            [
                (had, f"`{key}` still has the finished rows ({given}): rows would read others' tokens."),
                (had[gone], f"`{key}` keeps the finished rows and drops the others ({given})."),
                (
                    right - columns,
                    f"`{key}` moves with the trimming ({given}). Positions belong to a row's text, and trimming pads "
                    f"does not move it.",
                ),
            ],
        )
        expect_tensor(got[key], f"`{key}`", right.shape, "a row for each request that stays")
        expect_equal(got[key], right, f"`{key}` ({given})", key)

    right = {"attention_mask": mask[stay][:, columns:]}
    cache = kv_cache.trim_left(kv_cache.select_rows(batch["past_key_values"], stay), columns)
    right["past_key_values"] = cache
    _expect_filtered_mask(got["attention_mask"], batch["attention_mask"], stay, gone, columns, given, trims)
    expect_cache(got["past_key_values"], right, _why_not_filtered(batch, stay, gone, columns, given, trims))


def _trimmed_wrongly(came: int, wanted: int, what: str, row: int, trims: bool) -> str | None:
    """In words, why something has `came` columns instead of `wanted`."""
    if came == wanted:
        return None
    many = abs(wanted - came)
    count = "one column" if many == 1 else f"{many} columns"
    if not trims:
        return f"{what} lost {count}: this exercise takes rows out and leaves the columns alone"
    if came < wanted:
        return (
            f"{count} too many {'is' if many == 1 else 'are'} trimmed from {what}: row {row}'s first real token is gone"
        )
    return f"{what} still has {count} of padding that all rows have in common: every later step would carry it along"


def _expect_filtered_mask(got, mask: torch.Tensor, stay, gone, columns: int, given: str, trims: bool) -> None:
    expect_device(got, "the mask", [mask.device])
    mask = mask.cpu()
    right = mask[stay][:, columns:]
    longest = int(mask[stay].sum(dim=1).argmax())
    if isinstance(got, torch.Tensor) and got.dim() == 2:
        got = got.cpu()
        grids = Grids(right.tolist(), got.long().tolist(), "attention_mask", (None, 0))
        recognise(
            got,
            right,
            [
                (mask, f"the mask still has the finished rows ({given})."),
                (mask[:, columns:], f"the mask still has the finished rows ({given})."),
                (mask[gone], f"the mask keeps the finished rows and drops the others ({given})."),
                (mask[stay].flip(0)[:, columns:], f"the mask has the rows in another order than before ({given})."),
                *(
                    [
                        (
                            mask[stay][:, : mask.size(1) - columns],
                            f"the mask is trimmed on the right ({given}): the padding stands on the left, and on the "
                            f"right are the newest tokens.",
                        )
                    ]
                    if columns
                    else []
                ),
            ],
            grids,
        )
        if got.size(0) == len(stay):
            message = _trimmed_wrongly(got.size(1), right.size(1), "the mask", longest, trims)
            if message:
                raise Wrong(f"{message} ({given}).", grids)
    expect_tensor(got, "the mask", right.shape, "a row for each request that stays")
    expect_equal(got, right, f"the mask ({given})", "attention_mask", (None, 0))


def _why_not_filtered(batch: dict, stay, gone, columns: int, given: str, trims: bool) -> Reason:
    longest = int(batch["attention_mask"].cpu()[stay].sum(dim=1).argmax())

    def why(got, right, of: Callable[[dict], torch.Tensor], name: str) -> str | None:
        had = of(batch)
        if got.dim() != 4:
            return None
        if got.shape[0] == had.shape[0] != len(stay):
            return f"the {name} of the finished rows are still in the cache ({given})"
        if same(got, had[gone]) or same(got, had[gone][:, :, columns:]):
            return f"the cache keeps the {name} of the finished rows and drops the others ({given})"
        if got.shape == right.shape and torch.equal(got, -right):
            return f"the {name} hold the {'keys' if name == 'values' else 'values'}: each token has one of both"
        if columns and same(got, had[stay][:, :, :-columns]):
            return (
                f"the {name} are trimmed on the right ({given}): the padding stands on the left, and on the right are "
                f"the newest tokens"
            )
        if got.shape[0] == len(stay) and got.shape[2] != right.shape[2]:
            return f"{_trimmed_wrongly(got.shape[2], right.shape[2], f'the cache ({name})', longest, trims)} ({given})"
        if got.shape == right.shape and torch.equal(got, right.flip(0)):
            return f"the {name} have the rows in another order than `request_ids` ({given})"
        return None

    return why


TASKS = {
    "filter_rows(batch)": (filter_rows, "finished rows are gone from the lists, the tensors and every layer"),
    "filter_batch(batch)": (
        filter_batch,
        "finished rows are gone, and so is the padding that the others had in common",
    ),
}
