"""Describe the adapters of a pass for the one call that computes all blocks (`kernels/blocks.cpp`).

An adapter's table holds a copy of its matrices in huge pages. 16 adapters that change all layers of SmolLM2-135M have
6,700 matrices, and a pass took half as long again to read them from ordinary pages. Making a table takes longer than a
pass, so it is kept while the adapter exists.
"""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import addressof
from itertools import groupby
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from . import kernels
from .decoder_blocks import Decoder
from .kernels.huge_pages import HugePages


class LowRankAdapter(Protocol):
    """An adapter, whose matrices do not change.

    Attributes:
        matrices: by the path of each layer that it changes, tensors `a` [rank, inputs] and `b` [rank, outputs]: the
            layer adds x @ a.T @ b to its outputs for inputs x.
    """

    matrices: Mapping[str, Any]


class AdapterTables:
    """The tables of a model's adapters.

    Args:
        decoder: the modules.
        dtype: of the numbers that the kernel reads.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype):
        self._decoder, self._dtype = decoder, dtype
        self._tables: WeakKeyDictionary[LowRankAdapter, _Table] = WeakKeyDictionary()

    def rows_of(self, chunks: Sequence[tuple[LowRankAdapter | None, int]], num_rows: int) -> list[kernels.AdaptedRows]:
        """Describe the rows of a pass that have adapters. The adapters must exist until the call ends.

        Args:
            chunks: the adapter and the number of tokens of each chunk, in the order of the rows.
            num_rows: of the pass.

        Raises:
            RuntimeError: the chunks have another number of tokens, so the kernel would write beyond the rows.
        """
        adapted, row = [], 0
        for adapter, group in groupby(chunks, key=lambda chunk: chunk[0]):
            begin, row = row, row + sum(tokens for _, tokens in group)
            if adapter is not None:
                if adapter not in self._tables:
                    self._tables[adapter] = _Table(self._decoder, self._dtype, adapter.matrices)
                table = self._tables[adapter]
                adapted.append(kernels.AdaptedRows(addressof(table.blocks), begin, row, table.rank))
        if row != num_rows:
            raise RuntimeError(f"The pass has {num_rows} rows, but the chunks of its adapters have {row}.")
        return adapted


class _Table:
    """An adapter's matrices as the kernel reads them.

    Attributes:
        blocks: where those of each block are.
        rank: the largest one.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype, matrices: Mapping[str, Any]):
        if unknown := matrices.keys() - set(decoder.paths.values()):
            raise ValueError(f"The adapter changes {min(unknown)}, which is not in a decoder block.")
        self.rank = max(len(pair.a) for pair in matrices.values())
        self._copies: list[torch.Tensor] = []
        pages = HugePages()  # of its own, so that they are freed with the adapter

        def copied(matrix: torch.Tensor) -> torch.Tensor:
            self._copies.append(pages.empty(matrix.shape, dtype).copy_(matrix))
            return self._copies[-1]

        def low_rank(*layers: nn.Module) -> Iterator[kernels.LowRankPair]:
            for pair in (matrices.get(decoder.paths[layer]) for layer in layers):
                copies = () if pair is None else (copied(pair.a), copied(pair.b))
                yield kernels.LowRankPair.from_matrices(*copies) if copies else kernels.LowRankPair()

        self.blocks = (kernels.AdaptedBlock * len(decoder.blocks))()
        for adapted, block in zip(self.blocks, decoder.blocks, strict=True):
            adapted.qkv = (kernels.LowRankPair * 3)(*low_rank(*block.qkv))
            (adapted.attention_output,) = low_rank(block.attention_output)
            adapted.mlp_inputs = (kernels.LowRankPair * 2)(*low_rank(*block.mlp_inputs))
            (adapted.mlp_output,) = low_rank(block.mlp_output)
