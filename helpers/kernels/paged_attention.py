"""Attention of all decodes of an iteration in one call, each from the blocks of its block table."""

import functools
from ctypes import c_float, c_int, c_long, c_void_p

import torch

from .compiled import DTYPES, library

LONGEST_HEAD = 512  # LONGEST in paged_attention.cpp


class Decodes:
    """The decodes of an iteration: sequences with one new token each.

    Args:
        columns: where each one's token is in the row.
        lengths: how many keys each one has, its new one included.
        tables: their block tables.
        block_size: tokens in a block.
    """

    def __init__(self, columns: list[int], lengths: list[int], tables: list[list[int]], block_size: int):
        longest = max(len(table) for table in tables)
        self.tables = _ints([table + [-1] * (longest - len(table)) for table in tables])  # -1: not allocated
        self.columns, self.lengths, self.block_size = _ints(columns), _ints(lengths), block_size
        self._firsts = {None: torch.zeros_like(self.lengths)}

    def firsts(self, window: int | None) -> torch.Tensor:
        """The first key that each of them sees, of which it sees the last `window`."""
        if window not in self._firsts:
            self._firsts[window] = (self.lengths - window).clamp(min=0)
        return self._firsts[window]


def _ints(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `paged_attention` is made for a query [..., heads, T, head dim] and keys and values such as these."""
    one_dtype = query.dtype == keys.dtype == values.dtype and query.dtype in DTYPES
    one_dim = query.shape[-1] == keys.shape[-1] == values.shape[-1] <= LONGEST_HEAD
    on_cpu = query.device.type == keys.device.type == values.device.type == "cpu"
    return one_dtype and one_dim and on_cpu and query.stride(-1) == 1 and query.shape[-3] % keys.shape[-3] == 0


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decodes: Decodes,
    answer: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> None:
    """Write the decodes' attention into their columns of `answer`.

    Nothing is checked: ask `takes` first, and hand in contiguous keys, values and answer.

    Args:
        query: [heads, T, head dim], of all tokens of the row.
        keys, values: [kv heads, slots, head dim], a layer's store.
        answer: [T, heads, head dim].
        scale: of the scores.
        window: how many keys a query sees at most, its own included; None for all.
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
        answer.data_ptr(),
        torch.get_num_threads(),
    )


@functools.cache
def _kernel(dtype: torch.dtype):
    kernel = getattr(library(), f"paged_attention_{DTYPES[dtype]}")
    places, sizes = [c_void_p] * 6, [c_int] * 5
    kernel.argtypes = [c_void_p, c_long, c_long, *places, *sizes, c_long, c_int, c_float, c_void_p, c_int]
    kernel.restype = None
    return kernel
