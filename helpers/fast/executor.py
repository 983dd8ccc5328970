"""The forward pass of a decoder, written out: embeddings, blocks, the last norm and the LM head.

transformers' modules serve every way to use a model: training, caches, masks, hooks. A decode of one request spends a
quarter of its time there. For a ragged row on a model that only generates, little is left.

An executor is used only for a model whose modules are known and whose logits it reproduces on a trial
(`recognition.py`). All other models are called as usual.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import embedding
from torch.nn.modules import module as all_modules

from ..runners.attention import AttentionMetadata
from .adapter_tables import LowRankAdapter
from .decoder_blocks import Decoder
from .fused_executor import FusedExecutor
from .plain_executor import PlainExecutor, Rotary


class Executor:
    """The forward pass of a model.

    Args:
        model: a causal LM.
        decoder: its parts.
        compiled: whether the compiled kernels may be used.
        usual: calls the model itself, with the same arguments.

    Attributes:
        settings: what each layer asks of attention.
        plain: computes the blocks in many calls.
        fused: computes them in one call; made for the first pass that may be one.
        adapters: the adapter (or None) and the tokens of each chunk of the pass, in the order of its rows; None for a
            pass without adapters. Linear layers that are called one by one add the products themselves.
    """

    def __init__(self, model, decoder: Decoder, compiled: bool, usual: Callable[..., torch.Tensor]):
        self.decoder, self.settings, self._usual = decoder, [], usual
        self.plain = PlainExecutor(decoder, self.settings, compiled)
        self.fused: FusedExecutor | None = None
        self.adapters: Sequence[tuple[LowRankAdapter | None, int]] | None = None
        self._hooks = [
            hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def is_hooked(self) -> bool:
        """Return whether any hook waits for a call of a module: then the model must be called as usual."""
        return any(self._hooks) or bool(all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor, row: AttentionMetadata
    ) -> torch.Tensor:
        """Return logits [columns, vocabulary]; while hooks are registered, by calling the model as usual.

        Args:
            token_ids, positions: int64 [T], of all tokens of the row.
            columns: int64, the tokens whose logits are wanted.
            row: what attention needs to know about the row.
        """
        if self.is_hooked():
            return self._usual(token_ids, positions, columns, row)
        decoder, rotary = self.decoder, None
        hidden = decoder.embedding(token_ids)
        if (learned := decoder.learned_positions) is not None:
            offset = getattr(learned, "offset", None)  # OPT's, whose own forward expects a mask
            hidden = hidden + (learned(positions) if offset is None else embedding(positions + offset, learned.weight))
        if decoder.rotary is not None:
            rotary = self.cos_and_sin(hidden, positions)
        update = self._executor(hidden, row)(hidden, rotary, row)
        if len(columns) < len(hidden):  # the head, the largest layer, computes no others
            hidden, update = hidden[columns], update[columns]
        return decoder.head(self.plain.add_norm(hidden, update, decoder.final_norm))

    def cos_and_sin(self, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        """Return those of the positions [T], in the dtype of the hidden states."""
        kinds = [(kind,) for kind in self.decoder.rotation_kinds] or [()]
        rotations = [self.decoder.rotary(hidden, positions[None], *kind) for kind in kinds]
        return tuple(map(torch.cat, zip(*rotations, strict=True)))

    def _executor(self, hidden: torch.Tensor, row: AttentionMetadata) -> Callable[..., torch.Tensor]:
        """Return what computes the blocks for this row: in one call, if possible."""
        if not self.plain.compiled:
            return self.plain
        if len(row.pool.layers) < len(self.decoder.blocks):  # no keys have been written yet
            return self.plain
        if self.fused is None:
            self.fused = FusedExecutor(self.decoder, self.settings, row.pool)
        if self.fused.pool is not row.pool:
            self.fused.use(row.pool)
        if not self.fused.can_compute(hidden, row):
            if len(hidden) > self.fused.max_rows or not self.fused.is_outdated():
                return self.plain
            self.fused = self.fused.renewed()
            if not self.fused.can_compute(hidden, row):
                return self.plain
        if self.adapters is None:
            return self.fused
        return partial(self.fused, adapted=self.fused.adapters.rows_of(self.adapters, len(hidden)))
