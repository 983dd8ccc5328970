"""Replace a model's linear layers with the backend that is fastest on this machine for the number of rows at hand.

Decoding multiplies a few rows by every weight of the model. That is little arithmetic, so it takes as long as reading
the weights. A prefill multiplies hundreds of rows, which takes as long as the arithmetic. `linear_backends.py` lists
the backends, and `linear_choice.py` finds out by measurement which is fastest for which shape and number of rows.

`choose_linear_backends` changes no output by more than rounding, and it writes into no tensor of the model.
"""

import copy

import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from ..models.integer_products import rounds_inputs
from ..models.quantization import QuantizedLinear
from . import kernels
from .linear_backends import BACKENDS, Layer, available_backends, backends_of, candidates, inputs_of, kind_of
from .linear_choice import ROWS, Times, nearest, shape_of, times_of

MIN_LAYER_BYTES = 1_000_000  # before it is quantized; smaller weights fit in a core's cache
MIN_MODEL_BYTES = 10_000_000  # the same; the large layers of a smaller model fit in the last-level cache together


def choose_linear_backends(model: nn.Module, backend: str = "auto", copies: bool = True) -> int:
    """Replace linear layers, including the LM head, with layers that use the fastest backends.

    This replaces modules of `model` and changes none of its tensors. To keep the original, pass a clone that shares its
    weights (`clone_sharing_weights`). transformers' `gelu_new` is replaced, too, with PyTorch's faster operator.

    A layer for which PyTorch's own product wins stays as it is. So do all layers on a GPU and in dtypes other than
    float32 and bfloat16. A replaced layer uses its backends while gradients are disabled, as under `torch.no_grad()`.
    While gradients are recorded, the original layer computes. Once its weight has been written to, copies are made
    anew. Quantized layers keep their integers; only what multiplies by them is chosen.

    Args:
        backend: "auto" to choose by measurement, for large layers of large models only; or a name in `BACKENDS`, which
            then computes all layers.
        copies: whether "auto" may keep second copies of weights. They take as many bytes as the weights (494 MB for
            GPT-2 with 124M parameters in float32).

    Returns:
        The number of layers that were replaced.

    Raises:
        ValueError: the backend is unknown, or unavailable for this model.
    """
    if backend not in ("auto", *BACKENDS):
        names = ", ".join(repr(name) for name in ["auto", *BACKENDS])
        raise ValueError(f"There is no linear backend {backend!r}: choose one of {names}.")
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, FastLinear):  # of an earlier call: choose anew
            model.set_submodule(path, module.layer)
    # A layer may have several parents, and several names in one of them.
    modules = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if path]
    layers = list(
        dict.fromkeys(module for _, module in modules if is_plain(module) or isinstance(module, QuantizedLinear))
    )
    if backend == "auto":
        layers = [layer for layer in layers if _float_bytes(layer) >= MIN_LAYER_BYTES]
        if sum(map(_float_bytes, layers)) < MIN_MODEL_BYTES:
            return 0
    replacements: dict[nn.Module, nn.Module] = {}
    for kind in dict.fromkeys(map(kind_of, layers)):
        alike = [layer for layer in layers if kind_of(layer) == kind]
        for layer, chosen in zip(alike, _choose(alike, backend, copies, available_backends(*kind)), strict=True):
            if isinstance(layer, QuantizedLinear):
                replacements[layer] = FastQuantizedLinear(layer, chosen)
            elif set(chosen) != {"pytorch"}:
                replacements[layer] = FastLinear(layer, chosen)
    num_layers = len(replacements)
    if num_layers:  # transformers' `gelu_new` makes eight passes over its input
        activations = {module for _, module in modules if type(module) is NewGELUActivation}
        replacements |= {activation: nn.GELU(approximate="tanh") for activation in activations}
    for path, module in modules:
        if module in replacements:
            model.set_submodule(path, replacements[module])
    return num_layers


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer multiplies and does nothing else: a subclass or a hook might.

    A weight of another class may be quantized. One made in inference mode counts no writes, so a stale copy could not
    be detected.
    """
    if type(layer) not in (nn.Linear, Conv1D) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return type(layer.weight) is nn.Parameter and not layer.weight.is_inference()


def _float_bytes(layer: Layer) -> int:
    """Return the bytes of a layer's weight in the model's dtype, quantized or not."""
    if isinstance(layer, QuantizedLinear):
        return layer.in_features * layer.out_features * layer.dtype.itemsize
    return layer.weight.nbytes


def unchanged_layers(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers that `choose_linear_backends` did not replace, subclasses included."""
    replaced = {module.layer for module in model.modules() if isinstance(module, FastLinear)}
    layers = (nn.Linear, Conv1D)
    return [path for path, module in model.named_modules() if isinstance(module, layers) and module not in replaced]


