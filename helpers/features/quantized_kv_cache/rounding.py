"""Rounding of keys and values, and the reference for an engine that stores them rounded."""

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ...models.quantization import FORMATS, round_to_integers


def quantize_vectors(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers, int8 [..., head dim], and scales, float32 [...], of keys or values [..., head dim].

    The scale maps the largest magnitude of a vector to 127, and halves are rounded to even integers. A vector with NaN
    or an infinite number becomes NaN, as the attention to it would; other vectors stay unaffected.
    """
    integers, scales = round_to_integers(vectors.flatten(0, -2), FORMATS["int8"])
    return integers.view(vectors.shape), scales.view(vectors.shape[:-1])


def dequantize_vectors(integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rounded vectors [..., head dim]: integers times scales, in this dtype."""
    return (integers * scales[..., None]).to(dtype)


def rounded(vectors: torch.Tensor) -> torch.Tensor:
    """Return the vectors that a quantized KV cache holds in place of these."""
    return dequantize_vectors(*quantize_vectors(vectors), vectors.dtype)


class RoundedLayer(DynamicLayer):
    """A layer of transformers' cache that rounds the keys and values [B, kv heads, T, head dim] that are added."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


class RoundedKVCache(DynamicCache):
    """An empty transformers cache that rounds what is added: the reference for `EngineConfig(kv_cache="int8")`.

    In float32, and except for near ties, the engine generates the tokens of
    `model.generate(..., past_key_values=RoundedKVCache())`. Rounding magnifies tiny differences: a number that lies
    between two integers may become either.
    """

    def __init__(self):
        super().__init__()
        self.layer_class_to_replicate = RoundedLayer
