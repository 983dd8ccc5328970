"""Compute the attention of all decodes of an iteration in one call, through the sequences' block tables."""

import functools
from ctypes import c_float, c_int, c_long, c_void_p

import torch

from .compiled import DTYPES, library

MAX_HEAD_DIM = 512  # as in paged_attention.cpp


class Decodes:
    """The decodes of an iteration: the sequences that compute one new token each.

    Args:
        columns: the column of each sequence's new token in the row of the forward pass.
        lengths: the number of keys of each sequence, the new one included.
        tables: the block table of each sequence.
        block_size: tokens per block.
    """

    def __init__(self, columns: list[int], lengths: list[int], tables: list[list[int]], block_size: int):
        longest = max(len(table) for table in tables)
        self.tables = _ints([table + [-1] * (longest - len(table)) for table in tables])  # -1: not allocated
        self.columns, self.lengths, self.block_size = _ints(columns), _ints(lengths), block_size
        self._firsts = {None: torch.zeros_like(self.lengths)}

    def firsts(self, window: int | None) -> torch.Tensor:
        """Return the index of the first key that each sequence attends to, int32 [sequences]; 0 without a window."""
        if window not in self._firsts:
            self._firsts[window] = (self.lengths - window).clamp(min=0)
        return self._firsts[window]


def _ints(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def is_supported(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether `paged_attention` can run on a query [..., heads, T, head dim] with these keys and values."""
    one_dtype = query.dtype == keys.dtype == values.dtype and query.dtype in DTYPES
    one_dim = query.shape[-1] == keys.shape[-1] == values.shape[-1] <= MAX_HEAD_DIM
    on_cpu = query.device.type == keys.device.type == values.device.type == "cpu"
    return one_dtype and one_dim and on_cpu and query.stride(-1) == 1 and query.shape[-3] % keys.shape[-3] == 0


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decodes: Decodes,
    output: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> None:
    """Write the attention of the decodes into their columns of `output`.

    The arguments are not checked: call `is_supported` first, and pass contiguous keys, values and output.

    Args:
        query: [heads, T, head dim], of all tokens of the forward pass.
        keys, values: [kv heads, slots, head dim], the KV cache of one layer.
        output: [T, heads, head dim].
        scale: the factor of the scores.
        window: the most keys that a query attends to, its own included; None for all.
    """
    kv_heads, slots, dim = keys.shape
    _kernel(query.dtype)(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        keys.data_ptr(),
        values.data_ptr(),
        decodes.columns.data_ptr(),
        decodes.firsts(window).data_ptr(),
        decodes.lengths.data_ptr(),
        decodes.tables.data_ptr(),
        *decodes.tables.shape,
        query.shape[0],
        kv_heads,
        dim,
        slots,
        decodes.block_size,
        scale,
        output.data_ptr(),
        torch.get_num_threads(),
    )


@functools.cache
def _kernel(dtype: torch.dtype):
    kernel = getattr(library(), f"paged_attention_{DTYPES[dtype]}")
    pointers, sizes = [c_void_p] * 6, [c_int] * 5
    kernel.argtypes = [c_void_p, c_long, c_long, *pointers, *sizes, c_long, c_int, c_float, c_void_p, c_int]
    kernel.restype = None
    return kernel
