"""Let quantized layers multiply with the kernel, which never stores the rounded weight.

`helpers/models` describes these layers and computes with PyTorch; importing this package replaces that.
"""

import torch

from ..models.quantization import QuantizedLinear
from . import kernels
from .kernels import huge_pages


def multiply_quantized(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., in] by a layer's integers and scales, add the bias and return [..., out].

    A row does not depend on the others, bit for bit. No gradients are recorded.

    Raises:
        ValueError: x has another number of inputs; also see `kernels.quantized_linear`.
    """
    if x.shape[-1] != layer.in_features:
        raise ValueError(
            f"The layer has {layer.in_features} inputs, but x has {x.shape[-1]}: pass x of shape "
            f"[..., {layer.in_features}]."
        )
    return kernels.quantized_linear(x, layer.words, layer.scales, layer.bias, layer.format.bits, layer.out_features)


def use_kernels() -> None:
    """Let all quantized layers multiply with the kernel where it is available, and keep new ones in huge pages."""

    def multiply(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        available = not kernels.unavailable(x.dtype, x.device)
        return multiply_quantized(layer, x) if available else layer.multiply_dequantized(x)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        on_cpu = torch.device(device).type == "cpu"
        return huge_pages.empty(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)

    QuantizedLinear.multiply, QuantizedLinear.allocate = multiply, staticmethod(allocate)
