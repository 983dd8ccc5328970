"""Multiply rows by a weight of integers, as floats (`quantized.cpp`) or as integers (`integer_linear.cpp`)."""

from ctypes import addressof, c_int, c_long, c_void_p
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .compiled import DTYPES, address, function, library
from .linear import Linear

ARGUMENTS = (c_void_p,) * 4 + (c_long, c_int)
DEQUANTIZE_ARGUMENTS = (c_void_p,) * 3 + (c_long,) * 3 + (c_int,) * 3
INTEGER_ARGUMENTS = (c_void_p,) * 5 + (c_long, c_int)


class QuantizedWeight(NamedTuple):
    """A weight of integers; `helpers/models/quantization.py` describes their order.

    Attributes:
        words: int32 [panels, in * bits / 32, 32], where `in` may be padded.
        scales: [panels, groups, 32], float32, or bfloat16 for 4 bits.
        rounds: whether inputs are rounded to integers, too: then it has 8 bits and a single group.
    """

    words: torch.Tensor
    scales: torch.Tensor
    bits: int
    outputs: int
    rounds: bool = False

    @property
    def inputs(self) -> int:
        """The number of inputs, with padding."""
        return self.words.shape[1] * 32 // self.bits

    def describe(self, bias: torch.Tensor | None) -> Linear:
        """Describe a layer with this weight."""
        scales, sizes = self.scales, (self.inputs, self.outputs)
        format = address(scales), scales.shape[1], self.bits, scales.itemsize, self.rounds
        return Linear(address(self.words), address(bias), *sizes, *format)


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [..., in] by a quantized weight, add bias [out] and return [..., out]. No gradients are recorded.

    Args:
        x: float32 or bfloat16.
        weight: its integers, and whether x is rounded to integers, too; `helpers/models/integer_products.py` describes
            that product, and computes the same bits.
        bias: [out], in the dtype of x, or None.

    Raises:
        ValueError: a tensor is not on the CPU, or the dtype or size of x or bias does not match.
    """
    x, bias, y = _prepare(x, weight, bias)
    rows, threads = x.numel() // weight.inputs, torch.get_num_threads()
    layer = weight.describe(bias)
    pointers = address(x), addressof(layer), address(y)
    if weight.rounds:
        integers, rounded = rounding_buffers(rows, weight.inputs)
        pointers += address(integers), address(rounded)
        function("integer_linear", x.dtype, INTEGER_ARGUMENTS)(*pointers, rows, threads)
        return y
    buffers = panel_buffers(rows, weight.inputs, x.dtype)
    function("quantized_linear", x.dtype, ARGUMENTS)(*pointers, address(buffers), rows, threads)
    return y


def rounding_buffers(rows: int, inputs: int, copies: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for rounded rows, at least this many copies of few rows: integers, and a scale and a sum each."""
    rows = max(copies * library().few_rows(), rows)
    integers = torch.empty(rows, inputs, dtype=torch.int8, device="cpu")
    return integers, torch.empty(rows, 2, dtype=torch.int32, device="cpu")


def panel_buffers(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer in which each thread converts a panel, if that is done for so many rows."""
    panel = inputs * library().panel_outputs() if rows > library().rows_without_buffer() else 0
    return torch.empty(torch.get_num_threads() * panel, dtype=dtype, device="cpu")


def dequantize(words: torch.Tensor, scales: torch.Tensor, bits: int, outputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized weight as floats, [in, out]; `in` may be padded, see `quantized_linear`."""
    inputs = words.shape[1] * 32 // bits
    weight = torch.empty(inputs, outputs, dtype=dtype)
    pointers = [address(tensor) for tensor in (words, scales, weight)]
    sizes = inputs, outputs, scales.shape[1], bits, scales.itemsize
    function("dequantize", dtype, DEQUANTIZE_ARGUMENTS)(*pointers, *sizes, torch.get_num_threads())
    return weight


def _prepare(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> tuple:
    """Return x with padded inputs, the bias, and an empty y, which the kernels can read and write."""
    inputs, outputs = weight.inputs, weight.outputs
    if x.dtype not in DTYPES or not (x.is_cpu and weight.words.is_cpu and weight.scales.is_cpu):
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
    return x.contiguous(), bias, x.new_empty(*x.shape[:-1], outputs)
