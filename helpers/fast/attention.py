"""Attention by a compiled kernel: all sequences of a row in one call, through their block tables.

Decodes always use the kernel: PyTorch would need one call for each. Chunks use it where it is measured to be faster.
Scores with a bound or with sinks are PyTorch's.
"""

import functools
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..runners.attention import AttentionMetadata, AttentionSettings, QuerySegment
from . import kernels

TOKENS, REPEATS = 256, 5  # of the measured chunk, which takes a few milliseconds


def attend_with_kernel(
    row: AttentionMetadata,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    settings: AttentionSettings,
) -> list[QuerySegment]:
    """Compute the attention of the segments that the kernel supports, and return the others.

    Args:
        query: [heads, T, head dim].
        keys, values: [kv heads, slots, head dim].
        output: [T, heads, head dim of the values], written here.
    """
    segments = row.segments
    if settings.needs_scores or not kernels.is_supported(query, keys, values):
        return segments
    with_chunks = len(segments) == query.shape[1] or kernel_wins_chunks(query.shape[0], *keys.shape[::2], keys.dtype)
    scale = query.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling
    kernels.paged_attention(query, keys, values, kernel_segments(row, with_chunks), output, scale, settings.window)
    return [] if with_chunks else [segment for segment in segments if segment.tokens > 1]


def kernel_segments(row: AttentionMetadata, with_chunks: bool) -> kernels.Segments:
    """Return the segments that the kernel computes, all or only the decodes; made once for all layers."""
    if with_chunks not in row.notes:
        chosen = [segment for segment in row.segments if with_chunks or segment.tokens == 1]
        row.notes[with_chunks] = kernels.Segments(
            [segment.start for segment in chosen],
            [segment.tokens for segment in chosen],
            [segment.past + segment.tokens for segment in chosen],
            [segment.block_table for segment in chosen],
            row.pool.block_size,
        )
    return row.notes[with_chunks]


def kernel_wins_chunks(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel computes chunks faster than PyTorch, for these sizes."""
    return _measure(heads, kv_heads, dim, dtype, torch.get_num_threads())


@functools.cache
def _measure(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, _threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(n, TOKENS, dim, device="cpu", generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    segments = kernels.Segments([0], [TOKENS], [TOKENS], [list(range(TOKENS // 16))], 16)
    output = query.new_empty(TOKENS, heads, dim)

    def compiled():
        kernels.paged_attention(query, key, value, segments, output, dim**-0.5)

    def pytorch():
        scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=heads > kv_heads)

    seconds = {compiled: [], pytorch: []}
    for _ in range(1 + REPEATS):  # the first one warms up
        for function, times in seconds.items():
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return statistics.median(seconds[compiled][1:]) <= statistics.median(seconds[pytorch][1:])
