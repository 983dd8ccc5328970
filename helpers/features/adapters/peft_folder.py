"""Read an adapter from a folder in PEFT's format, or say why it cannot be used.

A folder has two files. `adapter_config.json` says which layers are changed, and by which scaling.
`adapter_model.safetensors` has two matrices for each of them: A [rank, inputs] and B [outputs, rank]. What an adapter
may contain beyond that would have to change all rows of a pass (a trained embedding, a norm), or is another method than
LoRA. It is refused, and so is every setting that is not known here: it might change the numbers.
"""

import json
import math
import re
from dataclasses import dataclass
from hashlib import sha256
from numbers import Integral, Real
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import nn

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_WEIGHTS_BYTES = 2**20, 2**31
MAX_RANK, MAX_PATTERN = 512, 1000  # the most rows of A, and the most characters of a regular expression
PREFIX = "base_model.model."  # PEFT's name of the base model, which begins the name of every tensor

READ = {  # settings that are read below
    "peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "exclude_modules", "bias", "init_lora_weights",
}  # fmt: skip
WITHOUT_EFFECT = {  # settings of training, and names
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "auto_mapping",
    "peft_version", "layers_pattern", "megatron_core", "runtime_config", "eva_config", "corda_config", "loftq_config",
    "lora_ga_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
REASONS = {  # why other settings are refused
    "modules_to_save": "it has trained copies of whole modules, and rows of other adapters need the original ones",
    "trainable_token_indices": "it changes embeddings, which all rows share",
    "use_dora": "it is a DoRA, which also rescales the weights of the base model",
    "lora_bias": "it changes biases",
    "layer_replication": "it repeats layers of the base model",
    "target_parameters": "it changes parameters outside of linear layers",
    "alora_invocation_tokens": "it begins in the middle of a text, where its invocation tokens are",
}
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
        return max(len(one.a) for one in self.matrices.values())


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
    settings = LoRASettings(folder / CONFIG_FILE, config_bytes)
    try:
        tensors = load_safetensors(weights_bytes)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} is damaged ({error}): copy it again.") from error
    pairs = _pairs(tensors, model, layers)
    if missing := [path for path in layers if path not in pairs and settings.must_change(path, model)]:
        raise ValueError(
            f"{folder / WEIGHTS_FILE} has no matrices for {missing[0]}, which is among the target_modules of its "
            f"configuration: copy both files again."
        )
    digest = sha256(sha256(config_bytes).digest() + sha256(weights_bytes).digest()).digest()
    return Adapter({path: _checked(path, *pair, settings, layers[path]) for path, pair in pairs.items()}, digest)


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
    hint = ""
    if path.name == WEIGHTS_FILE and path.with_suffix(".bin").exists():
        hint = " Its .bin file is not read, because it could run any code: save it again with safetensors."
    raise ValueError(f"There is no file {path}: give a folder that PEFT's save_pretrained has written.{hint}")


class LoRASettings:
    """The configuration of an adapter.

    Args:
        path: of the file, for error messages.
        content: of the file.

    Raises:
        ValueError: it is no LoRA of linear layers, or a setting is not understood.
    """

    def __init__(self, path: Path, content: bytes):
        self.path = path
        try:
            settings = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON ({error}): copy it again.") from error
        if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
            found = settings.get("peft_type") if isinstance(settings, dict) else settings
            raise ValueError(f'{path} must describe a LoRA, with "peft_type": "LORA", not {_shortened(found)}.')
        for name, value in settings.items():
            if value and name not in READ | WITHOUT_EFFECT:
                reason = REASONS.get(name, "this setting is not known here, and may change what is computed")
                raise ValueError(f"{path} sets {name} to {_shortened(value)}, which is not supported: {reason}.")
        if settings.get("bias", "none") != "none":
            raise ValueError(f"{path} sets bias to {_shortened(settings['bias'])}: only adapters without biases work.")
        start = settings.get("init_lora_weights", True)
        if not isinstance(start, bool) and start not in TRAINED_START:
            raise ValueError(
                f"{path} sets init_lora_weights to {_shortened(start)}, with which PEFT changes the base model, too: "
                f"convert the adapter as PEFT's guide to this method says."
            )
        self.rank, self.alpha = self._integer(settings, "r"), self._number(settings.get("lora_alpha"), "lora_alpha")
        self.is_rslora = self._bool(settings, "use_rslora")
        self._bool(settings, "fan_in_fan_out")  # how PEFT merges: A and B are stored in the same way
        self.ranks, self.alphas = (self._patterns(settings, name) for name in ("rank_pattern", "alpha_pattern"))
        self.targets = settings.get("target_modules")
        if not self._are_targets(self.targets):
            raise ValueError(
                f"{path} must have target_modules, a list of names or a regular expression of at most {MAX_PATTERN} "
                f"characters, not {_shortened(self.targets)}."
            )
        self.is_partial = bool(settings.get("layers_to_transform") or settings.get("exclude_modules"))

    def must_change(self, path: str, model: nn.Module) -> bool:
        """Return whether the adapter must have matrices for a linear layer."""
        if self.is_partial:  # only some of the layers with these names
            return False
        if self.targets == "all-linear":
            return model.get_submodule(path) is not model.get_output_embeddings()
        if isinstance(self.targets, str):
            return self._matches(self.targets, path)
        return any(path == name or path.endswith(f".{name}") for name in self.targets)

    def rank_of(self, path: str) -> int:
        """Return the rank that a layer's matrices should have."""
        return int(self._of(path, self.ranks, self.rank))

    def scaling_of(self, path: str, rank: int) -> float:
        """Return the factor of a layer's product: alpha / rank, or with rsLoRA (Kalajdzievski, 2023) / its root."""
        return self._of(path, self.alphas, self.alpha) / (math.sqrt(rank) if self.is_rslora else rank)

    def _of(self, path: str, patterns: dict[str, float], default: float) -> float:
        """Return the number of the first pattern for a layer, as PEFT does."""
        return next((value for key, value in patterns.items() if self._matches(rf"(.*\.)?({key})", path)), default)

    def _matches(self, pattern: str, path: str) -> bool:
        try:
            return re.fullmatch(pattern, path) is not None
        except (re.error, RecursionError) as error:
            raise ValueError(f"{self.path} has a wrong regular expression, {pattern!r}: {error}.") from error

    def _patterns(self, settings: dict, name: str) -> dict[str, float]:
        patterns = settings.get(name) or {}
        if not isinstance(patterns, dict) or any(len(key) > MAX_PATTERN for key in patterns):
            raise ValueError(f"{self.path} must map names of modules to numbers in {name}, not {_shortened(patterns)}.")
        return {key: self._number(value, f"{name}[{key!r}]") for key, value in patterns.items()}

    def _are_targets(self, targets) -> bool:
        if isinstance(targets, str):
            return 0 < len(targets) <= MAX_PATTERN
        return isinstance(targets, list) and bool(targets) and all(isinstance(name, str) for name in targets)

    def _integer(self, settings: dict, name: str) -> int:
        value = settings.get(name)
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 < value <= MAX_RANK:
            raise ValueError(f"{self.path} must set {name} to an integer from 1 to {MAX_RANK}, not {value!r}.")
        return value

    def _number(self, value, name: str) -> float:
        if not isinstance(value, Real) or isinstance(value, bool) or not abs(value) < 1e9:
            raise ValueError(f"{self.path} must set {name} to a number, not {_shortened(value)}.")
        return float(value)

    def _bool(self, settings: dict, name: str) -> bool:
        value = settings.get(name) or False
        if not isinstance(value, bool):
            raise ValueError(f"{self.path} must set {name} to true or false, not {_shortened(value)}.")
        return value


