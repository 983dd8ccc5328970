"""Read an adapter from a folder in PEFT's format, or say why it cannot be used.

A folder has two files. `adapter_config.json` has the scaling, among many settings of training.
`adapter_model.safetensors` has two matrices for each layer that is changed: A [rank, inputs] and B [outputs, rank].
What an adapter may contain beyond that would have to change all rows of a pass (a trained embedding, a norm), or is
another method than LoRA. It is refused, and so is every setting that is not known here: it might change the numbers.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import nn

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_WEIGHTS_BYTES = 2**20, 2**31
MAX_RANK = 512  # the most rows of A
PREFIX = "base_model.model."  # PEFT's name of the base model, which begins the name of every tensor

READ = {"peft_type", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}  # settings that are read below
WITHOUT_EFFECT = {  # settings of training, names, and what the shapes and the names of the matrices tell, too
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping",
    "peft_version", "layers_pattern", "megatron_core", "runtime_config", "eva_config", "corda_config", "loftq_config",
    "lora_ga_config", "qalora_group_size", "ensure_weight_tying", "fan_in_fan_out", "r", "rank_pattern",
    "target_modules", "exclude_modules", "layers_to_transform",
}  # fmt: skip
TRAINED_START = ("gaussian", "eva", "orthogonal")  # starts of A and B that leave the base model's weights as they are


@dataclass(frozen=True)
class LayerInfo:
    """What has to fit: a layer's numbers of inputs and outputs, its dtype and its device."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to a layer: x becomes x @ a.T @ b.

    Attributes:
        a: [rank, inputs].
        b: [rank, outputs], with the scaling.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that fits a model.

    Attributes:
        matrices: for each layer that it changes, by path.
        digest: a hash of its files: adapters with the same digest compute the same.
    """

    matrices: dict[str, LowRank]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest rank in any layer."""
        return max(len(pair.a) for pair in self.matrices.values())


def read_adapter(folder: str | Path, model: nn.Module, layers: dict[str, LayerInfo]) -> Adapter:
    """Read an adapter.

    Args:
        folder: has the two files.
        model: the base model.
        layers: those of its layers that an adapter may change, by path.

    Raises:
        ValueError: the files are missing, damaged or too large, the adapter is for another model, or it changes more
            than linear layers; the message says what to do.
    """
    folder = Path(folder)
    config_bytes, weights_bytes = (
        _content(folder / name, limit)
        for name, limit in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_WEIGHTS_BYTES))
    )
    scaling_of = _read_scaling(folder / CONFIG_FILE, config_bytes)
    try:
        tensors = load_safetensors(weights_bytes)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} is damaged ({error}): copy it again.") from error
    pairs = _pairs(tensors, model, layers)
    digest = sha256(sha256(config_bytes).digest() + sha256(weights_bytes).digest()).digest()
    return Adapter({path: _checked(path, *pair, scaling_of, layers[path]) for path, pair in pairs.items()}, digest)


def _content(path: Path, limit: int) -> bytes:
    """Return the content of a file. A device or a pipe could be read without end, so it is none."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                content = file.read(limit + 1)
            if len(content) <= limit:
                return content
            raise ValueError(f"{path} has more than {limit} bytes, the most that an adapter's file may have.")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    raise ValueError(f"There is no file {path}: give a folder that PEFT's save_pretrained has written.")


def _read_scaling(path: Path, content: bytes) -> Callable[[int], float]:
    """Return what gives the factor of a layer's product for its rank.

    The factor is alpha / rank, or with rsLoRA (Kalajdzievski, 2023) alpha / its root.

    Args:
        path: of the configuration, for error messages.
        content: of this file.

    Raises:
        ValueError: it is no LoRA of linear layers, or a setting is not understood.
    """
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again.") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        found = settings.get("peft_type") if isinstance(settings, dict) else settings
        raise ValueError(f'{path} must describe a LoRA, with "peft_type": "LORA", not {_shortened(found)}.')
    others = {name: value for name, value in settings.items() if value and name not in READ | WITHOUT_EFFECT}
    if settings.get("bias", "none") != "none":
        others["bias"] = settings["bias"]
    start = settings.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in TRAINED_START:  # with others, PEFT changes the base model, too
        others["init_lora_weights"] = start
    if others:
        name, value = next(iter(others.items()))
        raise ValueError(
            f"{path} sets {name} to {_shortened(value)}, which is not supported: it may change more than a LoRA of "
            f"linear layers does."
        )
    alpha, is_rslora = settings.get("lora_alpha"), bool(settings.get("use_rslora"))
    if not isinstance(alpha, Real) or isinstance(alpha, bool) or not abs(alpha) < 1e9:
        raise ValueError(f"{path} must set lora_alpha to a number, not {_shortened(alpha)}.")
    return lambda rank: alpha / (math.sqrt(rank) if is_rslora else rank)


def _pairs(tensors: dict[str, torch.Tensor], model: nn.Module, layers: dict[str, LayerInfo]) -> dict[str, tuple]:
    """Return the matrices A and B of each layer, by path."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, kind = name.removeprefix(PREFIX).partition(".lora_")
        if not name.startswith(PREFIX) or kind not in ("A.weight", "B.weight"):
            raise ValueError(
                f"The adapter has a tensor {name}, which no LoRA of linear layers has: use one that changes no "
                f"embeddings, norms or biases."
            )
        if path not in layers:
            raise ValueError(f"The adapter changes {path}, {_why_not(path, model)}.")
        found.setdefault(path, {})[kind[0]] = tensor
    for path, pair in found.items():
        if len(pair) < 2:
            raise ValueError(f"The adapter has only one of the two matrices for {path}: copy its files again.")
    if not found:
        raise ValueError("The adapter's file has no tensors: copy it again.")
    return {path: (pair["A"], pair["B"]) for path, pair in found.items()}


def _why_not(path: str, model: nn.Module) -> str:
    name = type(model).__name__
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return f"which {name} does not have: it was trained on another model"
    return f"a {type(layer).__name__} that {name} does not call with all tokens of a pass: merge it into the model"


def _checked(
    path: str, a: torch.Tensor, b: torch.Tensor, scaling_of: Callable[[int], float], layer: LayerInfo
) -> LowRank:
    """Return the matrices of a layer as they are used, or raise a ValueError."""
    rank, shapes = a.shape[0] if a.ndim else 0, (tuple(a.shape), tuple(b.shape))
    if shapes != ((rank, layer.inputs), (layer.outputs, rank)):
        raise ValueError(
            f"The adapter's matrices for {path} have the shapes {shapes}, and with rank {rank} this layer needs "
            f"{((rank, layer.inputs), (layer.outputs, rank))}: it was trained on another model."
        )
    if not 0 < rank <= MAX_RANK:
        raise ValueError(f"The adapter has rank {rank} for {path}, and ranks from 1 to {MAX_RANK} are possible.")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(f"The adapter's matrices for {path} are {a.dtype} and {b.dtype}, not floating-point numbers.")
    b = b.float() * scaling_of(rank)
    a, b = (matrix.to(layer.device, layer.dtype) for matrix in (a, b.T.contiguous()))
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(
            f"The adapter's matrices for {path} have numbers that are infinite or NaN in {layer.dtype}: train or copy "
            f"it again."
        )
    return LowRank(a, b)


def _shortened(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
