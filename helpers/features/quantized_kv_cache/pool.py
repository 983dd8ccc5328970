"""The tensors behind the blocks of a quantized KV cache."""

import copy
from collections.abc import Iterator

import torch

from ... import kv_cache
from ...engine import EngineConfig
from ...runners import PaddedRunner, RaggedRunner
from ...runners.kv_pool import KVPool
from ...runners.ragged_or_padded import num_blocks
from ...runners.trial import BLOCK_SIZE, NUM_BLOCKS, trial_passes
from .rounding import RoundedKVCache, dequantize_vectors, quantize_vectors


class QuantizedVectors:
    """The keys or values of a layer, in place of a tensor [kv heads, slots, head dim]; an index gives rounded vectors.

    Attributes:
        integers: int8 [kv heads, slots, head dim].
        scales: float32 [kv heads, slots].
        dtype, device, shape: of the vectors.
    """

    def __init__(self, kv_heads: int, slots: int, dim: int, like: torch.Tensor):
        self.shape, self.dtype, self.device = torch.Size((kv_heads, slots, dim)), like.dtype, like.device
        self.integers = like.new_zeros(kv_heads, slots, dim, dtype=torch.int8)
        self.scales = like.new_zeros(kv_heads, slots, dtype=torch.float32)

    def __getitem__(self, index) -> torch.Tensor:
        return dequantize_vectors(self.integers[index], self.scales[index], self.dtype)

    def index_copy_(self, dim: int, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Round and store vectors [kv heads, T, head dim] in their slots [T]."""
        for stored, new in zip((self.integers, self.scales), quantize_vectors(vectors), strict=True):
            stored.index_copy_(dim, slots, new)


class QuantizedKVPool(KVPool):
    """The keys and values of all sequences, rounded; arguments are those of `KVPool`."""

    def allocate(self, like: torch.Tensor) -> QuantizedVectors:
        return QuantizedVectors(like.shape[0], self.num_slots, like.shape[2], like)

    def tensors(self) -> Iterator[torch.Tensor]:
        for vectors in super().tensors():
            yield from (vectors.integers, vectors.scales)


def quantize_kv_cache(runner: PaddedRunner | RaggedRunner, model, config: EngineConfig) -> None:
    """Give a new ragged runner a quantized KV cache, with more blocks where their number follows from their bytes.

    Raises:
        ValueError: the model runs padded, or it caches other vectors than its attention reads.
    """
    if runner.not_ragged_because:
        raise ValueError(
            f"kv_cache={config.kv_cache!r} requires ragged execution, but {runner.not_ragged_because}. Use "
            f'kv_cache="auto".'
        )
    trial_runner = copy.copy(runner)
    trial_runner.pool, trial_runner.block_size = QuantizedKVPool(NUM_BLOCKS, BLOCK_SIZE), BLOCK_SIZE
    for _ in trial_passes(trial_runner.forward):
        pass
    _check_reference(model, trial_runner.pool)
    token_bytes = sum(tensor.nbytes for tensor in trial_runner.pool.tensors()) // trial_runner.pool.num_slots
    runner.num_blocks = num_blocks(model, config, lambda _: token_bytes)
    runner.pool = QuantizedKVPool(runner.num_blocks, runner.block_size)


def _check_reference(model, pool: QuantizedKVPool) -> None:
    """Raise a ValueError if transformers' cache holds other vectors: rounding these has other results.

    DeepSeek's latent attention caches a short vector, and computes the keys and values of all heads from it.
    """
    cache = RoundedKVCache()
    with torch.no_grad():
        model(torch.tensor([[1]], device=model.device), past_key_values=cache, use_cache=True)
    for layer, stored in enumerate(kv_cache.shapes(cache)):
        read = pool.layers[layer][0].shape[::2]
        if stored != read:
            raise ValueError(
                f"{type(model).__name__} caches keys of {stored[0]} heads of {stored[1]} numbers, and its attention "
                f'reads {read[0]} of {read[1]}: there is no reference for rounding these. Use kv_cache="auto".'
            )
