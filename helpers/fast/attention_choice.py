"""Choose by measurement whether the compiled kernel or PyTorch computes the attention of chunks.

Both make the most of one kind of processor. The kernel skips the keys behind a query, and in bfloat16 it uses AVX-512's
products. PyTorch computes all pairs, and has products for matrix units (AMX). Decodes always use the kernel: PyTorch
would need one call for each.
"""

import functools
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import kernels

TOKENS, REPEATS = 256, 5  # of the measured chunk, which takes a few milliseconds


def kernel_wins_chunks(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Return whether the kernel computes chunks faster than PyTorch, for heads as in query and keys [heads, ...]."""
    return kernel_wins(query.shape[0], keys.shape[0], keys.shape[2], keys.dtype)


def kernel_wins(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
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
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cpu").tril()

    def compiled():
        kernels.paged_attention(query, key, value, segments, output, dim**-0.5)

    def pytorch():
        scaled_dot_product_attention(query[None], key[None], value[None], mask, enable_gqa=heads > kv_heads)

    seconds = {compiled: [], pytorch: []}
    for _ in range(1 + REPEATS):  # the first one warms up
        for function, times in seconds.items():
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return statistics.median(seconds[compiled][1:]) <= statistics.median(seconds[pytorch][1:])