def _choose(layers: list, backend: str, copies: bool, available: list[str]) -> list[list[str]]:
    """Return for each layer the backend for every number in `ROWS`."""
    if backend == "compiled_unpacked" and isinstance(layers[0], QuantizedLinear):
        backend = "compiled"  # which copies no integers either
    if backend != "auto":
        if backend not in available:
            dtype, device, _ = kind_of(layers[0])
            quantized = isinstance(layers[0], QuantizedLinear)
            names = ", ".join(map(repr, ["auto", *(name for name in available if name in BACKENDS)]))
            raise ValueError(
                f"The linear backend {backend!r} does not work for {'quantized ' * quantized}"
                f"{str(dtype).removeprefix('torch.')} on {device} here: choose one of {names}."
            )
        return [[backend] * len(ROWS)] * len(layers)
    choose = Times.choose
    if isinstance(layers[0], QuantizedLinear):
        choose = Times.fastest  # its backends make no copies
        # Where there are kernels, PyTorch alone never wins, and timing it takes long.
        available = [name for name in available if name != "pytorch"] or available
    else:
        available = candidates(available, copies)
    if len(available) == 1:
        return [available * len(ROWS)] * len(layers)
    times = times_of(layers, available)
    return [choose(times[shape_of(layer)], available) for layer in layers]


class FastLinear(nn.Module):
    """A linear layer that computes with one of several backends. It keeps the original layer, with weight and bias.

    Args:
        layer: an `nn.Linear`, or GPT-2's `Conv1D`, whose weight is [in, out].
        backends: the name of the backend for each number of rows in `ROWS`.
    """

    def __init__(self, layer: Layer, backends: list[str]):
        super().__init__()
        self.layer, self.backends = layer, backends
        self._make_products()

    def _make_products(self) -> None:
        layer, backends = self._modules["layer"], self.backends
        products = {name: backends_of(layer)[name](layer) for name in dict.fromkeys(backends)}
        self.products = [products[backends[nearest(rows)]] for rows in range(ROWS[-1] + 1)]  # by the number of rows
        self.max_rows = len(self.products) - 1
        self.inputs = inputs_of(layer)
        if not isinstance(layer, QuantizedLinear):
            # In a tuple, or the weight would be registered as a second parameter.
            self.made_from = layer.weight, layer.weight._version, layer.weight.data_ptr(), layer.bias
            self.made_for = kind_of(layer)

    def __getattr__(self, name: str):
        """Look up `weight`, `bias`, `in_features`, ... in the original layer."""
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["layer"], name)

    def __deepcopy__(self, memo: dict) -> "FastLinear":
        """Copy the original layer. The copy makes its own products, because a packed weight cannot be copied."""
        return type(self)(copy.deepcopy(self.layer, memo), self.backends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # the products would drop gradients without an error
            return self._modules["layer"](x)
        if not self.is_unchanged():  # a copy does not follow changes to the weight
            weight, old = self._modules["layer"].weight, self.made_from[0]
            if weight.shape != old.shape or kind_of(self._modules["layer"]) != self.made_for:
                return self._modules["layer"](x)  # cast or moved: the backends may be others
            self._make_products()
        return self.products[min(x.numel() // self.inputs, self.max_rows)](x)

    def is_unchanged(self) -> bool:
        """Return whether the layer has the weight and the bias from which the products were made."""
        parameters, (weight, version, address, bias) = self._modules["layer"]._parameters, self.made_from
        return (
            parameters["weight"] is weight
            and parameters["bias"] is bias
            and weight._version == version
            and weight.data_ptr() == address
        )

    def packed_weight(self) -> kernels.PackedWeight | None:
        """Return the copy of the weight that a compiled kernel reads for some number of rows; or None."""
        products = (product for product in self.products if hasattr(product, "func"))
        return next((product.keywords["weight"] for product in products if product.func is kernels.linear), None)


class FastQuantizedLinear(FastLinear):
    """The same for a `QuantizedLinear`. Its backends read the layer's own tensors, so they follow every change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_usual = rounds_inputs() and not torch.is_grad_enabled()
        if not is_usual or kernels.unavailable(x.dtype, x.device):  # the latter if cast or moved since the choice
            return self._modules["layer"](x)
        return self.products[min(x.numel() // self.inputs, self.max_rows)](x)

    def is_unchanged(self) -> bool:
        """Return True, as far as the products are concerned."""
        return True
