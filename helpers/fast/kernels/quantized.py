"""Multiply rows by a weight of integers, as floats (`quantized.cpp`) or as integers (`integer_linear.cpp`)."""

from ctypes import c_int, c_long, c_void_p

import torch
from torch.nn.functional import pad

from .compiled import DTYPES, address, function, library

ARGUMENTS = (c_void_p,) * 6 + (c_long,) * 4 + (c_int,) * 3
DEQUANTIZE_ARGUMENTS = (c_void_p,) * 3 + (c_long,) * 3 + (c_int,) * 3
TILE_ROWS = 32  # that the processor may read at once
INTEGER_ARGUMENTS = (c_void_p,) * 7 + (c_long,) * 3 + (c_int,)


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
    x, bias, y, inputs = _prepare(x, words, scales, bias, bits, outputs)
    rows, threads = x.numel() // inputs, torch.get_num_threads()
    buffers = x.new_empty(threads * inputs * words.shape[2] if rows > library().rows_without_buffer() else 0)
    pointers = [address(tensor) for tensor in (x, words, scales, bias, y, buffers)]
    sizes = rows, inputs, outputs, scales.shape[1], bits, scales.itemsize
    function("quantized_linear", x.dtype, ARGUMENTS)(*pointers, *sizes, threads)
    return y


def dequantize(words: torch.Tensor, scales: torch.Tensor, bits: int, outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized weight as floats, [in, out]; `in` may be padded, see `quantized_linear`."""
    inputs = words.shape[1] * 32 // bits
    weight = torch.empty(inputs, outputs, dtype=dtype)
    pointers = [address(tensor) for tensor in (words, scales, weight)]
    sizes = inputs, outputs, scales.shape[1], bits, scales.itemsize
    function("dequantize", dtype, DEQUANTIZE_ARGUMENTS)(*pointers, *sizes, torch.get_num_threads())
    return weight


def integer_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, outputs: int
) -> torch.Tensor:
    """Round each row of x [..., in] to integers and multiply them by those of a weight; otherwise `quantized_linear`.

    `helpers/models/integer_products.py` describes the product and computes the same bits.

    Args:
        words: int32 [panels, in / 4, 32], where `in` may be padded.
        scales: float32 [panels, 1, 32].
    """
    x, bias, y, inputs = _prepare(x, words, scales, bias, 8, outputs)
    rows, threads = x.numel() // inputs, torch.get_num_threads()
    integers = x.new_empty(-(-rows // TILE_ROWS) * TILE_ROWS, inputs, dtype=torch.int8)
    rounded = x.new_empty(rows, 2, dtype=torch.int32)
    pointers = [address(tensor) for tensor in (x, words, scales, bias, y, integers, rounded)]
    function("integer_linear", x.dtype, INTEGER_ARGUMENTS)(*pointers, rows, inputs, outputs, threads)
    return y


def _prepare(x, words, scales, bias, bits: int, outputs: int) -> tuple:
    """Return x with padded inputs, the bias, and an empty y, which the kernels can read and write; and the inputs."""
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
    bias = None if bias is None else bias.contiguous()
    return x.contiguous(), bias, x.new_empty(*x.shape[:-1], outputs), inputs
