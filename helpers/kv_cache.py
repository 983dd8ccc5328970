"""The KV cache as five pure operations: copy, left-pad, concatenate, select rows, trim.

No other file changes transformers' `Cache` objects. Each layer holds `keys` and `values` [B, kv heads, T, head dim]: a
row per request and a column per token, with the newest token at the right edge.

Every function returns a new cache and leaves its argument unchanged. This matters, because the model appends to the
cache object that it is given, *in place*: a cell that runs twice would decode on a cache that is one token too long.
"""

import copy as _copy
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad
from transformers import DynamicCache


def new() -> DynamicCache:
    """Return an empty cache that stores every layer in full.

    It has no config on purpose. With one, layers with a sliding window keep only the window's columns, and the columns
    of different layers no longer correspond. The attention mask applies the window in any case.
    """
    return DynamicCache()


def _each(cache: DynamicCache, change: Callable[[torch.Tensor], torch.Tensor]) -> DynamicCache:
    """Return a new cache, with `change` applied to the keys and to the values of every layer."""
    shell = _copy.copy(cache)
    shell.layers = [_copy.copy(layer) for layer in cache.layers]
    for layer in shell.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)
    return shell


def copy(cache: DynamicCache) -> DynamicCache:
    """Return a new cache that shares the tensors: what the model appends to it does not change the original."""
    return _each(cache, lambda tensor: tensor)


def left_pad(cache: DynamicCache, columns: int) -> DynamicCache:
    """Add `columns` columns of zeros on the left: [B, heads, T, dim] becomes [B, heads, columns + T, dim].

    Any values would do, because the attention mask is 0 in these columns.
    """
    return _each(cache, lambda tensor: pad(tensor, (0, 0, columns, 0))) if columns else copy(cache)


def concatenate(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """Return the rows of both caches, which must have the same width: [B1 + B2, heads, T, dim]."""
    others = iter([tensor for layer in second.layers for tensor in (layer.keys, layer.values)])
    return _each(first, lambda tensor: torch.cat([tensor, next(others)]))


def select_rows(cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """Return these rows, in this order: [len(rows), heads, T, dim]."""
    return _each(cache, lambda tensor: tensor[list(rows)])


def trim_left(cache: DynamicCache, columns: int) -> DynamicCache:
    """Remove the leftmost `columns` columns (transformers' own `crop` removes columns on the right)."""
    return _each(cache, lambda tensor: tensor[:, :, columns:])


def length(cache: DynamicCache) -> int:
    """Return T, the number of columns of every layer."""
    return cache.layers[0].keys.shape[2] if cache.layers else 0


def shapes(cache: DynamicCache) -> list[tuple[int, ...]]:
    """Return (kv heads, head dim) of every layer: two caches must agree in them to be concatenated."""
    return [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers]
