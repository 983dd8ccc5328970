"""Compute all blocks of GPT-2 for a few decodes in one call: many operations are faster than a call of their own."""

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_float, c_int, c_long, c_void_p

import torch

from .compiled import address, function
from .paged_attention import Segments

ARGUMENTS = (c_void_p, c_long, c_long, *(c_void_p,) * 3, *(c_long,) * 6, *(c_void_p,) * 3, c_int)


class GPT2Block(Structure):
    """The addresses of a block's numbers, in the order of gpt2.cpp. It does not keep the tensors."""

    _fields_ = (
        ("layers", c_void_p * 12),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("eps", c_float * 2),
        ("scale", c_float),
    )


def gpt2_block(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    cache: tuple[torch.Tensor, torch.Tensor],
    eps: tuple[float, float],
    scale: float,
) -> GPT2Block:
    """Describe a block to `gpt2_blocks`. The caller keeps the tensors, which are contiguous.

    Args:
        layers: weight and bias of ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc and mlp.c_proj. The weight of a linear
            layer is the panels of its `PackedWeight`.
        cache: the keys and values of the layer, [heads, slots, head dim] each.
        eps: the numbers that the norms add to the variance.
        scale: the factor of the scores of attention.
    """
    addresses = [address(tensor) for layer in layers for tensor in layer]
    return GPT2Block((c_void_p * 12)(*addresses), *map(address, cache), (c_float * 2)(*eps), scale)


def gpt2_blocks(
    blocks: Array[GPT2Block],
    hidden: torch.Tensor,
    slots: torch.Tensor,
    segments: Segments,
    num_slots: int,
    inner: int,
    heads: int,
) -> torch.Tensor:
    """Add the updates of all blocks but the last to the hidden states in place; return the last update [rows, size].

    The arguments are not checked. No gradients are recorded.

    Args:
        blocks: in their order.
        hidden: [rows, size], a decode in each row.
        slots: int64 [rows], to which the rows' keys and values are written.
        segments: those of the rows, one token each.
        num_slots: the slots of the KV cache.
        inner: the size between the two layers of the MLP.
        heads: the number of heads.
    """
    (rows, size), threads = hidden.shape, torch.get_num_threads()
    update, buffers = torch.empty_like(hidden), hidden.new_empty(rows * (4 * size + inner + 2 * size * threads))
    cache = slots.data_ptr(), segments.addresses()[2], segments.tables.data_ptr(), segments.tables.shape[1]
    sizes = segments.block_size, num_slots, size, inner, heads
    pointers = hidden.data_ptr(), update.data_ptr(), buffers.data_ptr()
    function("gpt2", hidden.dtype, ARGUMENTS)(addressof(blocks), len(blocks), rows, *cache, *sizes, *pointers, threads)
    return update
