"""Linear layers on weights that are reordered once, so that they can be read as fast as memory allows.

Decoding multiplies a few rows by every weight of the model. That is little arithmetic, so it takes as long as reading
the weights. PyTorch's default product on a CPU reads them in the order in which they are stored, at a fifth to a half
of the memory bandwidth. Two products use an order of their own. The one in `kernels/linear.cpp` must be compiled.
oneDNN's comes with PyTorch and reads at two thirds to three quarters of the bandwidth.

`prepack` changes no output by more than rounding, and it writes into no tensor of the model. It skips layers that it
cannot speed up. oneDNN's operators are private to PyTorch, so each product is tried out before it is used.
"""

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from .. import kernels


def prepack(model: nn.Module, min_bytes: int = 1_000_000, compiled: bool = True) -> int:
    """Replace linear layers, including the LM head, with layers on reordered copies of their weights.

    This replaces modules of `model` and changes none of its tensors. To keep the original, pass a clone that shares its
    weights (`clone_sharing_weights`). transformers' `gelu_new` is replaced, too, with PyTorch's faster operator.

    The copies take as many bytes as these layers' weights (494 MB for GPT-2 with 124M parameters in float32). No layer
    can be packed on a GPU, in a dtype other than float32 and bfloat16, or if neither product works. A packed layer
    uses its copy while gradients are disabled, as under `torch.no_grad()`. While gradients are recorded, or once its
    weight has been written to, the original layer computes.

    Args:
        min_bytes: smaller weights stay as they are: they fit in a cache, and a packed call has a higher fixed cost.
        compiled: use the compiled kernel if it is available.

    Returns:
        The number of layers that were replaced.
    """
    # A layer may have several parents, and several names in one of them.
    modules = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if path]
    replacements: dict[nn.Module, nn.Module] = {}
    for _, layer in modules:
        if layer not in replacements and _is_plain(layer) and layer.weight.nbytes >= min_bytes:
            product = product_for(layer.weight, compiled)
            if product is not None:
                replacements[layer] = PackedLinear(layer, product)
    num_layers = len(replacements)
    if num_layers:  # transformers' `gelu_new` makes eight passes over its input
        activations = {module for _, module in modules if type(module) is NewGELUActivation}
        replacements |= {activation: nn.GELU(approximate="tanh") for activation in activations}
    for path, module in modules:
        if module in replacements:
            model.set_submodule(path, replacements[module])
    return num_layers


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer multiplies and does nothing else: a subclass or a hook might."""
    return type(layer) in (nn.Linear, Conv1D) and not layer._forward_hooks and not layer._forward_pre_hooks


class CompiledProduct:
    """Multiplies x [..., in] by a weight [out, in] with the compiled kernel."""

    def __init__(self, weight: torch.Tensor):
        self.packed = kernels.pack(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return kernels.linear(x, self.packed, bias)


class OneDNNProduct:
    """Multiplies x [..., in] by a weight [out, in] with oneDNN, which reorders the weight into an opaque tensor."""

    ROWS = 8  # a hint: values from 4 to 512 make no difference, and any number of rows is accepted
    FEWEST_ROWS = 4  # in float32, repeating 1 or 2 rows to make 4 takes 15% or 30% less time

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
    """Return the product for a weight of this dtype and device, compiled if possible; None if neither works."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight.is_inference():  # it counts no writes, so a stale copy could not be detected
        return None
    example = torch.eye(16, dtype=weight.dtype, device="cpu")
    for product in [CompiledProduct] * (compiled and not kernels.unavailable(weight.dtype)) + [OneDNNProduct]:
        try:
            if torch.equal(product(example)(example, None), example):
                return product
        except (AttributeError, RuntimeError, TypeError):  # missing, not for this CPU, or with another signature
            continue
    return None


class PackedLinear(nn.Module):
    """A linear layer on a reordered copy of its weight. It keeps the original layer, with its weight and bias.

    Args:
        layer: an `nn.Linear`, or GPT-2's `Conv1D`, whose weight is [in, out].
        product: the class that multiplies by a weight [out, in].
    """

    def __init__(self, layer: nn.Linear | Conv1D, product: "type[CompiledProduct] | type[OneDNNProduct]"):
        super().__init__()
        self.layer = layer
        self.product = product(layer.weight.T if isinstance(layer, Conv1D) else layer.weight)
        self.packed_version = layer.weight._version

    def __getattr__(self, name: str):
        """Look up `weight`, `bias`, `in_features`, ... in the original layer."""
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["layer"], name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The products would drop gradients without an error, and the copy does not follow changes to the weight.
        if torch.is_grad_enabled() or self.weight._version != self.packed_version:
            return self.layer(x)
        return self.product(x, self.bias)
