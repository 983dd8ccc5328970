"""Recognise the models whose forward pass is written out in `lean.py`.

Four conditions must hold. The model is of a type whose code was compared with the lean forward: others may have the
same modules, and differ where a short trial does not look, in far positions or large activations. The modules that are
bypassed are transformers' own, with the children and attributes that are known. No hook is registered on a module that
is not called. And on a trial with two sequences, chunks and decodes included, both ways give the same logits up to
rounding. On the way, the trial notes what each layer asks of attention: its window, its scaling.
"""

import copy
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..models import same_logits
from .kv_pool import KVPool
from .lean import GPT2Forward, LeanForward, LlamaForward
from .trial import BLOCK_SIZE, NUM_BLOCKS, trial_passes

# The attributes that a module of a block may have. Those that change its numbers are asked for on the trial.
KNOWN_ATTRIBUTES = (
    {"attention_type", "config", "eps", "elementwise_affine", "hidden_size", "intermediate_size", "normalized_shape"}
    | {"attention_dropout", "head_dim", "is_causal", "layer_idx", "layer_type", "num_key_value_groups", "scaling"}
    | {"embed_dim", "is_cross_attention", "num_heads", "pruned_heads", "scale_attn_by_inverse_layer_idx"}
    | {"reorder_and_upcast_attn", "scale_attn_weights", "sliding_window", "split_size", "variance_epsilon"}
)


@dataclass(frozen=True)
class Structure:
    """How the models that a lean forward knows are made.

    Attributes:
        forward: their lean forward.
        types: the `model_type` of these models.
        base: the name of the model without its LM head; `children`: those of the base.
        blocks, norm: the children of the base that hold the blocks and the last norm.
        block: the children of a block (under "") and of its bypassed modules.
    """

    forward: type[LeanForward]
    types: set[str]
    base: str
    children: set[str]
    blocks: str
    norm: str
    block: dict[str, set[str]]


GPT2 = Structure(
    GPT2Forward,
    types={"gpt2"},
    base="transformer",
    children={"drop", "h", "ln_f", "wpe", "wte"},
    blocks="h",
    norm="ln_f",
    block={
        "": {"attn", "ln_1", "ln_2", "mlp"},
        "attn": {"attn_dropout", "c_attn", "c_proj", "resid_dropout"},
        "mlp": {"act", "c_fc", "c_proj", "dropout"},
        "ln_1": set(),
        "ln_2": set(),
    },
)
LLAMA = Structure(
    LlamaForward,
    types={"llama", "mistral", "qwen2", "gemma"},
    base="model",
    children={"embed_tokens", "layers", "norm", "rotary_emb"},
    blocks="layers",
    norm="norm",
    block={
        "": {"input_layernorm", "mlp", "post_attention_layernorm", "self_attn"},
        "self_attn": {"k_proj", "o_proj", "q_proj", "v_proj"},
        "mlp": {"act_fn", "down_proj", "gate_proj", "up_proj"},
        "input_layernorm": set(),
        "post_attention_layernorm": set(),
    },
)
QWEN3_BLOCK = LLAMA.block | {"self_attn": LLAMA.block["self_attn"] | {"k_norm", "q_norm"}}
QWEN3 = replace(LLAMA, types={"qwen3"}, block=QWEN3_BLOCK)


def recognise(runner) -> LeanForward | None:
    """Return the lean forward of a ragged runner's model, or None if the model must be called as usual."""
    structure = next((one for one in (GPT2, LLAMA, QWEN3) if _has_structure(runner.model, one)), None)
    if structure is None or runner.model.training:
        return None
    lean = structure.forward(runner.model, runner.compiled)
    if lean.is_hooked():
        return None
    usual, trial = copy.copy(runner), copy.copy(runner)
    usual.lean, trial.lean = None, lean
    for one in (usual, trial):
        one.pool, one.block_size = KVPool(NUM_BLOCKS, BLOCK_SIZE), BLOCK_SIZE
    try:
        expected = torch.cat(list(trial_passes(usual.forward)))
        lean.settings = [usual.attention_settings[layer] for layer in range(len(usual.attention_settings))]
        actual = torch.cat(list(trial_passes(trial.forward)))
    except Exception:  # another kind of model with these modules may raise anything
        return None
    return lean if same_logits(actual, expected) else None


def _has_structure(model: nn.Module, structure: Structure) -> bool:
    """Return whether the model's type and all modules that a lean forward would bypass are known."""
    if getattr(getattr(model, "config", None), "model_type", None) not in structure.types:
        return False
    base = getattr(model, structure.base, None)
    if not (_is_unmodified(model, {structure.base, "lm_head"}) and _is_unmodified(base, structure.children)):
        return False
    bypassed = [(getattr(base, structure.norm), set())]
    for block in getattr(base, structure.blocks):
        bypassed += [(block._modules.get(path) if path else block, names) for path, names in structure.block.items()]
    return all(
        _is_unmodified(module, names) and _public_attributes(module) <= KNOWN_ATTRIBUTES for module, names in bypassed
    )


def _is_unmodified(module: nn.Module | None, children: set[str]) -> bool:
    """Return whether a module has these children and transformers' code: a subclass might do anything."""
    if module is None or module._modules.keys() != children or "forward" in vars(module):
        return False
    return type(module) is nn.LayerNorm or type(module).__module__.startswith("transformers.models.")


def _public_attributes(module: nn.Module) -> set[str]:
    return {name for name in vars(module).keys() - vars(nn.Module()).keys() if not name.startswith("_")}
