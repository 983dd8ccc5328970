"""Weights reordered once for oneDNN, so that a few rows read them about as fast as memory allows.

Decoding multiplies a handful of rows with every weight of the model: little arithmetic, so its time is the time to read
the weights. PyTorch's default product on a CPU reads them at a fifth to a half of the memory's speed, because it takes
them in the order they lie in. oneDNN, which comes with PyTorch, can reorder a weight once, for all calls to come.

The claim: `prepack` changes no output by more than rounding, writes into no tensor of the model, and leaves alone what
it cannot make faster. The operators behind it are private to PyTorch, so they are tried out before they are used.
"""

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

ROWS = 8  # a hint to oneDNN: from 4 to 512 it makes no difference, and layers take any number
FEWEST_ROWS = 4  # oneDNN reads float32 weights faster for 3 to 6 rows: 1 and 2 rows made 4 take 15% and 30% less time


def prepack(model: nn.Module, min_bytes: int = 1_000_000) -> int:
    """Give the linear layers, the LM head included, reordered copies of their weights; return how many layers got one.

    Changes the modules of `model` in place and none of its tensors. Hand in a shell that shares the tensors, and the
    original stays as it was, as does an embedding that is tied to the LM head:

        shell = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})

    The copies are memory on top: as many bytes as these layers' weights (494 MB for GPT-2 with 124M parameters in
    float32). Where no layer can be packed (on a GPU, in another dtype than float32 and bfloat16, without the
    operators), the model stays as it is. Packed layers answer under `torch.no_grad()`; where gradients are recorded,
    or once a weight has been written to since, the plain layer does.

    Args:
        min_bytes: smaller weights stay as they are: they lie in a cache, and a packed call costs 10 us more.
    """
    packed = 0
    for module in model.modules():
        if type(module) in PACKED and module.weight.nbytes >= min_bytes and supported(module.weight):
            module.__class__ = PACKED[type(module)]  # the same object, so whoever else holds it gains, too
            module.pack()
            packed += 1
    if packed:
        _compute_gelu_in_one_pass(model)
    return packed


def supported(weight: torch.Tensor) -> bool:
    """Whether a layer with this weight can be packed: on its device, in its dtype, by this build on this CPU."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    if weight.is_inference():  # made in inference mode: it does not count the writes that would make a copy stale
        return False
    example = torch.eye(16, dtype=weight.dtype)
    try:
        return torch.equal(_multiply(example, _reorder(example), None), example)
    except (AttributeError, RuntimeError, TypeError):  # missing, not for this CPU, or called differently by now
        return False


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    """An opaque copy of a weight [out, in] (with any strides) in the order that oneDNN wants."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times a reordered weight, plus bias [out]: [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class _Packed:
    """Goes before the class of a layer: multiplies with a reordered copy of the weight; the weight stays, shared."""

    def pack(self) -> None:
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight  # Conv1D keeps [in, out]
        self.packed, self.packed_version = _reorder(weight), self.weight._version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The operator would drop gradients without an error, and the copy follows no change of the weight.
        if torch.is_grad_enabled() or self.weight._version != self.packed_version:
            return super().forward(x)
        rows = x.shape[:-1].numel()
        if rows not in (1, 2) or x.dtype != torch.float32:
            return _multiply(x, self.packed, self.bias)
        repeated = x.reshape(1, rows, -1).expand(FEWEST_ROWS // rows, -1, -1).reshape(FEWEST_ROWS, -1)
        return _multiply(repeated, self.packed, self.bias)[:rows].view(*x.shape[:-1], -1)


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
