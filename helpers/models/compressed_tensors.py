"""Save and load quantized models as folders in the format `pack-quantized` of compressed-tensors.

That is a Hugging Face folder with a `quantization_config` in its config.json. A quantized layer has three tensors in
place of its weight [out, in]:

    weight_packed   int32 [out, in * bits / 32]: the first input has the lowest bits; 8 or 128 is added to each integer
    weight_scale    [out, 1] for a scale per output, or [out, groups]
    weight_shape    [out, in]

The package `compressed-tensors` turns them into the same weights, and with it transformers loads such a folder. There
is one exception: the format has no place for GPT-2's `Conv1D`. Its layers are stored like all others, [out, in], which
`load_model` reads. transformers does not: it reports them as missing and initializes them at random.
"""

import copy
import os
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import safe_open
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from .assembly import Integers
from .quantization import GROUP, QuantizedLinear

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
SUPPORTED = (
    f"load_model reads the format {FORMAT!r} of {METHOD} with symmetric integers of 4 or 8 bits and a scale for each "
    f"output or for a multiple of {GROUP} inputs, without an activation order and with activations in full precision"
)


def save_quantized(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """Save a quantized model and its tokenizer as a folder that `load_model` and other libraries read.

    No number changes: `load_model(folder)` returns the same integers and scales. Scales are saved in the wider of
    their dtype and the model's, so that another library does not round integer times scale to fewer bits.

    Args:
        model: a quantized model, for instance from `load_model(name, weights="int4")`.

    Raises:
        ValueError: the model has no quantized layers, or the groups of a layer do not divide its inputs.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    if not layers:
        raise ValueError(f'{type(model).__name__} is not quantized. Load it with load_model(..., weights="int8").')
    own = {f"{path}.{name}" for path in layers for name in ("words", "scales")}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in own}
    for path, layer in layers.items():
        if layer.in_features % (layer.format.group or 1):
            raise ValueError(
                f"{path} has {layer.in_features} inputs, which the format cannot divide into groups of "
                f'{layer.format.group}. Load the model with weights="int8", which has no groups.'
            )
        integers, scales = layer.integers_and_scales()
        tensors[f"{path}.weight_packed"] = pack_to_int32(integers, layer.format.bits)
        tensors[f"{path}.weight_scale"] = scales.to(torch.promote_types(scales.dtype, layer.dtype)).clone()
        tensors[f"{path}.weight_shape"] = torch.tensor(integers.shape)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, folder)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    if isinstance(model.get_output_embeddings(), QuantizedLinear):
        config.tie_word_embeddings = False  # the head has integers of its own
    config.quantization_config = _quantization_config(model, layers)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _quantization_config(model: nn.Module, layers: dict[str, QuantizedLinear]) -> dict:
    """Return the description of all quantized layers, and the names of the linear layers that are not."""
    paths: dict[tuple[int, int | None], list[str]] = {}
    for path, layer in layers.items():
        paths.setdefault((layer.format.bits, layer.format.group), []).append(path)
    groups = {}
    for (bits, group), targets in paths.items():
        weights = {"type": "int", "num_bits": bits, "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        targets = targets if len(paths) > 1 else ["Linear"]
        groups[f"group_{len(groups)}"] = {"targets": targets, "weights": weights, "input_activations": None}
    kept = [path for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept,
    }


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


class CompressedTensors:
    """The tensors of a folder, or of a repository on the Hub; see `assembly.Checkpoint`."""

    def __init__(self, name: str, quantization: dict):
        check_supported(quantization)
        folder = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
        files = [safe_open(file, "pt") for file in sorted(Path(folder).glob("*.safetensors"))]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> torch.Tensor | None:
        return self._files[name].get_tensor(name) if name in self._files else None

    def integers(self, path: str) -> Integers | None:
        if (packed := self.tensor(f"{path}.weight_packed")) is None:
            return None
        shape, scales = self.tensor(f"{path}.weight_shape"), self.tensor(f"{path}.weight_scale")
        if shape is None or shape.shape != (2,) or shape.is_floating_point():
            raise ValueError(f"{path} needs a weight_shape of two integers")
        if scales is None or not scales.is_floating_point():
            raise ValueError(f"{path} needs a weight_scale of floats")
        if packed.dtype is not torch.int32 or packed.ndim != 2:
            raise ValueError(f"{path}.weight_packed is {packed.dtype} {list(packed.shape)}, not int32 [out, words]")
        inputs = int(shape[1])
        bits = 8 if packed.shape[1] == -(-inputs // 4) else 4
        return Integers(unpack_from_int32(packed, bits)[:, :inputs], scales, bits)


def pack_to_int32(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 [out, in * bits / 32] of integers [out, in]; the last word may have zeros at its end."""
    codes = integers.contiguous().view(torch.uint8) + 2 ** (bits - 1)  # modulo 256
    codes = pad(codes, (0, -integers.shape[1] % (32 // bits)))
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.int32)


def unpack_from_int32(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers, int8 [out, words * 32 / bits], of packed words."""
    codes = packed.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    return (codes - 2 ** (bits - 1)).view(torch.int8)
