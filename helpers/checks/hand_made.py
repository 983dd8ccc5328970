"""Hand-made batches and masks, small enough to be drawn, and the parts of a batch that make a difference.

The key of row a's first token begins with 10 in layer 0 and with 110 in layer 1, its value with the negative of that:
wherever a number of the cache ends up, it shows to which token it belongs.
"""

import itertools
from random import Random

import torch
from transformers import Cache

from .. import kv_cache
from ..models import load_model

LISTS = ("request_ids", "token_ids", "tokens_remaining", "finish_reasons")
TENSORS = ("input_ids", "position_ids", "attention_mask")
JUNK = 7.0  # in hidden columns of a cache


def hand_made(
    *rows: tuple[str, int | str, int], late: int = 0, layers: int = 2, heads: int = 2, dimension: int = 3
) -> dict:
    """Return a prefilled batch of rows (request id, tokens in the cache, tokens remaining).

    Tokens in the cache are a number, or a text with a 1 for each column that holds one and a 0 for the others.

    Every row starts in column 0. The `late` newest tokens in the cache were computed after the rows had been merged:
    they are in its last columns, behind the pads of shorter rows. The tokens of row "a" are 10, 11, ..., those of "b"
    are 20, 21, ...; the newest is not in the cache yet.
    """
    device = load_model()[0].device
    width = max(len(cached) if isinstance(cached, str) else cached for _, cached, _ in rows)
    ids, tokens, lengths = [name for name, _, _ in rows], [], []
    for name, cached, _ in rows:
        if not isinstance(cached, str):
            cached = "1" * (cached - late) + "0" * (width - cached) + "1" * late
        own = itertools.count(10 * (ord(name) - ord("a") + 1))
        tokens.append([next(own) if column == "1" else 0 for column in cached])
        lengths.append(cached.count("1"))
    newest = [10 * (ord(name) - ord("a") + 1) + length for name, length in zip(ids, lengths, strict=True)]

    cache, real = kv_cache.new(), torch.tensor(tokens, device=device)[:, None, :, None]
    scale = 1 + torch.arange(heads, device=device)[:, None, None] + 4 * torch.arange(dimension, device=device)
    for layer in range(layers):
        keys = torch.where(real > 0, (real + 100 * layer) * scale, JUNK)
        cache.update(keys, torch.where(real > 0, -keys, keys), layer)
    return {
        "request_ids": ids,
        "token_ids": [[token - 1, token] for token in newest],
        "tokens_remaining": [left for _, _, left in rows],
        "finish_reasons": [None if left else ("stop", "length")[number % 2] for number, (*_, left) in enumerate(rows)],
        "input_ids": torch.tensor(newest, device=device)[:, None],
        "position_ids": torch.tensor(lengths, device=device)[:, None],
        "attention_mask": torch.tensor([[int(token > 0) for token in row] + [1] for row in tokens], device=device),
        "past_key_values": cache,
    }


def mask_of(text: str) -> torch.Tensor:
    """Return a mask of a text such as "0111 1111", which has a word for each row."""
    return torch.tensor([list(map(int, row)) for row in text.split()])


def randn(random: Random, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors of these shapes, drawn anew for each seed."""
    draw = torch.Generator().manual_seed(random.randrange(10**6))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def contents(batch: dict) -> dict:
    """Return the keys that the exercises ask for, in the order in which they are compared, without further keys."""
    return {key: batch[key] for key in (*LISTS, *TENSORS, "past_key_values", "forward passes") if key in batch}


def blank(tensor, hidden: torch.Tensor, limit: int | None = None):
    """Return a tensor with 0 in hidden places, where any number that a model can look up is right.

    Args:
        tensor: whatever a student returns; without the shape of `hidden`, it is returned unchanged.
        hidden: bool, one per number, or broadcast to that.
        limit: numbers from 0 up to this one can be looked up; others become -1. Without it, finite ones are fine, and
            others become infinite.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != hidden.dim() or tensor.device != hidden.device:
        return tensor
    if any(of_hidden not in (1, size) for size, of_hidden in zip(tensor.shape, hidden.shape, strict=True)):
        return tensor
    fine = tensor.isfinite() if limit is None else (tensor >= 0) & (tensor < limit)
    blanked = tensor.masked_fill(hidden & fine, 0)
    return blanked.masked_fill(hidden & ~fine, float("inf") if limit is None else -1)


def blank_cache(cache, hidden: torch.Tensor):
    """Return a cache with 0 in hidden columns, bool [rows, columns]; what is not a cache is returned unchanged."""
    if not isinstance(cache, Cache) or any(layer.keys is None for layer in cache.layers):
        return cache
    blanked = kv_cache.new()
    for number, layer in enumerate(cache.layers):
        blanked.update(*(blank(tensor, hidden[:, None, :, None]) for tensor in (layer.keys, layer.values)), number)
    return blanked
