"""Load quantized models in the format `pack-quantized` of compressed-tensors, without ever holding the float weights.

That is a Hugging Face folder with a `quantization_config` in its config.json. A quantized layer has three tensors in
place of its weight [out, in]:

    weight_packed   int32 [out, in * bits / 32]: the first input has the lowest bits; 8 or 128 is added to each integer
    weight_scale    [out, 1] for a scale per output, or [out, groups]
    weight_shape    [out, in]

`from_pretrained` would allocate the float weights first. Here, the model is built without any: its parameters are on
the "meta" device and have only a shape. Then the layers whose integers are in the folder become `QuantizedLinear`, one
after the other. Finally, the other tensors are read. So memory never holds more than the quantized weights and one
layer, apart from pages of the mapped files, which the operating system can drop.
"""

import threading
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .quantization import GROUP, QuantizedLinear

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
SUPPORTED = (
    f"load_model reads the format {FORMAT!r} of {METHOD} with symmetric integers of 4 or 8 bits and a scale for each "
    f"output or for a multiple of {GROUP} inputs, without an activation order and with activations in full precision"
)


def load_compressed(name: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder, or of a repository on the Hub, with the integers that it stores.

    Args:
        config: of this model; its `quantization_config` is removed, since the integers become layers of this course.

    Raises:
        ValueError: the integers are of another format, or a weight is missing or has another shape.
    """
    check_supported(config.quantization_config)
    del config.quantization_config
    folder = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
    tensors = _Tensors(folder)
    model = _without_weights(config, dtype)
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and (found := tensors.integers(path)) is not None:
            integers, scales, bits = found
            _check_shape(f"{path}.weight", integers, layer.weight.shape)
            try:
                quantized = QuantizedLinear.from_integers(integers, scales, bits, layer.bias, dtype)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            model.set_submodule(path, quantized)
    names: dict[torch.Tensor, list[str]] = {}  # several, if an LM head is tied to the embedding
    for key, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(key)
    floats = {}
    for tensor, aliases in names.items():
        found = next((found for key in aliases if (found := tensors.get(key)) is not None), None)
        if found is not None:
            _check_shape(aliases[0], found, tensor.shape)
            found = found.to(tensor.dtype)
            floats |= dict.fromkeys(aliases, nn.Parameter(found) if isinstance(tensor, nn.Parameter) else found)
        elif tensor.is_meta:
            raise ValueError(f"it has no tensor for {aliases[0]}, which {type(model).__name__} needs")
    model.load_state_dict(floats, strict=False, assign=True)
    return model.eval()


def check_supported(quantization: dict) -> None:
    """Raise a ValueError unless the `quantization_config` of a folder describes weights that `load_model` can keep."""
    format = quantization.get("format")
    found = [
        (format != FORMAT, f"the format {format!r}"),
        (quantization.get("kv_cache_scheme"), "a quantized KV cache"),
        ((quantization.get("transform_config") or {}).get("config_groups"), "transformed weights"),
        ((quantization.get("sparsity_config") or {}).get("format", "dense") != "dense", "sparse weights"),
    ]
    groups = quantization.get("config_groups")
    if not groups or not all(group and group.get("weights") for group in groups.values()):
        raise ValueError("the quantization_config of its config.json describes no weights")
    for group in groups.values():
        weights = group["weights"]
        kind, bits, strategy = (weights.get(name) for name in ("type", "num_bits", "strategy"))
        size, order = weights.get("group_size"), weights.get("actorder")
        found += [
            (group.get("input_activations") or group.get("output_activations"), "quantized activations"),
            (weights.get("type", "int") != "int" or bits not in (4, 8), f"weights of the type {kind} with {bits} bits"),
            (not weights.get("symmetric", True), "asymmetric weights"),
            (weights.get("dynamic"), "dynamic scales"),
            (order in (True, "group", "dynamic"), "an activation order"),  # others leave the order of the inputs
            (strategy not in ("channel", "group"), f"a scale per {strategy}"),
            (strategy == "group" and (size or 0) % GROUP, f"groups of {size} inputs"),
        ]
    if problems := [problem for is_found, problem in found if is_found]:
        raise ValueError(f"its weights are quantized with {', '.join(dict.fromkeys(problems))}; {SUPPORTED}")


class _Tensors:
    """The tensors of a folder."""

    def __init__(self, folder: str | Path):
        files = [safe_open(file, "pt") for file in sorted(Path(folder).glob("*.safetensors"))]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def get(self, name: str) -> torch.Tensor | None:
        return self._files[name].get_tensor(name) if name in self._files else None

    def integers(self, path: str) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Return a layer's int8 [out, in], its scales [out, groups] and the bits; None if its weight is of floats."""
        if (packed := self.get(f"{path}.weight_packed")) is None:
            return None
        shape, scales = self.get(f"{path}.weight_shape"), self.get(f"{path}.weight_scale")
        if shape is None or shape.shape != (2,) or shape.is_floating_point():
            raise ValueError(f"{path} needs a weight_shape of two integers")
        if scales is None or not scales.is_floating_point():
            raise ValueError(f"{path} needs a weight_scale of floats")
        if packed.dtype is not torch.int32 or packed.ndim != 2:
            raise ValueError(f"{path}.weight_packed is {packed.dtype} {list(packed.shape)}, not int32 [out, words]")
        inputs = int(shape[1])
        bits = 8 if packed.shape[1] == -(-inputs // 4) else 4
        return unpack_from_int32(packed, bits)[:, :inputs], scales, bits


def unpack_from_int32(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers, int8 [out, words * 32 / bits], of packed words."""
    codes = packed.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    return (codes - 2 ** (bits - 1)).view(torch.int8)


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
