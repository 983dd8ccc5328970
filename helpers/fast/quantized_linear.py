"""Let quantized layers multiply with the kernels, which store the rounded weight at most for one product.

`helpers/models` describes these layers and computes with PyTorch; importing this package replaces that.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from ..models.integer_products import IntegerLinear
from ..models.quantization import QuantizedLinear
from . import kernels
from .kernels import huge_pages


def multiply_quantized(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., in] by a layer's integers and scales, add the bias and return [..., out].

    A row does not depend on the others, bit for bit. No gradients are recorded.

    Raises:
        ValueError: x has another number of inputs; also see `kernels.quantized_linear`.
    """
    _check_inputs(layer, x)
    return kernels.quantized_linear(x, packed(layer), layer.bias)


def multiply_dequantized(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """Do the same through a copy of the rounded weight in the dtype of x, which is made anew and dropped afterwards.

    For many rows, it takes less time on some processors. A row may depend on the others.
    """
    _check_inputs(layer, x)
    weight = kernels.dequantize(layer.words, layer.scales, layer.format.bits, layer.out_features, x.dtype)
    return linear(x, weight[: layer.in_features].T, layer.bias)


def multiply_integers(layer: IntegerLinear, x: torch.Tensor) -> torch.Tensor:
    """Round x [..., in], multiply it by a layer's integers and return [..., out]: the bits of the layer's own method.

    Raises:
        ValueError: see `multiply_quantized`.
    """
    _check_inputs(layer, x)
    return kernels.quantized_linear(x, packed(layer, rounds=True), layer.bias)


def packed(layer: QuantizedLinear, rounds: bool = False) -> kernels.QuantizedWeight:
    """Return a layer's weight as the kernels read it, and whether they round the inputs."""
    return kernels.QuantizedWeight(layer.words, layer.scales, layer.format.bits, layer.out_features, rounds)


def _check_inputs(layer: QuantizedLinear, x: torch.Tensor) -> None:
    if x.shape[-1] != layer.in_features:
        raise ValueError(
            f"The layer has {layer.in_features} inputs, but x has {x.shape[-1]}: pass x of shape "
            f"[..., {layer.in_features}]."
        )


def use_kernels() -> None:
    """Let all quantized layers multiply with the kernels where they are available; keep new ones in huge pages."""

    def where_available(product: Callable, otherwise: Callable) -> Callable:
        return lambda layer, x: (otherwise if kernels.unavailable(x.dtype, x.device) else product)(layer, x)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        on_cpu = torch.device(device).type == "cpu"
        return huge_pages.empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)

    QuantizedLinear.allocate = staticmethod(allocate)
    QuantizedLinear.multiply = where_available(multiply_quantized, QuantizedLinear.multiply_dequantized)
    IntegerLinear.multiply_rounded = where_available(multiply_integers, IntegerLinear.multiply_integers)
