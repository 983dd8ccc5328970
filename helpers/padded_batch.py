"""Operations on the rows of a left-padded batch, which the verbs and the padded runner share.

Every function returns a new batch and leaves its argument unchanged. A batch here is a mapping: lists and tensors have
one entry per row, and `past_key_values` is a cache with the same rows. See `batching.py` for the keys.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from . import kv_cache
from .models import run_model

TENSORS = ("input_ids", "position_ids", "attention_mask")


def left_padded(token_ids: Sequence[list[int]], pad_id: int | None = None, device="cpu") -> dict[str, torch.Tensor]:
    """Return `input_ids`, `position_ids` and `attention_mask` [B, longest] for rows of unequal length."""
    width = max(map(len, token_ids))
    pads = [width - len(ids) for ids in token_ids]
    pad_id = pad_id or 0  # any id will do, because the mask hides it
    return {
        "input_ids": torch.tensor([[pad_id] * n + ids for n, ids in zip(pads, token_ids, strict=True)], device=device),
        "position_ids": torch.tensor([[0] * n + list(range(width - n)) for n in pads], device=device),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads], device=device),
    }


def forward(batch: dict, model, num_logits: int = 1):
    """Run one forward pass over a batch's `input_ids`.

    Returns:
        The logits [B, num_logits, vocabulary] of the newest tokens of every row, and a new cache that also holds
        `input_ids`.
    """
    cache = batch.get("past_key_values")
    output = run_model(
        model,
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"].clone(),  # XGLM in transformers 4 changes its argument in place
        attention_mask=batch["attention_mask"],
        past_key_values=kv_cache.copy(cache) if cache is not None else kv_cache.new(),
        use_cache=True,
        logits_to_keep=num_logits,  # left padding: the newest token of every row is in the last column
    )
    return output.logits[:, -num_logits:], output.past_key_values


def concatenate_rows(first: dict, second: dict) -> dict:
    """Return the rows of both batches, left-padded to one width: the newest tokens share the last column."""
    width = max(first["attention_mask"].size(1), second["attention_mask"].size(1))
    first, second = _left_pad(first, width), _left_pad(second, width)
    joined = {key: value + second[key] for key, value in first.items() if isinstance(value, list)}
    joined |= {key: torch.cat([first[key], second[key]]) for key in TENSORS}
    joined["past_key_values"] = kv_cache.concatenate(first["past_key_values"], second["past_key_values"])
    return joined


def select_rows(batch: dict, rows: Sequence[int]) -> dict:
    """Return these rows, in this order, without the padding that all of them share; with no rows, an empty batch."""
    index = torch.tensor(rows, dtype=torch.long, device=batch["attention_mask"].device)
    selected = {key: [value[row] for row in rows] for key, value in batch.items() if isinstance(value, list)}
    selected |= {key: batch[key][index] for key in TENSORS}
    selected["past_key_values"] = kv_cache.select_rows(batch["past_key_values"], rows)
    return keep_last_columns(selected, int(selected["attention_mask"].sum(dim=1).max()) if rows else 1)


def keep_last_columns(batch: dict, width: int) -> dict:
    """Return the rightmost `width` columns of all rows, or the batch itself if it has no more than these."""
    columns = batch["attention_mask"].size(1) - width
    if columns <= 0:
        return batch
    return batch | {
        "attention_mask": batch["attention_mask"][:, columns:],
        "past_key_values": kv_cache.trim_left(batch["past_key_values"], columns),
    }


def _left_pad(batch: dict, width: int) -> dict:
    columns = width - batch["attention_mask"].size(1)
    return batch | {
        "attention_mask": pad(batch["attention_mask"], (columns, 0)),
        "past_key_values": kv_cache.left_pad(batch["past_key_values"], columns),
    }
