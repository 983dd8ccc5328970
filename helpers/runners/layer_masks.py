"""Check that the mask of each layer agrees with the sliding window that the layer passes to attention.

Ragged attention derives its masks from this `sliding_window`. Llama 4 attends in chunks instead, and Qwen2-MoE has
windows that appear only in its masks. A mask is a function of positions, so the check needs no long text: it evaluates
masks at probe positions up to a million tokens apart.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ..models import clone_sharing_weights


class UnsupportedAttention(ValueError):
    """An error that says why ragged attention cannot replace the attention of a model."""


def check_layer_masks(model) -> None:
    """Raise UnsupportedAttention if a layer's mask differs from the `sliding_window` that it passes to attention."""
    clone = clone_sharing_weights(model)
    clone.set_attn_implementation("layer_masks")
    ids = torch.tensor([[1, 2]], device=clone.device)
    with torch.no_grad():
        clone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def probe_positions(device=None) -> torch.Tensor:
    """Return positions near and far apart: 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, ... a million."""
    return torch.tensor(sorted({2**power + step for power in range(21) for step in (-1, 0, 1)}), device=device)


def mask_at_probe_positions(mask_function, **_) -> torch.Tensor:
    """Return a mask [1, 1, probe positions, probe positions] in place of one over the tokens of a text."""
    positions, first = probe_positions(), torch.tensor(0)
    return mask_function(first, first, positions[:, None], positions)[None, None]


def _compare_with_window(module, query, key, value, attention_mask, sliding_window=None, **_):
    positions = probe_positions(query.device if attention_mask is None else attention_mask.device)
    distance = positions[:, None] - positions
    announced = (distance >= 0) & (distance < (float("inf") if sliding_window is None else sliding_window))
    if attention_mask is None or attention_mask.shape[2:] != announced.shape:
        raise UnsupportedAttention(f"layer {module.layer_idx} has a mask of its own")
    if not torch.equal(attention_mask[0, 0], announced):
        tokens = "all earlier tokens" if sliding_window is None else f"exactly the last {sliding_window} tokens"
        raise UnsupportedAttention(f"layer {module.layer_idx} does not attend to {tokens}, as it announces")
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register("layer_masks", _compare_with_window)
AttentionMaskInterface.register("layer_masks", mask_at_probe_positions)
