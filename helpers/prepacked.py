"""Weights reordered once, so that a few rows read them as fast as memory allows.

Decoding multiplies a handful of rows with every weight of the model: little arithmetic, so its time is the time to read
the weights. PyTorch's default product on a CPU reads them at a fifth to a half of the memory's speed, because it takes
them in the order they lie in. Two products want an order of their own: the one in `kernels/linear.cpp`, if it can be
compiled here, and else oneDNN's, which comes with PyTorch and reads at two thirds to three quarters of the speed.

The claim: `prepack` changes no output by more than rounding, writes into no tensor of the model, and leaves alone what
it cannot make faster. oneDNN's operators are private to PyTorch, so each product is tried out before it is used.
"""

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from . import kernels


def prepack(model: nn.Module, min_bytes: int = 1_000_000, compiled: bool = True) -> int:
    """Give the linear layers, the LM head included, reordered copies of their weights; return how many layers got one.

    Changes the modules of `model` in place and none of its tensors. Hand in a shell that shares the tensors, and the
    original stays as it was, as does an embedding that is tied to the LM head:

        shell = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})

    The copies are memory on top: as many bytes as these layers' weights (494 MB for GPT-2 with 124M parameters in
    float32). Where no layer can be packed (on a GPU, in another dtype than float32 and bfloat16, without any of the
    products), the model stays as it is. Packed layers answer under `torch.no_grad()`; where gradients are recorded,
    or once a weight has been written to since, the plain layer does.

    Args:
        min_bytes: smaller weights stay as they are: they lie in a cache, and a packed call takes longer to begin.
        compiled: take the course's own kernel where it can be had.
    """
    packed = 0
    for module in model.modules():
        if type(module) in PACKED and module.weight.nbytes >= min_bytes:
            product = product_for(module.weight, compiled)
            if product is not None:
                module.__class__ = PACKED[type(module)]  # the same object, so whoever else holds it gains, too
                module.pack(product)
                packed += 1
    if packed:
        _compute_gelu_in_one_pass(model)
    return packed


class CompiledProduct:
    """x [..., in] times a weight [out, in], by the course's own kernel."""

    def __init__(self, weight: torch.Tensor):
        self.outputs, self.packed = weight.shape[0], kernels.pack(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return kernels.linear(x, self.packed, bias, self.outputs)


class OneDNNProduct:
    """The same by oneDNN, which keeps the reordered weight in an opaque tensor."""

    ROWS = 8  # a hint: from 4 to 512 it makes no difference, and layers take any number
    FEWEST_ROWS = 4  # float32 is read faster for 3 to 6 rows: 1 and 2 rows made 4 take 15% and 30% less time

    def __init__(self, weight: torch.Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.ROWS)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[:-1].numel()
        if rows not in (1, 2) or x.dtype != torch.float32:
            return self._multiply(x, bias)
        repeated = x.reshape(1, rows, -1).expand(self.FEWEST_ROWS // rows, -1, -1).reshape(self.FEWEST_ROWS, -1)
        return self._multiply(repeated, bias)[:rows].view(*x.shape[:-1], -1)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


def product_for(weight: torch.Tensor, compiled: bool = True) -> type[CompiledProduct] | type[OneDNNProduct] | None:
    """The product that takes a weight [out, in] of this dtype, here and on its device: the compiled one, if it can."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight.is_inference():  # made in inference mode: it does not count the writes that would make a copy stale
        return None
    example = torch.eye(16, dtype=weight.dtype, device="cpu")
    for product in [CompiledProduct] * (compiled and not kernels.unavailable(weight.dtype)) + [OneDNNProduct]:
        try:
            if torch.equal(product(example)(example, None), example):
                return product
        except (AttributeError, RuntimeError, TypeError):  # missing, not for this CPU, or called differently by now
            continue
    return None


class _Packed:
    """Goes before the class of a layer: multiplies with a reordered copy of the weight; the weight stays, shared."""

    def pack(self, product: type[CompiledProduct] | type[OneDNNProduct]) -> None:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight  # Conv1D keeps [in, out]
        self.product, self.packed_version = product(weight), self.weight._version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The products would drop gradients without an error, and the copy follows no change of the weight.
        if torch.is_grad_enabled() or self.weight._version != self.packed_version:
            return super().forward(x)
        return self.product(x, self.bias)


class PackedLinear(_Packed, nn.Linear):
    """`nn.Linear` on a reordered copy of its weight."""


class PackedConv1D(_Packed, Conv1D):
    """GPT-2's `Conv1D`, a linear layer with its weight transposed, on a reordered copy of it."""


PACKED = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}  # no subclasses: they may do more than multiply


def _compute_gelu_in_one_pass(model: nn.Module) -> None:
    """PyTorch's own tanh GELU for transformers' `gelu_new`, which passes over its input eight times."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is NewGELUActivation:
                setattr(parent, name, nn.GELU(approximate="tanh"))
