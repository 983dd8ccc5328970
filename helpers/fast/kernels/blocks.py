"""Compute all blocks of a decoder in one call: many operations are faster than a call of their own."""

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int, c_long, c_void_p

import torch

from .compiled import address, function
from .linear import Linear
from .paged_attention import Cache, Segments
from .quantized import panel_buffers, rounding_buffers

ARGUMENTS = (c_void_p, c_long, *(c_void_p,) * 10, c_int)


class Norm(Structure):
    """A norm, as shares.h describes it; the weight and the bias are addresses."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int))

    @classmethod
    def from_tensors(cls, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: int) -> "Norm":
        """Describe a norm; `kind` is one of elementwise.py's."""
        return cls(address(weight), address(bias), eps, kind)


NORMS = ("attention_norm", "query_norm", "key_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")


class Block(Structure):
    """The parts of a block and where its keys and values are, as in blocks.cpp. It does not keep the tensors.

    Parts that are not set are missing: norms of queries, keys and updates; the last layers of `qkv` and `mlp_inputs`.
    """

    _fields_ = (
        *((name, Norm) for name in NORMS),
        ("qkv", Linear * 3),
        ("attention_output", Linear),
        ("mlp_inputs", Linear * 2),
        ("mlp_output", Linear),
        ("keys", Cache),
        ("values", Cache),
        ("scale", c_float),
        ("window", c_int),
        ("rotation", c_int),
    )


class LowRankPair(Structure):
    """An adapter's matrices for a linear layer, as shares.h describes them. It does not keep the tensors."""

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("rank", c_long))

    @classmethod
    def from_matrices(cls, a: torch.Tensor, b: torch.Tensor) -> "LowRankPair":
        """Describe contiguous matrices a [rank, inputs] and b [rank, outputs]."""
        return cls(address(a), address(b), len(a))


class AdaptedBlock(Structure):
    """An adapter's matrices for the linear layers of a `Block`. A layer that is not set stays as it is."""

    _fields_ = (
        ("qkv", LowRankPair * 3),
        ("attention_output", LowRankPair),
        ("mlp_inputs", LowRankPair * 2),
        ("mlp_output", LowRankPair),
    )


class AdaptedRows(Structure):
    """Neighboring rows with one adapter: its blocks, the first row, the row after the last, and the largest rank."""

    _fields_ = (("blocks", c_void_p), ("begin", c_long), ("end", c_long), ("rank", c_long))


class Adapters(Structure):
    """The rows of a pass that have adapters, in their order, as in blocks.cpp. `rank` is the largest one."""

    _fields_ = (("runs", c_void_p), ("num_runs", c_long), ("inner", c_void_p), ("rank", c_long))


class IntegerBuffers(Structure):
    """Buffers for products of integers, as in blocks.cpp; `inputs` are the most of a layer."""

    _fields_ = (("inputs", c_long), ("integers", c_void_p), ("rounded", c_void_p), ("panels", c_void_p))


class Sizes(Structure):
    """What the blocks of a decoder have in common.

    `size` is that of the hidden states, `inner` that of the MLP's activations, and `rotated` how many numbers of a head
    are rotated by its position. In `parallel` blocks, the MLP reads the hidden states without attention's update. Heads
    are `interleaved` if the query, key and value of a head are neighbors.
    """

    _fields_ = (
        *((name, c_long) for name in ("rows", "size", "inner", "heads", "kv_heads", "dim", "rotated", "slots")),
        *((name, c_int) for name in ("activation", "gated", "parallel", "interleaved")),
    )


def compute_blocks(
    blocks: Array[Block],
    sizes: Sizes,
    hidden: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    slots: torch.Tensor,
    segments: Segments,
    adapted: Sequence[AdaptedRows] = (),
) -> torch.Tensor:
    """Add the updates of all blocks but the last to the hidden states in place; return the last update [rows, size].

    The arguments are not checked: all tensors are contiguous and of one dtype. No gradients are recorded.

    Args:
        blocks: in their order.
        sizes: those of the blocks; the number of rows is set here.
        hidden: [rows, size].
        rotary: cos and sin of the rows' positions, [rotations, rows, rotated] each, if positions are rotary. A block
            has one of these rotations.
        slots: int64 [rows], to which the rows' keys and values are written.
        segments: those of the rows.
        adapted: the rows that have adapters, in their order.
    """
    rows, threads = len(hidden), torch.get_num_threads()
    sizes.rows = rows
    heads = 2 * (sizes.heads + sizes.kv_heads) * sizes.dim
    buffers = hidden.new_empty(rows * (heads + 3 * sizes.inner + 2 * sizes.size * threads))
    (cos, sin), update = rotary or (None, None), torch.empty_like(hidden)
    runs, rank = (AdaptedRows * len(adapted))(*adapted), max((run.rank for run in adapted), default=0)
    inner = hidden.new_empty(3 * rows * rank, dtype=torch.float32)
    adapters = Adapters(addressof(runs), len(adapted), address(inner), rank)
    most_inputs, kept = max(sizes.size, sizes.heads * sizes.dim, sizes.inner), []
    if blocks[0].mlp_output.scales:
        kept = [*rounding_buffers(rows, most_inputs, threads), panel_buffers(rows, most_inputs, hidden.dtype)]
    integers = IntegerBuffers(most_inputs, *map(address, kept))
    tensors = [address(tensor) for tensor in (slots, cos, sin, hidden, update, buffers)]
    described = (addressof(structure) for structure in (sizes, segments.described, adapters, integers))
    function("blocks", hidden.dtype, ARGUMENTS)(addressof(blocks), len(blocks), *described, *tensors, threads)
    return update
