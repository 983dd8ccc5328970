"""What a transformer computes in one iteration, written out for the two most common kinds of blocks.

transformers' modules serve every way to use a model: training, caches, masks, hooks. A decode of one request spends a
quarter of its time there. For a ragged row on a model that only generates, little is left: embeddings, blocks of
attention and MLP that each add an update to the hidden states, a norm and the LM head.

The linear layers are the model's own modules, and attention is that of every ragged row (`attention.py`). What lies
between them is computed by the kernels in `kernels/elementwise.cpp` where they are compiled, otherwise by PyTorch.
While a few sequences decode, one call computes all blocks of GPT-2 (`fused_blocks.py`).

A lean forward is used only for a model whose modules are known and whose logits it reproduces on a trial
(`lean_recognition.py`). All other models are called as usual.
"""

import torch
from torch import nn
from torch.nn.functional import gelu
from torch.nn.modules import module as all_modules

from .. import kernels
from .attention import AttentionMetadata, AttentionSettings, attend_row
from .fused_blocks import FusedBlocks, is_tanh_gelu


class LeanForward:
    """The forward pass of one kind of model.

    Args:
        model: a causal LM of this kind.
        compiled: whether the compiled kernels may be used.

    Attributes:
        settings: what each layer asks of attention.
    """

    def __init__(self, model: nn.Module, compiled: bool):
        self.model, self.compiled = model, compiled
        self.settings: list[AttentionSettings] = []
        hooks = [all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks]
        for module in model.modules():
            hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._hooks = hooks

    def is_hooked(self) -> bool:
        """Return whether any hook waits for a call of a module: then the model must be called as usual."""
        return any(self._hooks)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor, row: AttentionMetadata
    ) -> torch.Tensor:
        """Return logits [columns, vocabulary].

        Args:
            token_ids, positions: int64 [T], of all tokens of the row.
            columns: int64, the tokens whose logits are wanted.
            row: what attention needs to know about the row.
        """
        raise NotImplementedError

    def logits(
        self, hidden: torch.Tensor, update: torch.Tensor, columns: torch.Tensor, norm: nn.Module
    ) -> torch.Tensor:
        """Return the logits of some columns; the head, the largest layer, computes no others."""
        if len(columns) < len(hidden):
            hidden, update = hidden[columns], update[columns]
        return self.model.lm_head(self.add_norm(hidden, update, norm))

    def add_norm(self, hidden: torch.Tensor, update: torch.Tensor | None, norm: nn.Module) -> torch.Tensor:
        """Add an update to the hidden states [T, size] in place, and return their norm."""
        is_layer_norm = type(norm) is nn.LayerNorm
        if self.compiled and (is_layer_norm or hasattr(norm, "variance_epsilon")):
            tensors = [hidden, norm.weight] if update is None else [hidden, norm.weight, update]
            if all(tensor.dtype == hidden.dtype and tensor.is_contiguous() for tensor in tensors):
                bias, eps = (norm.bias, norm.eps) if is_layer_norm else (None, norm.variance_epsilon)
                return kernels.add_norm(hidden, update, norm.weight, bias, eps, rms=not is_layer_norm)
        if update is not None:
            hidden += update
        return norm(hidden)

    def attend(
        self, row: AttentionMetadata, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention [T, heads * head dim] of a layer whose query, key and value are [T, heads, head dim]."""
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
        return attend_row(row, layer, query, key, value, self.settings[layer]).flatten(1)


class GPT2Forward(LeanForward):
    """GPT-2: learned positions, LayerNorm, one layer for query, key and value, and an MLP of two layers."""

    _fused: FusedBlocks | None = None

    def __call__(self, token_ids, positions, columns, row):
        base = self.model.transformer
        hidden = base.wte(token_ids) + base.wpe(positions)
        fused = self.fused_blocks(len(hidden), row)
        update = self.blocks(hidden, row) if fused is None else fused(hidden, row)
        return self.logits(hidden, update, columns, base.ln_f)

    def fused_blocks(self, rows: int, row: AttentionMetadata) -> FusedBlocks | None:
        """Return what computes all blocks in one call, if it can do so for this row: it can for a few decodes."""
        blocks, pool = self.model.transformer.h, row.pool
        if not self.compiled or len(row.segments) < rows or len(pool.layers) < len(blocks):
            return None
        slots = row.slots.tolist()  # PyTorch's operators raise an error for wrong ones, and the kernel would crash
        if len(slots) != rows or min(slots) < 0 or max(slots) >= pool.num_slots:
            return None
        if self._fused is None or self._fused.pool is not pool:
            self._fused = FusedBlocks(blocks, self.settings, pool)
        return self._fused if self._fused.can_compute(rows) else None

    def blocks(self, hidden: torch.Tensor, row: AttentionMetadata) -> torch.Tensor:
        """Add the updates of all blocks but the last to the hidden states [T, size]; return the last update."""
        update = None
        for layer, block in enumerate(self.model.transformer.h):
            attention, mlp = block.attn, block.mlp
            combined = attention.c_attn(self.add_norm(hidden, update, block.ln_1))
            query, key, value = combined.view(len(hidden), 3, -1, attention.head_dim).unbind(1)
            update = attention.c_proj(self.attend(row, layer, query, key, value))
            update = mlp.c_proj(self.activate(mlp.act, mlp.c_fc(self.add_norm(hidden, update, block.ln_2))))
        return update

    def activate(self, activation: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP's activation; x may be overwritten. transformers' `gelu_new` makes eight passes over it."""
        if not is_tanh_gelu(activation):
            return activation(x)
        return kernels.gelu_(x) if self.compiled and x.is_contiguous() else gelu(x, approximate="tanh")


class LlamaForward(LeanForward):
    """Llama, Mistral, Qwen 2 and 3: rotary positions, RMSNorm, fewer key-value heads, and a gated MLP."""

    def __call__(self, token_ids, positions, columns, row):
        base = self.model.model
        hidden, update = base.embed_tokens(token_ids), None
        cos, sin = (one[0, :, None] for one in base.rotary_emb(hidden, positions[None]))  # [T, 1, head dim]
        for layer, block in enumerate(base.layers):
            attention, mlp = block.self_attn, block.mlp
            x = self.add_norm(hidden, update, block.input_layernorm)
            heads = (len(hidden), -1, attention.head_dim)
            query, key, value = attention.q_proj(x).view(heads), attention.k_proj(x).view(heads), attention.v_proj(x)
            if hasattr(attention, "q_norm"):  # Qwen 3
                query, key = attention.q_norm(query), attention.k_norm(key)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
            update = attention.o_proj(self.attend(row, layer, query, key, value.view(heads)))
            x = self.add_norm(hidden, update, block.post_attention_layernorm)
            update = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
        return self.logits(hidden, update, columns, base.norm)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [T, heads, head dim] by their positions: RoPE (Su et al., 2021), as Llama arranges it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
