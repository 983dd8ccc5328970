"""Recognize the models whose blocks are described in `decoder_blocks.py`.

Four conditions must hold. The model is of a type whose code was compared with the description: others may have the same
modules, and differ where a short trial does not look, in far positions or large activations. The modules that are
bypassed are transformers' own, with the children and attributes that are known. No hook is registered on a module that
is not called. And on a trial with two sequences, chunks and decodes included, both ways give the same logits up to
rounding. On the way, the trial notes what each layer asks of attention: its window, its scaling.
"""

import copy
import logging
from collections.abc import Set
from dataclasses import replace

import torch
from torch import nn

from ..models import same_logits, unrounded_inputs
from ..runners.kv_pool import KVPool
from ..runners.trial import BLOCK_SIZE, NUM_BLOCKS, trial_passes
from . import kernels
from .decoder_blocks import FAMILIES, Family, describe
from .executor import Executor

log = logging.getLogger(__name__)

# The attributes that a module of a block may have. Those that change its numbers are asked for on the trial.
KNOWN_ATTRIBUTES = (
    {"attention_type", "config", "eps", "elementwise_affine", "hidden_size", "intermediate_size", "normalized_shape"}
    | {"attention_dropout", "head_dim", "is_causal", "layer_idx", "layer_type", "num_key_value_groups", "scaling"}
    | {"embed_dim", "is_cross_attention", "num_heads", "pruned_heads", "scale_attn_by_inverse_layer_idx"}
    | {"reorder_and_upcast_attn", "scale_attn_weights", "sliding_window", "split_size", "variance_epsilon"}
    | {"num_key_value_heads", "residual_dropout", "head_size", "rotary_ndims", "use_parallel_residual"}
    | {"attn_logit_softcapping", "is_sliding", "dropout", "enable_bias", "do_layer_norm_before", "qk_layernorm"}
)


@unrounded_inputs()
def find_executor(runner, kind: type[Executor] = Executor) -> Executor | None:
    """Return an executor of a ragged runner's model, or None if the model must be called as usual."""
    model = runner.model
    family = next((candidate for candidate in FAMILIES if _is_of(model, candidate)), None)
    if family is None or model.training:
        return None
    executor = kind(model, describe(model, family), runner.kernel is not None, runner.call_model)
    if executor.is_hooked():
        return None
    usual, fast = copy.copy(runner), copy.copy(runner)
    usual.call_model, fast.call_model = usual._call_model, executor
    for trial_runner in (usual, fast):
        trial_runner.pool, trial_runner.block_size = KVPool(NUM_BLOCKS, BLOCK_SIZE), BLOCK_SIZE
    try:
        expected = torch.cat(list(trial_passes(usual.forward)))
        settings = [usual.attention_settings[layer] for layer in range(len(usual.attention_settings))]
        executor.settings += [replace(layer, scaling=None) for layer in settings] if family.scales_queries else settings
        actual = torch.cat(list(trial_passes(fast.forward)))
        if same_logits(actual, expected):
            return executor
        problem = "other logits"
    except Exception as error:  # another kind of model with these modules may raise anything
        problem = repr(error)
    log.warning("There is no fast forward pass for %s: a trial gave %s.", type(model).__name__, problem)
    return None


def _is_of(model: nn.Module, family: Family) -> bool:
    """Return whether the model's type and all modules that an executor would bypass are known."""
    if getattr(getattr(model, "config", None), "model_type", None) not in family.types:
        return False
    if getattr(model.config, "final_logit_softcapping", None):  # near 0, a trial would not notice it
        return False
    head = {name for name, module in model._modules.items() if module is model.get_output_embeddings()}
    if not _has_parts(model, {family.base} | head):
        return False
    base = model.get_submodule(family.base)
    parts = {family.embedding, family.learned_positions, family.rotary, family.blocks, family.final_norm} - {None}
    if not _has_parts(base, parts, family.dropouts) or not _is_norm(getattr(base, family.final_norm), family):
        return False
    return all(_is_block(block, family) for block in getattr(base, family.blocks))


def _is_block(block: nn.Module, family: Family) -> bool:
    """Return whether a block consists of the parts of the family and nothing else."""
    norms = {getattr(family, name) for name in kernels.NORMS} - {None}
    parts = {*norms, *family.qkv, family.attention_output, *family.mlp_inputs, family.activation, family.mlp_output}
    if not _has_parts(block, parts, family.dropouts):
        return False
    known = all(_public_attributes(block.get_submodule(parent)) <= KNOWN_ATTRIBUTES for parent in _parents(parts))
    return known and all(_is_norm(block.get_submodule(path), family) for path in norms)


def _has_parts(module: nn.Module, paths: Set[str], dropouts: Set[str] = frozenset()) -> bool:
    """Return whether a module consists of these parts, in modules with transformers' code, and of nothing else."""
    return all(
        _is_unmodified(module.get_submodule(parent), _children(parent, paths), _children(parent, dropouts))
        for parent in _parents(paths)
    )


def _parents(paths: Set[str]) -> list[str]:
    """Return the paths of the modules that have these parts, the outermost first."""
    return sorted({path.rpartition(".")[0] for path in paths} | {""})


def _children(parent: str, paths: Set[str]) -> set[str]:
    """Return the names of the parent's children that lie on these paths."""
    prefix = f"{parent}." if parent else ""
    return {path.removeprefix(prefix).split(".")[0] for path in paths if path.startswith(prefix)}


def _is_norm(norm: nn.Module | None, family: Family) -> bool:
    """Return whether a norm is of the family's kind."""
    if not _is_unmodified(norm, set()) or not _public_attributes(norm) <= KNOWN_ATTRIBUTES:
        return False
    return (type(norm) is nn.LayerNorm) == (family.norm_kind == kernels.LAYER_NORM)


def _is_unmodified(module: nn.Module | None, children: Set[str], dropouts: Set[str] = frozenset()) -> bool:
    """Return whether a module has these children, and transformers' code: a subclass might do anything."""
    if module is None or not children <= module._modules.keys() <= children | dropouts or "forward" in vars(module):
        return False
    if None in module._modules.values():
        return False
    return type(module) is nn.LayerNorm or type(module).__module__.startswith("transformers.models.")


def _public_attributes(module: nn.Module) -> set[str]:
    return {name for name in vars(module).keys() - vars(nn.Module()).keys() if not name.startswith("_")}
