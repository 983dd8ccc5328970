"""Multiply a few rows by a weight in the order in which its layer stores it, without a copy of the weight."""

from ctypes import c_int, c_long, c_void_p

import torch
from torch.nn.functional import pad

from .compiled import address, function
from .linear import check_arguments

ARGUMENTS = (c_void_p,) * 4 + (c_long,) * 5 + (c_int,) * 2
LINE = 64  # bytes


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
    function("unpacked_linear", x.dtype, ARGUMENTS)(*pointers, *sizes, by_input, torch.get_num_threads())
    return y
