"""Multiply a few rows by a weight of integers that `quantized.cpp` converts to floats in registers."""

from ctypes import c_int, c_long, c_void_p

import torch
from torch.nn.functional import pad

from .compiled import DTYPES, address, function, library

ARGUMENTS = (c_void_p,) * 6 + (c_long,) * 4 + (c_int,) * 3


def quantized_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, bits: int, outputs: int
) -> torch.Tensor:
    """Multiply x [..., in] by a quantized weight, add bias [out] and return [..., out]. No gradients are recorded.

    `helpers/models/quantization.py` describes the order of the integers.

    Args:
        x: float32 or bfloat16.
        words: int32 [panels, in * bits / 32, 32], where `in` may be padded.
        scales: [panels, groups, 32], float32, or bfloat16 for 4 bits.
        bias: [out], in the dtype of x, or None.

    Raises:
        ValueError: a tensor is not on the CPU, or the dtype or size of x or bias does not match.
    """
    inputs = words.shape[1] * 32 // bits
    if x.dtype not in DTYPES or not (x.is_cpu and words.is_cpu and scales.is_cpu):
        raise ValueError(
            f"x is {x.dtype} on {x.device}: the kernel needs float32 or bfloat16, and all tensors on the CPU."
        )
    if x.shape[-1] > inputs:
        raise ValueError(f"The weight has {inputs} inputs, but x has {x.shape[-1]}: pass x of shape [..., {inputs}].")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype is not x.dtype):
        raise ValueError(
            f"The bias is {bias.dtype} {list(bias.shape)}: pass a bias of [{outputs}] in the dtype of x, {x.dtype}."
        )
    if x.shape[-1] < inputs:
        x = pad(x, (0, inputs - x.shape[-1]))
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    y, rows, threads = x.new_empty(*x.shape[:-1], outputs), x.numel() // inputs, torch.get_num_threads()
    buffers = x.new_empty(threads * inputs * words.shape[2] if rows > library().rows_without_buffer() else 0)
    pointers = [address(tensor) for tensor in (x, words, scales, bias, y, buffers)]
    sizes = rows, inputs, outputs, scales.shape[1], bits, scales.itemsize
    function("quantized_linear", x.dtype, ARGUMENTS)(*pointers, *sizes, threads)
    return y
