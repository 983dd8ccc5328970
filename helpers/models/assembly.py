"""Assemble a model from a file with quantized weights, without ever holding the float weights.

`from_pretrained` would allocate the float weights first. Here, the model is built without any: its parameters are on
the "meta" device and have only a shape. Then the layers whose integers are in the file become `QuantizedLinear`, one
after the other. Finally, the other tensors are read. So memory never holds more than the quantized weights and one
layer, apart from pages of the mapped file, which the operating system can drop.
"""

import threading
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .quantization import QuantizedLinear


class Integers(NamedTuple):
    """A quantized weight: int8 [out, in], scales [out, groups], and the bits of an integer."""

    integers: torch.Tensor
    scales: torch.Tensor
    bits: int


class Checkpoint(Protocol):
    """A file or folder with weights, under the names that the model gives them."""

    def integers(self, path: str) -> Integers | None:
        """Return the weight of a linear layer if it is stored as integers."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a float tensor by its name in the model's `state_dict`, or None if there is none."""


def assemble(config: PretrainedConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of this configuration with the weights of a checkpoint.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    model = _without_weights(config, dtype)
    for path, layer in list(model.named_modules()):
        if type(layer) in (nn.Linear, Conv1D) and (found := checkpoint.integers(path)) is not None:
            shape = layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape
            _check_shape(f"{path}.weight", found.integers, shape)
            try:
                quantized = QuantizedLinear.from_integers(*found, layer.bias, dtype)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            quantized.is_transposed = isinstance(layer, Conv1D)
            model.set_submodule(path, quantized)
    names: dict[torch.Tensor, list[str]] = {}  # several, if an LM head is tied to the embedding
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    tensors = {}
    for tensor, aliases in names.items():
        found = next((found for name in aliases if (found := checkpoint.tensor(name)) is not None), None)
        if found is not None:
            _check_shape(aliases[0], found, tensor.shape)
            found = found.to(tensor.dtype)
            tensors |= dict.fromkeys(aliases, nn.Parameter(found) if isinstance(tensor, nn.Parameter) else found)
        elif tensor.is_meta:
            raise ValueError(f"it has no tensor for {aliases[0]}, which {type(model).__name__} needs")
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.eval()


def _check_shape(name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, but the configuration asks for {list(shape)}")


def _without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with parameters on the meta device. Buffers that no file stores, such as RoPE's, have values."""
    thread = threading.get_ident()

    def drop_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None  # as it is
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(drop_values)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        hook.remove()
