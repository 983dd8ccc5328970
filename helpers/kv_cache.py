"""The KV cache as five pure operations: copy, left-pad, concatenate, select rows, trim.

The only file that touches transformers' `Cache` objects. Each layer holds `keys` and `values` of
[B, kv heads, T, head dim]: a row for each request, a column for each token, the newest token at the right edge.

Every function returns a new cache and leaves its argument alone. That matters more than it looks: the model
*grows the cache object it is given*, in place, so a cell run twice would decode on a cache one token too long.
"""

import copy as _copy
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad
from transformers import DynamicCache


def new() -> DynamicCache:
    """An empty cache that stores every layer in full.

    Made without a config on purpose: with one, layers with a sliding window keep only the window's columns, and
    columns could no longer be lined up between layers. The attention mask applies the window all the same.
    """
    return DynamicCache()


def _each(cache: DynamicCache, change: Callable[[torch.Tensor], torch.Tensor]) -> DynamicCache:
    """A new shell around `change(tensor)` for the keys and the values of every layer."""
    shell = _copy.copy(cache)
    shell.layers = [_copy.copy(layer) for layer in cache.layers]
    for layer in shell.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)
    return shell


def copy(cache: DynamicCache) -> DynamicCache:
    """A new shell that shares the tensors: what the model appends to it, the original does not see."""
    return _each(cache, lambda tensor: tensor)


def left_pad(cache: DynamicCache, columns: int) -> DynamicCache:
    """`columns` columns of zeros on the left: [B, heads, T, dim] becomes [B, heads, columns + T, dim].

    What the new columns hold does not matter, as long as the attention mask is 0 there.
    """
    return _each(cache, lambda tensor: pad(tensor, (0, 0, columns, 0))) if columns else copy(cache)


def concatenate(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """The rows of both caches, which must be equally wide: [B1 + B2, heads, T, dim]."""
    others = iter([tensor for layer in second.layers for tensor in (layer.keys, layer.values)])
    return _each(first, lambda tensor: torch.cat([tensor, next(others)]))


def select_rows(cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """Those rows, in that order: [len(rows), heads, T, dim]."""
    return _each(cache, lambda tensor: tensor[list(rows)])


def trim_left(cache: DynamicCache, columns: int) -> DynamicCache:
    """Without the leftmost `columns` columns (transformers' own `crop` cuts on the right)."""
    return _each(cache, lambda tensor: tensor[:, :, columns:])


def length(cache: DynamicCache) -> int:
    """T: how many columns every layer holds."""
    return cache.layers[0].keys.shape[2] if cache.layers else 0


def shapes(cache: DynamicCache) -> list[tuple[int, ...]]:
    """[kv heads, head dim] of every layer: what two caches must share to be concatenated."""
    return [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers]


def bytes_per_token(model) -> int:
    """What one more token of one request costs in the cache: keys and values of all layers.

    Measured on the model rather than computed from its config, so that grouped-query attention counts.
    """
    from .models import run_model

    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = new()
    run_model(model, input_ids=one, attention_mask=torch.ones_like(one), past_key_values=cache, use_cache=True)
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
