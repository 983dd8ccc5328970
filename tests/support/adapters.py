"""LoRA adapters in PEFT's format, and the models that they stand for: those with the adapter merged into the weights.

Merging reads the folder by itself, so it can judge what the package has read.
"""

import copy
import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

TARGETS = {  # by family: attention alone, the MLP alone, both, and a regular expression
    "gpt2": [["c_attn"], ["c_fc", "mlp.c_proj"], ["c_attn", "c_proj", "c_fc"], r".*\.0\.(attn|mlp)\.c_\w+"],
    "llama": [["q_proj", "v_proj"], ["gate_proj", "down_proj"], "all-linear", r"model\.layers\.1\..*_proj"],
}
AS_PEFT_WRITES = {  # the other settings of an `adapter_config.json` that PEFT 0.21.2 has written
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": None, "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_ga_config": None,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


def linears(model) -> dict[str, nn.Module]:
    """Return the linear layers that PEFT's "all-linear" means, by path."""
    head = model.get_output_embeddings()
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    }


def is_target(path: str, targets) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in targets)


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the inputs and outputs of a layer."""
    return tuple(layer.weight.shape) if isinstance(layer, Conv1D) else tuple(layer.weight.shape[::-1])


def write_adapter(folder: Path, model, targets, seed: int = 0, rank: int = 4, scale: float = 1.0, **settings) -> Path:
    """Write an adapter with random matrices, whose update of a weight is about as large as the weight times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    own_settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "lora_dropout": 0.1}
    config = AS_PEFT_WRITES | own_settings | settings
    tensors = {}
    for path, layer in linears(model).items():
        if is_target(path, targets):
            (inputs, outputs), own = sizes(layer), pattern(config["rank_pattern"], path, rank)
            a, b = torch.randn(own, inputs, generator=generator), torch.randn(outputs, own, generator=generator)
            size = scale * layer.weight.std().item() / math.sqrt(own) / scaling(config, own)
            tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b * size}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pattern(patterns: dict[str, int], path: str, default: int) -> int:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def scaling(config: dict, rank: int) -> float:
    return config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)


def merged(model, folder: Path | None):
    """Return a copy of a model with an adapter's products added to its weights; the model itself without an adapter."""
    if folder is None:
        return model
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, model = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            path, b = name.split(".lora_A")[0].removeprefix("base_model.model."), tensors[name.replace("_A.", "_B.")]
            update, layer = scaling(config, len(a)) * (b.double() @ a.double()), model.get_submodule(path)
            with torch.no_grad():
                layer.weight += (update.T if isinstance(layer, Conv1D) else update).to(layer.weight.dtype)
    return model
