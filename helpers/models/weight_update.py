"""Write new weights into a model: all of them or, if one does not fit, none."""

from collections.abc import Mapping

import torch
from torch import nn

from .quantization import QuantizedLinear


class WeightUpdate:
    """New weights that fit a model.

    Args:
        model: the model to change. Its quantized layers are quantized anew, from float weights.
        weights: a model of the same kind, or its `state_dict`. A tensor that has several names, such as an LM head that
            is tied to the embedding, may have one of them only. Buffers may be missing.

    Raises:
        ValueError: a name is unknown, a weight is missing or has another shape, or it cannot be quantized.
    """

    def __init__(self, model: nn.Module, weights: nn.Module | Mapping[str, torch.Tensor]):
        if isinstance(weights, nn.Module):
            weights = weights.state_dict()
        if not isinstance(weights, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
            raise ValueError(f"weights must be a model or its state_dict, names with tensors, not {type(weights)}.")
        self.model_name = type(model).__name__
        quantized = {path: layer for path, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
        own = {f"{path}.{name}" for path in quantized for name in ("words", "scales")}  # which no float model has
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name not in own:
                names.setdefault(tensor, []).append(name)
        known = {f"{path}.weight" for path in quantized}.union(*names.values())
        if unknown := [name for name in weights if name not in known]:
            raise ValueError(f"{self.model_name} has no tensor {unknown[0]!r}: use the names of its state_dict.")
        self._tensors = [
            (tensor, new)
            for tensor, aliases in names.items()
            if (new := self._new(tensor, aliases, weights)) is not None
        ]
        self._layers = [
            (layer, self._new_quantized(model, f"{path}.weight", layer, weights)) for path, layer in quantized.items()
        ]

    def _new(self, tensor: torch.Tensor, names: list[str], weights: Mapping) -> torch.Tensor | None:
        given = [name for name in names if name in weights]
        if not given and not isinstance(tensor, nn.Parameter):
            return None
        if not given:
            raise ValueError(f"There is no new weight {names[0]!r} for {self.model_name}: give all of its weights.")
        new = weights[given[0]]
        for name in given:
            self._check_shape(name, weights[name], tensor.shape)
            if weights[name] is not new and not torch.equal(weights[name], new):
                raise ValueError(f"{given[0]!r} and {name!r} are one tensor of {self.model_name}: give equal weights.")
        return new

    def _new_quantized(self, model: nn.Module, name: str, layer: QuantizedLinear, weights: Mapping) -> torch.Tensor:
        """Return the new weight [out, in] of a quantized layer."""
        new = weights.get(name)
        if new is None and layer is model.get_output_embeddings() and model.config.tie_word_embeddings:
            embedding = model.get_input_embeddings()
            new = next((new for tensor, new in self._tensors if tensor is embedding.weight), None)
        if new is None:
            raise ValueError(f"There is no new weight {name!r} for {self.model_name}: give all of its weights.")
        shape = (layer.out_features, layer.in_features)
        self._check_shape(name, new, shape[::-1] if layer.is_transposed else shape)
        if not new.isfinite().all():
            raise ValueError(f"{name!r} has numbers that are infinite or NaN, and these have no nearest integer.")
        return new.T if layer.is_transposed else new

    def _check_shape(self, name: str, new: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(new.shape) != tuple(shape):
            raise ValueError(
                f"The new weight {name!r} has the shape {list(new.shape)}, but that of {self.model_name} has "
                f"{list(shape)}: give weights of the same model."
            )

    def snapshot(self) -> None:
        """Copy the new weights: those that were given may change before they are written."""
        self._tensors = [(tensor, new.detach().clone()) for tensor, new in self._tensors]
        self._layers = [(layer, new.detach().clone()) for layer, new in self._layers]

    def write(self) -> None:
        """Write all new weights."""
        for tensor, new in self._tensors:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(new)
        for layer, new in self._layers:
            layer.requantize(new)
