"""How a family is split, and the share of a model that one process holds.

transformers has a plan for most families, with a style for each layer. GPT-2 has none; its plan is below. A fused
layer, such as one that computes queries, keys and values, is split part by part.
"""

import re
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...models import clone_sharing_weights
from ...models.integer_products import IntegerLinear
from ...models.quantization import QuantizedLinear, sizes_of

GPT2 = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn": "colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
COLUMNS, ROWS = {"colwise", "packed_colwise"}, {"rowwise"}
UNSPLIT = {"replicated_with_grad_allreduce"}  # one norm for each head
# transformers does not split these inside: it gathers the first one's output. Here they are split part by part.
FUSED = {"qkv_proj", "c_attn", "gate_up_proj"}
FUSED_STYLES = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size")


@dataclass
class Share:
    """What one process gets.

    Attributes:
        model: a model of the same modules, with slices of the weights.
        sums: paths of the modules whose results are partial; the sum over the processes is the result.
        vocabulary: the path of the embedding, and the first token that the process has; None if it has all of them.
    """

    model: nn.Module
    sums: list[str] = field(default_factory=list)
    vocabulary: tuple[str, int] | None = None


def split_styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each module or parameter that is split, by its path, in the model's order.

    Raises:
        ValueError: the family has no plan, or one that cannot be followed here; or layers round their inputs.
    """
    if any(isinstance(module, IntegerLinear) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} rounds all inputs of a layer with one scale, and several processes would each "
            f'round a part of them: leave out compute="int8", or use tensor_parallel_size=1.'
        )
    config = model.config.get_text_config()
    plan = GPT2 if config.model_type == "gpt2" else dict(getattr(model, "tp_plan", None) or {})
    if not any(style in ROWS or style == "rowwise_split_input" for style in plan.values()):
        raise ValueError(
            f"{type(model).__name__} has no plan of how to split its layers: use tensor_parallel_size=1, or a family "
            f"for which transformers has a `base_model_tp_plan`."
        )
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    paths = [path for path, _ in model.named_modules()] + [path for path, _ in model.named_parameters()]
    styles = {}
    for path in paths:
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), None)
        if style is None or style in UNSPLIT:
            continue
        siblings = path.rpartition(".")[0]
        is_fused = any(f"{siblings}.{name}" in paths for name in FUSED)
        if style in FUSED_STYLES and path != "lm_head" and is_fused:
            style = FUSED_STYLES[style]
        known = COLUMNS | ROWS | {"embedding_rowwise", "moe_tp_experts"}
        if style not in known and path != "lm_head":
            raise ValueError(
                f"{type(model).__name__} cannot be split here: transformers' plan calls for {style!r} at {path}. Use "
                f"tensor_parallel_size=1."
            )
        styles[path] = style
    return styles


def check_divides(model: nn.Module, size: int) -> None:
    """Raise a ValueError unless heads and key-value heads can be shared out equally."""
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if count is not None and count % size:
            raise ValueError(
                f"{type(model).__name__} has {name}={count}, which {size} processes cannot share equally: choose a "
                f"tensor_parallel_size that divides it."
            )


def share_of(model: nn.Module, rank: int, size: int) -> Share:
    """Return the share of one process; the model stays as it is.

    Args:
        model: a causal LM of transformers, whose linear layers may be quantized.
        rank: the number of the process, from 0.
        size: the number of processes.

    Raises:
        ValueError: the model cannot be split this way.
    """
    styles = split_styles(model)
    share = Share(clone_sharing_weights(model))
    config = share.model.config.get_text_config()
    cut = _Cut(rank, size)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    modules = dict(share.model.named_modules())
    for path, style in styles.items():
        module = modules.get(path)
        name = path.rpartition(".")[2]
        if module is None:
            parent = share.model.get_submodule(path.rpartition(".")[0])
            weight = getattr(parent, name)
            parts = 2 if style == "packed_colwise" else 1
            dim = -2 if style in COLUMNS else -1  # of experts: [experts, out, in]
            setattr(parent, name, nn.Parameter(cut(path, weight, dim, _equal_parts(weight.shape[dim], parts)), False))
        elif style == "moe_tp_experts":
            share.sums.append(path)
        elif style == "embedding_rowwise":
            first = torch.arange(len(module.weight)).tensor_split(size)[rank][0].item()
            module.weight = nn.Parameter(cut(path, module.weight, 0, (len(module.weight),), exact=False), False)
            module.num_embeddings, module.padding_idx = len(module.weight), None
            share.vocabulary = path, first
        elif path == "lm_head":
            own = _linear(cut, path, module, 0, (module.out_features,), exact=False)
            if tied and share.vocabulary is not None and not isinstance(own, QuantizedLinear):
                own.weight = share.model.get_input_embeddings().weight
            share.model.set_submodule(path, own)
        else:
            dim = 0 if style in COLUMNS else 1
            outputs, inputs = sizes_of(module)
            parts = _parts(name, config, outputs) if dim == 0 else (inputs,)
            share.model.set_submodule(path, _linear(cut, path, module, dim, parts))
            if dim == 1:
                share.sums.append(path)
    _divide_heads(share.model, styles, size)
    return share


@dataclass
class _Cut:
    """Cuts one process's share out of tensors."""

    rank: int
    size: int

    def __call__(self, path: str, tensor: torch.Tensor, dim: int, parts: tuple[int, ...], exact=True) -> torch.Tensor:
        """Return the share of each part along a dimension, joined; `parts` are the sizes of the parts."""
        if exact and any(part % self.size for part in parts):
            raise ValueError(
                f"{path} has {'+'.join(map(str, parts))} numbers to share, which {self.size} processes cannot share "
                f"equally: choose another tensor_parallel_size."
            )
        pieces = tensor.detach().split(parts, dim)
        return torch.cat([piece.tensor_split(self.size, dim)[self.rank] for piece in pieces], dim).contiguous().clone()


