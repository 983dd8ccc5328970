"""Compute decoder blocks one operation after the other, with PyTorch and the kernels.

The linear layers are the model's own modules, and attention is that of every ragged row (`attention.py`). What lies
between them is computed by the kernels in `kernels/elementwise.cpp` where they are compiled, otherwise by PyTorch.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu

from ..runners.attention import AttentionMetadata, AttentionSettings, attend_row
from . import kernels
from .decoder_blocks import Block, Decoder, activation_kind, epsilon

# cos and sin of the tokens' positions, [rotations, T, rotated numbers of a head] each
Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass
class PlainExecutor:
    """The blocks of a decoder, computed in a dozen calls each.

    Args:
        settings: what each layer asks of attention.
        compiled: whether the compiled kernels may be used.
    """

    decoder: Decoder
    settings: list[AttentionSettings]
    compiled: bool

    def __call__(self, hidden: torch.Tensor, rotary: Rotary | None, row: AttentionMetadata) -> torch.Tensor:
        """Add the updates of all blocks but the last to the hidden states [T, size]; return the last update."""
        update = None
        for layer, block in enumerate(self.decoder.blocks):
            angles = rotary and tuple(tensor[self.decoder.rotations[layer]] for tensor in rotary)
            heads = self._heads(block, self.add_norm(hidden, update, block.attention_norm), angles)
            query, key, value = (tensor.transpose(0, 1) for tensor in heads)
            attended = attend_row(row, layer, query, key, value, self.settings[layer])
            update = self._norm(block.attention_output(attended.flatten(1)), block.attention_post_norm)
            if self.decoder.family.is_parallel:
                x = self.add_norm(hidden, None, block.mlp_norm)
                hidden += update
            else:
                x = self.add_norm(hidden, update, block.mlp_norm)
            inputs = self._linear(block.mlp_inputs, x)
            update = self._norm(block.mlp_output(self._activate(block, inputs)), block.mlp_post_norm)
        return update

    def add_norm(self, hidden: torch.Tensor, update: torch.Tensor | None, norm: nn.Module) -> torch.Tensor:
        """Add an update to the hidden states [T, size] in place, and return their norm."""
        bias = getattr(norm, "bias", None)
        tensors = [tensor for tensor in (hidden, update, norm.weight, bias) if tensor is not None]
        if self.compiled and all(tensor.dtype == hidden.dtype and tensor.is_contiguous() for tensor in tensors):
            kind = self.decoder.family.norm_kind
            return kernels.add_norm(hidden, update, norm.weight, bias, epsilon(norm), kind)
        if update is not None:
            hidden += update
        return norm(hidden)

    def _norm(self, update: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        return update if norm is None else self.add_norm(update, None, norm)

    def _heads(self, block: Block, x: torch.Tensor, rotary: Rotary | None) -> list[torch.Tensor]:
        """Return queries, keys and values, [T, heads, head dim] each."""
        decoder = self.decoder
        if decoder.family.is_interleaved:
            heads = block.qkv[0](x).unflatten(1, (decoder.heads, 3, decoder.head_dim))
            heads = [tensor.contiguous() for tensor in heads.unbind(2)]
        else:
            sizes = [count * decoder.head_dim for count in (decoder.heads, decoder.kv_heads, decoder.kv_heads)]
            heads = [tensor.unflatten(1, (-1, decoder.head_dim)) for tensor in self._linear(block.qkv, x, sizes)]
        for n, norm in enumerate((block.query_norm, block.key_norm)):
            if norm is not None:
                heads[n] = self.add_norm(heads[n].flatten(0, 1), None, norm).view(heads[n].shape)
            if rotary is not None:
                can_rotate = self.compiled and heads[n].dtype == rotary[0].dtype
                heads[n] = (kernels.rotate_ if can_rotate else rotate)(heads[n], *rotary)
        return heads

    def _linear(self, layers: tuple[nn.Module, ...], x: torch.Tensor, sizes: list[int] | None = None) -> list:
        """Return the outputs of the layers; that of a single layer is split into these sizes, or into equal halves."""
        if len(layers) > 1 or (sizes is None and not self.decoder.family.is_gated):
            return [layer(x) for layer in layers]
        output = layers[0](x)
        return output.split(sizes or output.shape[1] // 2, dim=1)

    def _activate(self, block: Block, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Apply the MLP's activation; its inputs may be overwritten. `gelu_new` makes eight passes over them."""
        x, factor = inputs if self.decoder.family.is_gated else (inputs[0], None)
        kind = activation_kind(block.activation)
        if self.compiled and kind is not None and x.stride(1) == 1:
            return kernels.activate(x, factor, kind)
        x = gelu(x, approximate="tanh") if kind == kernels.TANH_GELU else block.activation(x)
        return x if factor is None else x * factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [T, heads, head dim] by their positions: RoPE (Su et al., 2021), as Llama arranges it."""
    x, rest = x.split([cos.shape[1], x.shape[2] - cos.shape[1]], dim=2)
    first, second = x.chunk(2, dim=2)
    rotated = x * cos[:, None] + torch.cat([-second, first], dim=2) * sin[:, None]
    return torch.cat([rotated, rest], dim=2) if rest.shape[2] else rotated
