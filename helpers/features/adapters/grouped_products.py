"""The two small products of every row's own adapter, for all rows of an adapter at once.

A pass has rows of several adapters, in any order. They are grouped: a batched product multiplies the rows of the first
adapter by its matrices, those of the second by its own, and so on, in two calls for all adapters together. For that,
the matrices of the adapters lie one after the other in two tensors per layer, in *slots*. Groups have the same number
of rows, so shorter ones are padded. A long chunk of a prompt would pad all other groups to its length; it is computed
by itself, and its rows are neighbors anyway.
"""

from collections.abc import Sequence as Seq

import torch

from .peft_folder import LayerInfo, LowRank

LONG = 8  # tokens: chunks with more are computed by themselves


class RowGroups:
    """The rows of a pass, grouped by the slots of their adapters.

    Args:
        chunks: (slot, tokens) of each chunk, in the order of the rows; the slot is None without an adapter.
        rank: the largest rank of their adapters.
        device: where the indices are kept.

    Attributes:
        rank: see above.
        slots: those that occur.
        num_rows: of the pass.
        long_chunks: (slot, first row, row after the last) of long chunks.
        num_groups: how many slots the grouped product multiplies by: all up to the last one that occurs.
        gathered: int64 [num_groups * rows per group], the rows in the order of their groups, padding included; None
            without such rows.
        kept: int64, the places in `gathered` that are no padding; None for all.
        scattered: int64, the rows of these places.
    """

    def __init__(self, chunks: Seq[tuple[int | None, int]], rank: int, device):
        self.rank = rank
        self.slots = {slot for slot, _ in chunks if slot is not None}
        self.long_chunks: list[tuple[int, int, int]] = []
        groups: dict[int, list[int]] = {}
        row = 0
        for slot, tokens in chunks:
            if slot is not None and tokens > LONG:
                self.long_chunks.append((slot, row, row + tokens))
            elif slot is not None:
                groups.setdefault(slot, []).extend(range(row, row + tokens))
            row += tokens
        self.num_rows = row
        self.num_groups, self.gathered, self.kept, self.scattered = max(groups, default=-1) + 1, None, None, None
        if groups:
            size = max(map(len, groups.values()))
            rows = [groups.get(slot, []) for slot in range(self.num_groups)]
            padded = [own + [0] * (size - len(own)) for own in rows]
            self.gathered = torch.tensor(padded, device=device).flatten()
            kept = [slot * size + index for slot, own in enumerate(rows) for index in range(len(own))]
            if len(kept) < len(self.gathered):
                self.kept = torch.tensor(kept, device=device)
            self.scattered = self.gathered if self.kept is None else self.gathered[self.kept]


class AdapterStack:
    """The matrices of several adapters for one layer, one slot each.

    Args:
        layer: the layer's dtype, device, and numbers of inputs and outputs.
        slots: how many adapters there is room for.
        rank: the largest rank of any adapter.

    Attributes:
        filled: the slots whose adapters change this layer.
    """

    def __init__(self, layer: LayerInfo, slots: int, rank: int):
        make = {"dtype": layer.dtype, "device": layer.device}
        self.a = torch.zeros(slots, rank, layer.inputs, **make)
        self.b = torch.zeros(slots, rank, layer.outputs, **make)
        self.filled: set[int] = set()

    def put(self, slot: int, matrices: LowRank | None) -> None:
        """Fill a slot with an adapter's matrices for this layer, or empty it if there are none."""
        self.filled.discard(slot)
        self.a[slot], self.b[slot] = 0, 0
        if matrices is not None:
            rank = len(matrices.a)
            self.a[slot, :rank], self.b[slot, :rank] = matrices.a, matrices.b
            self.filled.add(slot)

    def add_products(self, x: torch.Tensor, y: torch.Tensor, rows: RowGroups) -> None:
        """Add to the outputs y [rows, outputs] what the adapters make of the inputs x [rows, inputs]."""
        a, b = self.a[:, : rows.rank], self.b[:, : rows.rank]
        for slot, start, end in rows.long_chunks:
            if slot in self.filled:
                y[start:end].addmm_(x[start:end] @ a[slot].T, b[slot])
        if rows.gathered is not None:
            groups = x.index_select(0, rows.gathered).view(rows.num_groups, -1, x.shape[1])
            inner = torch.bmm(groups, a[: rows.num_groups].transpose(1, 2))
            added = torch.bmm(inner, b[: rows.num_groups]).view(-1, y.shape[1])
            y.index_add_(0, rows.scattered, added if rows.kept is None else added.index_select(0, rows.kept))
