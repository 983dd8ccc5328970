"""Attention by a compiled kernel: all sequences of a row in one call, through their block tables.

Decodes always use the kernel: PyTorch would need one call for each. Chunks use it where it is measured to be faster
(`attention_choice.py`). Scores with a bound or with sinks are PyTorch's.
"""

import torch

from ..runners.attention import AttentionMetadata, AttentionSettings, QuerySegment
from . import kernels
from .attention_choice import kernel_wins_chunks


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
    segments, plain = row.segments, settings.softcap is None and settings.sinks is None
    if not (plain and kernels.is_supported(query, keys, values)):
        return segments
    with_chunks = len(segments) == query.shape[1] or kernel_wins_chunks(query, keys)
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
