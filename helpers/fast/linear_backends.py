"""The implementations of a linear layer, of which the fastest is chosen by measurement (`linear_choice.py`).

    pytorch             the layer itself
    compiled            the kernel in `kernels/linear.cpp`, on a copy of the weight in the kernel's order
    compiled_unpacked   the kernel in `kernels/unpacked_linear.cpp`, on the layer's own weight

No processor runs one of them fastest for every shape. With a few rows a product waits for memory, and the order in
which the weight is read matters. With many rows it waits for arithmetic, and the matrix units of the processor matter.

A layer with quantized weights (`models/quantization.py`) has these:

    pytorch         dequantizes the weight and multiplies: only where there are no kernels
    compiled        the kernel in `kernels/quantized.cpp`, on the layer's own integers
    dequantized     a kernel dequantizes the weight, and PyTorch multiplies: for many rows, on some processors

A layer that rounds its inputs, too (`models/integer_products.py`), has the first two, with the kernel in
`kernels/integer_linear.cpp`. PyTorch's private product of integers, `_int_mm`, needs a copy of them in another order.

PyTorch's private products by oneDNN (`torch.ops.mkldnn`) are left out. On the processors of
`benchmarks/results/linear_layers.md`, they were hardly ever faster than the compiled kernel, and then by less than 10%.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..models.integer_products import IntegerLinear
from ..models.quantization import QuantizedLinear, weight_of
from . import kernels
from .quantized_linear import multiply_dequantized, multiply_integers, multiply_quantized

Layer = nn.Linear | Conv1D | QuantizedLinear
Product = Callable[[torch.Tensor], torch.Tensor]  # from inputs [..., in] to outputs [..., out]


def compiled(layer: nn.Linear | Conv1D) -> Product:
    """Multiply with the compiled kernel by a copy of the weight. A row does not depend on the others, bit for bit."""
    return partial(kernels.linear, weight=kernels.pack(weight_of(layer)), bias=layer.bias)


def compiled_unpacked(layer: nn.Linear | Conv1D) -> Product:
    """Multiply with the compiled kernel by the layer's own weight. A row does not depend on the others, either."""
    return partial(kernels.unpacked_linear, weight=weight_of(layer), bias=layer.bias)


BACKENDS: dict[str, Callable[[nn.Linear | Conv1D], Product]] = {
    "pytorch": lambda layer: layer,
    "compiled": compiled,
    "compiled_unpacked": compiled_unpacked,
}
COPYING = "compiled"  # keeps a second copy of a float weight
QUANTIZED: dict[str, Callable[[QuantizedLinear], Product]] = {
    "pytorch": lambda layer: layer.multiply_dequantized,
    "compiled": lambda layer: partial(multiply_quantized, layer),
    "dequantized": lambda layer: partial(multiply_dequantized, layer),
}
INTEGER: dict[str, Callable[[IntegerLinear], Product]] = {
    "pytorch": lambda layer: layer.multiply_integers,
    "compiled": lambda layer: partial(multiply_integers, layer),
}
BATCH_INVARIANT = ("compiled", "compiled_unpacked")  # a row never depends on the number of rows (test_kernels.py)


def backends_of(layer: Layer) -> dict[str, Callable[[Layer], Product]]:
    """Return the backends of this kind of layer, available or not, by name. Each makes the product of a layer."""
    if isinstance(layer, IntegerLinear):
        return INTEGER
    return QUANTIZED if isinstance(layer, QuantizedLinear) else BACKENDS


def kind_of(layer: Layer) -> tuple[torch.dtype, torch.device, tuple[str, ...]]:
    """Return what the available backends of a layer depend on: the arguments of `available_backends`."""
    stored = layer.words if isinstance(layer, QuantizedLinear) else layer.weight
    return layer.dtype if isinstance(layer, QuantizedLinear) else stored.dtype, stored.device, (*backends_of(layer),)


def inputs_of(layer: Layer) -> int:
    """Return the number of a layer's inputs."""
    return layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features


def bytes_of(layer: Layer) -> int:
    """Return how many bytes the weight of a layer takes, its scales included."""
    if isinstance(layer, QuantizedLinear):
        return layer.words.nbytes + layer.scales.nbytes
    return layer.weight.nbytes


def available_backends(
    dtype: torch.dtype, device: torch.device | str = "cpu", names: tuple[str, ...] = (*BACKENDS,)
) -> list[str]:
    """Return which of these backends work for layers of this dtype and device; "pytorch" always does.

    The first call may compile the kernels.
    """
    return ["pytorch"] if kernels.unavailable(dtype, device) else [*names]


def candidates(available: list[str], copies: bool) -> list[str]:
    """Return the backends that "auto" chooses from, depending on whether it may keep copies of weights.

    Where it may, `compiled_unpacked` is left out. Timed layer by layer it is about as fast as `compiled`, but a whole
    GPT-2 of 124M parameters generated 78 tokens per second with both and 113 with `compiled` alone (AMD EPYC, Zen 4).
    """
    return [name for name in available if name != ("compiled_unpacked" if copies else COPYING)]
