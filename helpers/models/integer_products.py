"""Multiply integers by integers: layers with int8 weights that round their inputs, too.

Each token's inputs are stored as the integers nearest to input / scale, with a scale of the token's own that maps its
largest absolute value to 127. The product of a token and an output is then a sum of integers, which is exact in any
order, times both scales:

    y = float32(sum of integers) * scale of the token * scale of the output + bias

So a token's result depends on no other token of its batch, bit for bit, whatever computes it. Processors multiply
integers of 8 bits several times as fast as floats, which shortens prefills and decodes of many rows.

What rounding the inputs costs depends on the model: a large input enlarges the scale of its whole token. And rounding
is a step. Two ways to compute the rest of a model differ by float32's rounding; where that moves an input over the
middle between two integers, the logits may move by more than 1% of their range. So near ties are wider than with float
inputs. In float64, that hardly ever happens.

`integer_reference` returns the reference: an ordinary model that computes with PyTorch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from .cloning import clone_sharing_weights
from .quantization import FORMATS, QuantizedLinear, quantize, round_to_integers

EXACT = 2**24 // 127**2  # so many products of 8-bit integers have a sum that float32 holds exactly
MOST_INPUTS = 2**16  # of a layer, so that sums have 32 bits, even of unsigned by signed bytes
_rounds_inputs = ContextVar("rounds_inputs", default=True)


@contextmanager
def unrounded_inputs() -> Iterator[None]:
    """Let integer layers multiply their inputs as they are, in this thread, or decorate a function that needs it.

    It is for trials that compare two ways to run a model: rounding its inputs would enlarge the smallest difference.
    """
    token = _rounds_inputs.set(False)
    try:
        yield
    finally:
        _rounds_inputs.reset(token)


def rounds_inputs() -> bool:
    """Return whether integer layers round their inputs now, in this thread."""
    return _rounds_inputs.get()


class IntegerLinear(QuantizedLinear):
    """A quantized layer that rounds its inputs to integers. While gradients are recorded, it leaves them as they are.

    `multiply_rounded` of the class, which computes [..., out] from x [..., in], is replaced by `helpers.fast`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round x [..., in], multiply it by the rounded weight, add the bias and return [..., out]."""
        wants_gradient = torch.is_grad_enabled() and x.requires_grad
        return super().forward(x) if wants_gradient or not rounds_inputs() else self.multiply_rounded(x)

    def multiply_integers(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with PyTorch, slab by slab. Float32 sums of EXACT products are exact; int32 adds these.

        A token with an input that is infinite or not a number gets NaN.
        """
        tokens = x.reshape(-1, x.shape[-1])
        integers, scales = round_to_integers(tokens, FORMATS["int8"])
        parts = integers.float().split(EXACT, dim=1)
        slabs = []
        for weights, own in self._slabs():
            weights = weights[:, : self.in_features].float().split(EXACT, dim=1)
            sums = sum((part @ some.T).int() for part, some in zip(parts, weights, strict=True))
            slabs.append(sums.float() * scales * own.T)
        y = torch.cat(slabs, dim=1)
        y = y if self.bias is None else y + self.bias.float()
        return y.to(self.dtype).view(*x.shape[:-1], self.out_features)

    multiply_rounded = multiply_integers


class _ReferenceLinear(IntegerLinear):
    """Computes with PyTorch in any case."""

    multiply_rounded = IntegerLinear.multiply_integers


def round_inputs(model: nn.Module, kind: type[IntegerLinear] = IntegerLinear) -> nn.Module:
    """Let all quantized layers of a model round their inputs, too; return the model.

    Args:
        model: it is changed in place.
        kind: what its quantized layers become.

    Raises:
        ValueError: a layer has integers of 4 bits, or several scales per output, or more than MOST_INPUTS inputs.
    """
    for path, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        if layer.format.bits != 8 or layer.format.group is not None or layer.in_features > MOST_INPUTS:
            raise ValueError(
                f"{path} cannot multiply integers: it has {layer.format.bits} bits, {layer.scales.shape[1]} scales per "
                f"output and {layer.in_features} inputs, but 8, 1 and up to {MOST_INPUTS} are possible. Leave out "
                f"compute, or give a model whose weights are floats."
            )
        layer.__class__ = kind  # the same tensors, multiplied in another way
    return model


def integer_reference(model: nn.Module) -> nn.Module:
    """Return an ordinary model with int8 weights whose linear layers round their inputs, all with PyTorch.

    It is the reference for an engine with `EngineConfig(weights="int8", compute="int8")`. Both generate the same
    tokens, except for near ties, which are wider than those of float products (see above).

    Args:
        model: a float model, or one with int8 weights. It stays as it is, and shares all other tensors.

    Raises:
        ValueError: see `quantize` and `round_inputs`.
    """
    return round_inputs(quantize(clone_sharing_weights(model), "int8"), _ReferenceLinear).eval()
