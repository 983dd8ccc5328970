"""What the decoder blocks of a model family consist of, written down once; executors compute it.

All of these families add two updates to the hidden states in each block: first that of attention, then that of the MLP.
Each update begins with a norm of the hidden states, and in some families it ends with a norm, too. The families differ
in the kinds of their parts and in the names that transformers gives them.
"""

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from . import kernels


@dataclass(frozen=True)
class Family:
    """The parts of a family's models, by name. The names of a block's parts begin at the block.

    Attributes:
        types: the `model_type` of these models.
        base: the model without its LM head; `embedding`, `final_norm` and `blocks` are parts of it.
        learned_positions, rotary: the part of the base that embeds positions, or that computes cos and sin of them.
        norm_kind: of all norms, as the kernels number them.
        attention_post_norm, mlp_post_norm: the norms of an update, if there are any.
        qkv: the layers whose outputs, one after the other, are queries, keys and values.
        is_interleaved: whether the query, key and value of a head are neighbors instead.
        scales_queries: whether the model scales queries before attention, which does so in executors.
        is_parallel: whether the MLP reads the hidden states without attention's update.
        query_norm, key_norm: the norms of each head's queries and keys, if there are any.
        mlp_inputs: the layers whose outputs are the inputs of the activation, followed by its factors if `is_gated`.
        dropouts: parts that do nothing while a model generates.
    """

    types: frozenset[str]
    base: str
    embedding: str
    blocks: str
    final_norm: str
    norm_kind: int
    attention_norm: str
    qkv: tuple[str, ...]
    attention_output: str
    mlp_norm: str
    mlp_inputs: tuple[str, ...]
    activation: str
    mlp_output: str
    is_gated: bool = False
    is_parallel: bool = False
    is_interleaved: bool = False
    scales_queries: bool = False
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    learned_positions: str | None = None
    rotary: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    dropouts: frozenset[str] = frozenset()


