"""Multiply a few rows by a weight: by a copy in the order in which `linear.cpp` reads it, or by the layer's own."""

from ctypes import Structure, c_int, c_long, c_void_p
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from . import huge_pages
from .compiled import address, function, library

ARGUMENTS = (c_void_p,) * 4 + (c_long,) * 3 + (c_int,)
UNPACKED_ARGUMENTS = (c_void_p,) * 4 + (c_long,) * 5 + (c_int,) * 2
LINE = 64  # bytes
INPUTS_PER_WORD = {torch.float32: 1, torch.bfloat16: 2}  # a word has 32 bits


class Linear(Structure):
    """A linear layer, as shares.h describes it. It does not keep the tensors."""

    _fields_ = (
        *(("weight", c_void_p), ("bias", c_void_p), ("inputs", c_long), ("outputs", c_long)),
        *(("scales", c_void_p), ("groups", c_long), ("bits", c_int), ("scale_bytes", c_int), ("rounds", c_int)),
    )


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] in the order in which `linear` reads it.

    Attributes:
        panels: float32 [panels, in, columns] or bfloat16 [panels, in / 2, columns, 2], padded with zeros.
    """

    panels: torch.Tensor
    inputs: int
    outputs: int
    rounds = False  # its inputs stay floats, unlike those of some `QuantizedWeight`s

    def describe(self, bias: torch.Tensor | None) -> Linear:
        """Describe a layer with this weight, whose number of inputs must be even."""
        return Linear(address(self.panels), address(bias), self.inputs, self.outputs)


def pack(weight: torch.Tensor) -> PackedWeight:
    """Copy a weight [out, in] (with any strides) into huge pages, in the order in which `linear` reads it."""
    columns, per_word = library().panel_columns(), INPUTS_PER_WORD[weight.dtype]
    outputs, inputs = weight.shape
    padded = pad(weight.detach(), (0, -inputs % per_word, 0, -outputs % columns))
    panels = padded.view(-1, columns, padded.shape[1] // per_word, per_word).transpose(1, 2).squeeze(-1)
    return PackedWeight(huge_pages.empty(panels.shape, weight.dtype).copy_(panels), inputs, outputs)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [..., in] by a packed weight, add bias [out] and return [..., out]. No gradients are recorded.

    Raises:
        ValueError: the dtype, device or size of x or bias does not match the weight.
    """
    panels, inputs, outputs = weight
    check_arguments(x, bias, panels.dtype, inputs, outputs)
    if padding := -inputs % INPUTS_PER_WORD[panels.dtype]:
        x, inputs = pad(x, (0, padding)), inputs + padding
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y, rows, threads = x.new_empty(*x.shape[:-1], outputs), x.numel() // inputs, torch.get_num_threads()
    pointers = x.data_ptr(), panels.data_ptr(), address(bias), y.data_ptr()
    function("linear", x.dtype, ARGUMENTS)(*pointers, rows, inputs, outputs, threads)
    return y


def unpacked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [..., in] by a weight [out, in], add bias [out] and return [..., out]. No gradients are recorded.

    The weight is read where it is if its inputs or its outputs are neighbors in memory: `nn.Linear` stores it as
    [out, in], and the transposed view of a `Conv1D`'s weight is stored as [in, out]. Otherwise each call copies it.

    Raises:
        ValueError: the dtype, device or size of x or bias does not match the weight.
    """
    outputs, inputs = weight.shape
    check_arguments(x, bias, weight.dtype, inputs, outputs)
    if not x.numel() or not outputs:  # no products: the bias is what is left
        y = x.new_zeros(*x.shape[:-1], outputs)
        return y if bias is None else y + bias
    if 1 not in weight.stride():
        weight = weight.contiguous()
    by_input = weight.stride(1) != 1
    rows, row = x.numel() // inputs, inputs
    if rows > 1 and not by_input:  # rows that begin 4 KB apart would evict each other from the L1 cache
        row = (-(-inputs * x.itemsize // LINE) | 1) * LINE // x.itemsize
        x = pad(x, (0, row - inputs))
    x, bias, y = x.contiguous(), None if bias is None else bias.contiguous(), x.new_empty(*x.shape[:-1], outputs)
    pointers = x.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr()
    sizes = rows, inputs, outputs, row, weight.stride(int(by_input))
    function("unpacked_linear", x.dtype, UNPACKED_ARGUMENTS)(*pointers, *sizes, by_input, torch.get_num_threads())
    return y


def check_arguments(x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Raise a ValueError if x or bias does not match a weight of this dtype and size on the CPU."""
    for tensor in (x,) if bias is None else (x, bias):
        if tensor.dtype is not dtype or not tensor.is_cpu:
            raise ValueError(
                f"The weight is {dtype} on the CPU, but an argument is {tensor.dtype} on {tensor.device}: "
                f"move x and bias to the weight's dtype and device."
            )
    if x.shape[-1] != inputs:
        raise ValueError(f"The weight has {inputs} inputs, but x has {x.shape[-1]}: pass x of shape [..., {inputs}].")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(
            f"The bias has shape {list(bias.shape)}, but the layer has {outputs} outputs: pass a bias of [{outputs}]."
        )