def _linear(cut: _Cut, path: str, layer: nn.Module, dim: int, parts: tuple[int, ...], exact=True) -> nn.Module:
    """Return the share of a linear layer: of its outputs (dim 0), or of its inputs (dim 1)."""
    if isinstance(layer, QuantizedLinear):
        return _quantized(cut, path, layer, dim, parts, exact)
    is_conv1d = isinstance(layer, Conv1D)  # its weight is [in, out]
    layer.weight = nn.Parameter(cut(path, layer.weight, 1 - dim if is_conv1d else dim, parts, exact), False)
    layer.bias = _bias(cut, path, layer.bias, dim, parts)
    outputs, inputs = layer.weight.shape[::-1] if is_conv1d else layer.weight.shape
    if is_conv1d:
        layer.nf, layer.nx = outputs, inputs
    else:
        layer.out_features, layer.in_features = outputs, inputs
    return layer


def _quantized(
    cut: _Cut, path: str, layer: QuantizedLinear, dim: int, parts: tuple[int, ...], exact: bool
) -> QuantizedLinear:
    """Return the share of a quantized layer: the same integers, whose groups must not be cut."""
    integers, scales = layer.integers_and_scales()
    groups = scales.shape[1]
    own = cut(path, integers, dim, parts, exact)
    if dim == 0:
        scales = cut(path, scales, 0, parts, exact)
    elif groups > 1:
        scales = cut(f"{path} (groups of scales)", scales, 1, (groups,))
    bias = _bias(cut, path, layer.bias, dim, parts)
    made = QuantizedLinear.from_integers(own, scales, layer.format.bits, bias, layer.dtype)
    made.is_transposed = layer.is_transposed
    return made


def _bias(cut: _Cut, path: str, bias, dim: int, parts) -> nn.Parameter | None:
    """Return the share of a bias. That of a row-split layer is added once: process 0 has it, the others have zeros."""
    if bias is None:
        return None
    own = cut(path, bias, 0, parts, False) if dim == 0 else bias.detach() * (cut.rank == 0)
    return nn.Parameter(own.clone(), False)


def _divide_heads(model: nn.Module, styles: dict[str, str], size: int) -> None:
    """Tell the attention modules, and the configuration that they read, how many heads they have."""
    config = model.config.get_text_config()
    if config.to_dict().get("head_dim") is None:
        config.head_dim = config.hidden_size // config.num_attention_heads  # read by some rotary embeddings
    for parent in {path.rpartition(".")[0] for path, style in styles.items() if style in ROWS}:
        module = model.get_submodule(parent)
        for name in HEAD_COUNTS:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(module, name) // size)
    names = {"num_attention_heads", "num_key_value_heads"}
    for name in {config.attribute_map.get(name, name) for name in names}:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, getattr(config, name) // size)


def _parts(name: str, config, outputs: int) -> tuple[int, ...]:
    """Return the sizes of the parts of a layer's outputs."""
    if name == "c_attn":
        return _equal_parts(outputs, 3)
    if name == "gate_up_proj":
        return _equal_parts(outputs, 2)
    if name == "qkv_proj":
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = outputs // (heads + 2 * kv_heads)
        return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    return (outputs,)


def _equal_parts(whole: int, count: int) -> tuple[int, ...]:
    return (whole // count,) * count