GPT2 = Family(
    frozenset({"gpt2"}),
    base="transformer",
    embedding="wte",
    learned_positions="wpe",
    blocks="h",
    final_norm="ln_f",
    norm_kind=kernels.LAYER_NORM,
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    attention_output="attn.c_proj",
    mlp_norm="ln_2",
    mlp_inputs=("mlp.c_fc",),
    activation="mlp.act",
    mlp_output="mlp.c_proj",
    dropouts=frozenset({"drop", "attn.attn_dropout", "attn.resid_dropout", "mlp.dropout"}),
)
LLAMA = Family(
    frozenset({"llama", "mistral", "qwen2"}),
    base="model",
    embedding="embed_tokens",
    rotary="rotary_emb",
    blocks="layers",
    final_norm="norm",
    norm_kind=kernels.RMS_NORM,
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    is_gated=True,
    activation="mlp.act_fn",
    mlp_output="mlp.down_proj",
)
FAMILIES = (
    GPT2,
    LLAMA,
    replace(LLAMA, types=frozenset({"qwen3"}), query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    replace(LLAMA, types=frozenset({"gemma"}), norm_kind=kernels.ZERO_CENTERED_RMS_NORM),
    replace(
        LLAMA,
        types=frozenset({"gemma3_text"}),
        norm_kind=kernels.ZERO_CENTERED_RMS_NORM,
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    replace(
        LLAMA,
        types=frozenset({"phi3"}),
        qkv=("self_attn.qkv_proj",),
        mlp_inputs=("mlp.gate_up_proj",),
        activation="mlp.activation_fn",
        dropouts=frozenset({"resid_attn_dropout", "resid_mlp_dropout"}),
    ),
    replace(
        LLAMA,
        types=frozenset({"starcoder2"}),
        norm_kind=kernels.LAYER_NORM,
        mlp_inputs=("mlp.c_fc",),
        is_gated=False,
        activation="mlp.act",
        mlp_output="mlp.c_proj",
    ),
    replace(
        LLAMA,
        types=frozenset({"phi"}),
        final_norm="final_layernorm",
        norm_kind=kernels.LAYER_NORM,
        is_parallel=True,
        attention_output="self_attn.dense",
        mlp_norm="input_layernorm",
        mlp_inputs=("mlp.fc1",),
        is_gated=False,
        activation="mlp.activation_fn",
        mlp_output="mlp.fc2",
        dropouts=frozenset({"embed_dropout", "resid_dropout"}),
    ),
    Family(
        frozenset({"gpt_neox"}),
        base="gpt_neox",
        embedding="embed_in",
        rotary="rotary_emb",
        blocks="layers",
        final_norm="final_layer_norm",
        norm_kind=kernels.LAYER_NORM,
        is_parallel=True,
        is_interleaved=True,
        attention_norm="input_layernorm",
        qkv=("attention.query_key_value",),
        attention_output="attention.dense",
        mlp_norm="post_attention_layernorm",
        mlp_inputs=("mlp.dense_h_to_4h",),
        activation="mlp.act",
        mlp_output="mlp.dense_4h_to_h",
        dropouts=frozenset({"emb_dropout", "post_attention_dropout", "post_mlp_dropout"}),
    ),
    Family(
        frozenset({"opt"}),
        base="model.decoder",
        embedding="embed_tokens",
        learned_positions="embed_positions",
        blocks="layers",
        final_norm="final_layer_norm",
        norm_kind=kernels.LAYER_NORM,
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        scales_queries=True,
        attention_output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        mlp_inputs=("fc1",),
        activation="activation_fn",
        mlp_output="fc2",
    ),
)
ACTIVATIONS = MappingProxyType(
    {NewGELUActivation: kernels.TANH_GELU, GELUTanh: kernels.TANH_GELU}
    | {SiLUActivation: kernels.SILU, nn.SiLU: kernels.SILU}
    | {GELUActivation: kernels.GELU, nn.ReLU: kernels.RELU}
)


@dataclass
class Block:
    """The modules of a block, as `Family` names them."""

    attention_norm: nn.Module
    qkv: tuple[nn.Module, ...]
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    attention_output: nn.Module
    attention_post_norm: nn.Module | None
    mlp_norm: nn.Module
    mlp_post_norm: nn.Module | None
    mlp_inputs: tuple[nn.Module, ...]
    activation: nn.Module
    mlp_output: nn.Module

    @property
    def linears(self) -> list[nn.Module]:
        """The linear layers, in the order in which they compute."""
        return [*self.qkv, self.attention_output, *self.mlp_inputs, self.mlp_output]

    @property
    def norms(self) -> dict[str, nn.Module]:
        """The norms, by name."""
        return {name: norm for name in kernels.NORMS if (norm := getattr(self, name)) is not None}


@dataclass
class Decoder:
    """The modules of a model, as `Family` names them, and its heads. The modules must not be replaced later.

    Attributes:
        paths: where the model has each linear layer of the blocks.
        rotations: which kind of rotary positions each block has, among those of `rotation_kinds`.
        rotation_kinds: the names of the kinds, if there are several.
    """

    family: Family
    embedding: nn.Module
    learned_positions: nn.Module | None
    rotary: nn.Module | None
    blocks: list[Block]
    final_norm: nn.Module
    head: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    paths: dict[nn.Module, str]
    rotations: list[int]
    rotation_kinds: list[str]


def describe(model: nn.Module, family: Family) -> Decoder:
    """Return the parts of a model of this family. Raise an AttributeError if one is missing."""

    def parts(module: nn.Module, kind: type) -> dict:
        """Return the parts that a `Block` or a `Decoder` names, and that the family has names for."""
        paths = {field.name: getattr(family, field.name) for field in fields(kind) if hasattr(family, field.name)}
        return {name: _part(module, path) for name, path in paths.items() if name != "blocks"}

    base, config = model.get_submodule(family.base), model.config
    heads = config.num_attention_heads
    blocks = [Block(**parts(block, Block)) for block in getattr(base, family.blocks)]
    path_of = {module: path for path, module in model.named_modules()}
    kinds = getattr(base.get_submodule(family.rotary), "layer_types", []) if family.rotary else []
    return Decoder(
        family,
        blocks=blocks,
        head=model.get_output_embeddings(),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        paths={layer: path_of[layer] for block in blocks for layer in block.linears},
        rotations=[kinds.index(kind) for kind in config.layer_types] if kinds else [0] * len(blocks),
        rotation_kinds=kinds,
        **parts(base, Decoder),
    )


def _part(module: nn.Module, path: str | tuple[str, ...] | None) -> Any:
    if isinstance(path, tuple):
        return tuple(map(module.get_submodule, path))
    return None if path is None else module.get_submodule(path)


def activation_kind(activation: nn.Module) -> int | None:
    """Return the number by which the kernels know an activation, or None if they do not compute it."""
    if type(activation) is nn.GELU and activation.approximate == "tanh":
        return kernels.TANH_GELU
    return ACTIVATIONS.get(type(activation))


def epsilon(norm: nn.Module) -> float:
    """Return the number that a norm adds to the variance."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
