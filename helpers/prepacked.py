"""Weights reordered once for oneDNN, so that a few rows read them about as fast as memory allows.

Decoding multiplies a handful of rows with every weight of the model: hardly any arithmetic, and the time is the time to
read the weights. PyTorch's default product on a CPU reads them at a quarter to a half of the speed that the memory has,
since each call finds them in an order made for large matrices. oneDNN, which comes with PyTorch, can reorder
a weight once, and every later call streams through it.

The claim: `prepack` changes no output by more than rounding, writes into no weight, and leaves alone what it cannot
make faster. The operators behind it are private to PyTorch, so they are tried before they are used.
"""

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D


def prepack(model: nn.Module, rows: int = 8) -> int:
    """Give the model's linear layers, the LM head included, reordered copies of their weights; return how many got one.

    Changes the modules of `model` in place and none of its tensors: hand in a shell of your own that shares them
    with the original, which then stays as it was (and an embedding that is tied to the LM head goes on working):

        shell = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})

    The copies are memory on top: as many bytes again as the weights of these layers (494 MB for GPT-2 with
    124M parameters in float32). Without them (0 layers) the model is exactly what it was: on a GPU, in
    another dtype than float32 and bfloat16, or where PyTorch lacks the operators.

    Args:
        rows: how many rows most calls will have; oneDNN may choose the order for it. Any number works, and the
            order for a few was the best one for hundreds, too.
    """
    layers = [layer for layer in model.modules() if type(layer) in PACKED and supported(layer.weight)]
    for layer in layers:
        layer.__class__ = PACKED[type(layer)]  # same layer, same tensors, and whoever holds it sees the change
        layer.pack(rows)
    if layers:
        _use_fast_gelu(model)
    return len(layers)


def supported(weight: torch.Tensor) -> bool:
    """Whether a layer with this weight can be packed: the device and dtype are right, and the operators do work here."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or weight.is_inference():
        return False  # inference tensors do not say when somebody changes them
    example = torch.eye(16, dtype=weight.dtype)
    try:
        return torch.equal(_multiply(example, _reorder(example, rows=8), None), example)
    except (AttributeError, RuntimeError, TypeError):  # no such operator, not on this CPU, or its arguments changed
        return False


def _reorder(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """An opaque copy of a weight [out, in], whose strides may be any, in the order that oneDNN prefers."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times a reordered weight, plus bias [out]: [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class _Packed:
    """In front of a layer's class: multiplies with a reordered copy of its weight, which itself stays where it is."""

    def pack(self, rows: int) -> None:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight  # Conv1D keeps [in, out]
        self.packed, self.packed_version = _reorder(weight, rows), self.weight._version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The packed product has no gradient, and the copy does not follow what is written into the weight.
        if torch.is_grad_enabled() or self.weight._version != self.packed_version:
            return super().forward(x)
        return _multiply(x, self.packed, self.bias)


class PackedLinear(_Packed, nn.Linear):
    pass


class PackedConv1D(_Packed, Conv1D):
    pass


# By exact type: what a subclass does with its weight is its own business.
PACKED = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}
