"""Describe the adapters of a pass for the one call that computes all blocks (`kernels/blocks.cpp`).

An adapter's table has the addresses of its matrices for each layer. Making one takes longer than a pass, so it is kept
while the adapter exists.
"""

from collections.abc import Iterable, Mapping, Sequence
from ctypes import Array, addressof
from itertools import groupby
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import kernels
from .decoder_blocks import Decoder


class Adapter(Protocol):
    """An adapter, whose matrices do not change.

    Attributes:
        matrices: by the path of each layer that it changes, tensors `a` [rank, inputs] and `b` [rank, outputs]: inputs
            x add x @ a.T @ b to the outputs.
    """

    matrices: Mapping[str, Any]


class AdapterTables:
    """The tables of adapters of a model.

    Args:
        decoder: the modules.
        dtype: the numbers that the kernel reads.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype):
        self._decoder, self._dtype = decoder, dtype
        self._tables: WeakKeyDictionary[Adapter, tuple[Array | None, int]] = WeakKeyDictionary()

    def rows_of(self, chunks: Sequence[tuple[Adapter | None, int]]) -> list[kernels.AdaptedRows] | None:
        """Describe the rows of a pass that have adapters; return None if the kernel cannot read an adapter.

        The adapters must not be freed before the call ends.

        Args:
            chunks: the adapter and the tokens of each chunk, in the order of the rows.
        """
        adapted, row = [], 0
        for adapter, group in groupby(chunks, key=lambda chunk: chunk[0]):
            begin, row = row, row + sum(tokens for _, tokens in group)
            if adapter is None:
                continue
            if adapter not in self._tables:
                self._tables[adapter] = self._table(adapter.matrices)
            blocks, rank = self._tables[adapter]
            if blocks is None:
                return None
            adapted.append(kernels.AdaptedRows(addressof(blocks), begin, row, rank))
        return adapted

    def _table(self, matrices: Mapping[str, Any]) -> tuple[Array | None, int]:
        """Return an adapter's matrices, if the kernel can read all of them, and its largest rank."""
        paths, blocks = self._decoder.paths, self._decoder.blocks
        tensors = [tensor for pair in matrices.values() for tensor in (pair.a, pair.b)]
        if not matrices.keys() <= set(paths.values()) or not all(map(self._can_read, tensors)):
            return None, 0

        def low_rank(*modules: nn.Module) -> Iterable[kernels.LowRank]:
            for pair in (matrices.get(paths[module]) for module in modules):
                yield kernels.LowRank() if pair is None else kernels.LowRank.of(pair.a, pair.b)

        table = (kernels.AdaptedBlock * len(blocks))()
        for adapted, block in zip(table, blocks, strict=True):
            adapted.qkv = (kernels.LowRank * 3)(*low_rank(*block.qkv))
            (adapted.attention_output,) = low_rank(block.attention_output)
            adapted.mlp_inputs = (kernels.LowRank * 2)(*low_rank(*block.mlp_inputs))
            (adapted.mlp_output,) = low_rank(block.mlp_output)
        return table, max(len(pair.a) for pair in matrices.values())

    def _can_read(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is self._dtype and tensor.is_cpu and tensor.is_contiguous()
