"""Compute the attention of all sequences of an iteration in one call, through the sequences' block tables."""

from ctypes import Structure, addressof, c_float, c_int, c_long, c_void_p

import torch

from .compiled import DTYPES, address, function

ARGUMENTS = (c_void_p, c_long, c_long, c_void_p, c_void_p, c_long, c_void_p, *(c_int,) * 4, c_float, c_void_p, c_int)
MAX_HEAD_DIM = 512  # as in paged_attention.cpp
NO_WINDOW = 2**31 - 1


class Description(Structure):
    """The addresses of a `Segments`' numbers, as shares.h describes them."""

    _fields_ = (
        *((name, c_void_p) for name in ("columns", "tokens", "lengths", "block_tables")),
        *((name, c_int) for name in ("sequences", "table_size", "block_size")),
    )


class Cache(Structure):
    """The keys or values of a layer, as shares.h describes them. It does not keep the tensors."""

    _fields_ = (("numbers", c_void_p), ("scales", c_void_p))

    @classmethod
    def from_vectors(cls, vectors) -> "Cache":
        """Describe a contiguous tensor [kv heads, slots, head dim], or a `QuantizedVectors` in its place."""
        return cls(address(getattr(vectors, "integers", vectors)), address(getattr(vectors, "scales", None)))


class Segments:
    """The columns of a row that belong to each of its sequences, and the sequences' keys.

    Args:
        columns: the first column of each sequence.
        tokens: the number of its columns: 1 for a decode.
        lengths: the number of its keys, those of its columns included.
        tables: its block table.
        block_size: tokens per block.
    """

    def __init__(
        self, columns: list[int], tokens: list[int], lengths: list[int], tables: list[list[int]], block_size: int
    ):
        longest = max((len(table) for table in tables), default=0)
        padded = [table + [-1] * (longest - len(table)) for table in tables]  # -1: not allocated
        self._tables, self._numbers = _ints(padded).view(len(tables), longest), _ints([columns, tokens, lengths])
        addresses = (tensor.data_ptr() for tensor in (*self._numbers, self._tables))
        self.described = Description(*addresses, len(tables), longest, block_size)


def _ints(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def is_supported(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether `paged_attention` can run on a query [..., heads, T, head dim] with these keys and values."""
    one_dtype = query.dtype == keys.dtype == values.dtype and query.dtype in DTYPES
    one_dim = query.shape[-1] == keys.shape[-1] == values.shape[-1] <= MAX_HEAD_DIM and query.shape[-1] % 2 == 0
    on_cpu = query.device.type == keys.device.type == values.device.type == "cpu"
    return one_dtype and one_dim and on_cpu and query.stride(-1) == 1 and query.shape[-3] % keys.shape[-3] == 0


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segments: Segments,
    output: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> None:
    """Write the attention of the segments into their columns of `output`.

    The arguments are not checked: call `is_supported` first, and pass contiguous keys, values and output.

    Args:
        query: [heads, T, head dim], of all tokens of the forward pass.
        keys, values: [kv heads, slots, head dim], the KV cache of one layer; tensors, or `QuantizedVectors`.
        output: [T, heads, head dim].
        scale: the factor of the scores.
        window: the most keys that a query attends to, its own included; None for all.
    """
    (kv_heads, slots, dim), threads = keys.shape, torch.get_num_threads()
    described = Cache.from_vectors(keys), Cache.from_vectors(values)
    pointers = query.data_ptr(), query.stride(0), query.stride(1), *map(addressof, described), slots
    sizes = query.shape[0], kv_heads, dim, NO_WINDOW if window is None else window
    function("paged_attention", query.dtype, ARGUMENTS)(
        *pointers, addressof(segments.described), *sizes, scale, output.data_ptr(), threads
    )