def _pairs(tensors: dict[str, torch.Tensor], model: nn.Module, layers: dict[str, LayerInfo]) -> dict[str, tuple]:
    """Return the matrices A and B of each layer, by path."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, kind = name.removeprefix(PREFIX).partition(".lora_")
        if not name.startswith(PREFIX) or kind not in ("A.weight", "B.weight"):
            raise ValueError(f"The adapter has a tensor {name}, {_why_not(name, model)}: use one with LoRA alone.")
        if path not in layers:
            raise ValueError(f"The adapter changes {path}, {_why_not_layer(path, model)}.")
        found.setdefault(path, {})[kind[0]] = tensor
    for path, pair in found.items():
        if len(pair) < 2:
            raise ValueError(f"The adapter has only one of the two matrices for {path}: copy its files again.")
    if not found:
        raise ValueError("The adapter's file has no tensors: copy it again.")
    return {path: (pair["A"], pair["B"]) for path, pair in found.items()}


def _why_not(name: str, model: nn.Module) -> str:
    if "lora_magnitude_vector" in name:
        return "which belongs to a DoRA, and a DoRA rescales the weights of the base model, too"
    if "lora_embedding" in name:
        return "which changes an embedding, and all rows share the embeddings"
    if name.endswith(".bias"):
        return "a bias, which all rows share"
    if name.removeprefix(PREFIX) in model.state_dict():
        return "a trained copy of a weight that all rows share"
    return "which no LoRA of linear layers has"


def _why_not_layer(path: str, model: nn.Module) -> str:
    name = type(model).__name__
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return f"which {name} does not have: it was trained on another model"
    if layer is model.get_output_embeddings() or layer is model.get_input_embeddings():
        return "which all rows share, since it decides about the vocabulary: use an adapter of the other layers"
    return f"a {type(layer).__name__} that {name} does not call with all tokens of a pass: merge it into the model"


def _checked(path: str, a: torch.Tensor, b: torch.Tensor, settings: LoRASettings, layer: LayerInfo) -> LowRank:
    """Return the matrices of a layer as they are used, or raise a ValueError."""
    rank, shapes = settings.rank_of(path), (tuple(a.shape), tuple(b.shape))
    if shapes != ((rank, layer.inputs), (layer.outputs, rank)):
        raise ValueError(
            f"The adapter's matrices for {path} have the shapes {shapes}, and with rank {rank} this layer needs "
            f"{((rank, layer.inputs), (layer.outputs, rank))}: it was trained on another model, or its files do not "
            f"belong together."
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(f"The adapter's matrices for {path} are {a.dtype} and {b.dtype}, not floating-point numbers.")
    b = b.float() * settings.scaling_of(path, rank)
    a, b = (one.to(layer.device, layer.dtype) for one in (a, b.T.contiguous()))
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(
            f"The adapter's matrices for {path} have numbers that are infinite or NaN in {layer.dtype}: train or copy "
            f"it again."
        )
    return LowRank(a, b)


def _shortened(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
