"""Attention over a ragged row: the queries of each sequence attend to the sequence's own keys and values.

transformers calls `attend` in every layer of a model whose attention implementation is "ragged". Because transformers
knows nothing about sequences, a context variable passes the row's metadata to `attend`. `attend_row` does the work for
one sequence after another, unless a kernel (`../fast/attention.py`) does it for several at once.
"""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .kv_pool import KVPool, key_slots


@dataclass(frozen=True)
class AttentionSettings:
    """What a layer asks for beyond plain attention.

    Attributes:
        scaling: the factor of the scores; 1 / sqrt(head dim) if None.
        window: the most keys that a query attends to, its own included (Mistral, Gemma); None for all.
        softcap: the bound of the scores, which are passed through a scaled tanh (Gemma 2).
        sinks: [heads]: one additional score per head, without a value (gpt-oss).
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether PyTorch's own function lacks something, so that attention is computed step by step."""
        return self.softcap is not None or self.sinks is not None


class QuerySegment:
    """The columns of the row that belong to one sequence, and where its keys and values are.

    Args:
        start: the first column.
        tokens: the number of columns.
        past: how many of the sequence's tokens were computed in earlier passes.
        block_table: the blocks of the sequence's keys and values, old and new.
    """

    def __init__(self, start: int, tokens: int, past: int, block_table: list[int]):
        self.start, self.end, self.tokens, self.past = start, start + tokens, tokens, past
        self.block_table = block_table
        self._key_slots: slice | torch.Tensor | None = None
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = {}

    def key_slots(self, pool: KVPool, device) -> slice | torch.Tensor:
        """Return the slots of the sequence's keys; computed once, because all layers use the same."""
        if self._key_slots is None:
            self._key_slots = key_slots(self.block_table, pool.block_size, self.past + self.tokens, device)
        return self._key_slots

    def mask(self, settings: AttentionSettings, query: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to the scores, [tokens, keys], in the query's dtype; None if `attend_one` needs none.

        A query attends to its own key and all earlier ones, or only to the last `window` of these. The scores of all
        other keys become -infinity. A bool mask would be converted to these numbers in every layer.
        """
        window, is_causal = settings.window, self.past == 0 and not settings.needs_scores
        if (self.tokens == 1 or is_causal) and (window is None or self.past + self.tokens <= window):
            return None
        if (window, query.dtype) not in self._masks:
            positions = torch.arange(self.past, self.past + self.tokens, device=query.device)[:, None]
            keys = torch.arange(self.past + self.tokens, device=query.device)
            hidden = keys > positions if window is None else (keys > positions) | (keys <= positions - window)
            self._masks[window, query.dtype] = query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return self._masks[window, query.dtype]


class AttentionMetadata:
    """What attention needs to know about the row that is being computed.

    Args:
        pool: the keys and values of all sequences.
        segments: the row's segments, from left to right.
        slots: int64 [T], the slots to which the keys and values of the row's tokens are written.
        kernel: called with the metadata, query, keys, values, output and settings of a layer; writes the outputs that
            it supports, and returns the segments that are left. None for no kernel.

    Attributes:
        settings: those of each layer that has computed its attention, by its number.
        notes: what a kernel keeps for the layers that follow.
    """

    def __init__(self, pool: KVPool, segments: list[QuerySegment], slots: torch.Tensor, kernel: Callable | None = None):
        self.pool, self.segments, self.slots, self.kernel = pool, segments, slots, kernel
        self.settings: dict[int, AttentionSettings] = {}
        self.notes: dict = {}


_metadata: ContextVar[AttentionMetadata] = ContextVar("attention_metadata")


def call_with(metadata: AttentionMetadata, model: Callable, **inputs):
    """Call a model in a context of its own, in which `attend` finds the metadata of the row."""
    context = copy_context()
    context.run(_metadata.set, metadata)
    return context.run(model, **inputs)


def attend(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_):
    """Store the row's new keys and values, then compute the attention of each sequence over its own keys and values.

    Args:
        module: the model's attention layer.
        query: [1, heads, T, head dim]; `key` and `value`: [1, kv heads, T, head dim], for the row's tokens.
        attention_mask: not used; each sequence's mask follows from its segment.
        scaling, sliding_window, softcap, s_aux: see `AttentionSettings`.

    Returns:
        The output [1, T, heads, head dim of the values], and None in place of the attention weights.
    """
    settings = AttentionSettings(scaling, sliding_window, softcap, s_aux)
    return attend_row(_metadata.get(), module.layer_idx, query[0], key[0], value[0], settings)[None], None


def attend_row(row: AttentionMetadata, layer: int, query, key, value, settings: AttentionSettings) -> torch.Tensor:
    """Compute a layer's attention, as `attend` does.

    Args:
        query: [heads, T, head dim]; `key` and `value`: [kv heads, T, head dim], for the row's tokens.

    Returns:
        The output [T, heads, head dim of the values].
    """
    row.settings[layer] = settings
    keys, values = row.pool.write(layer, key, value, row.slots)
    output = query.new_empty(query.shape[1], query.shape[0], values.shape[2])
    segments = row.segments if row.kernel is None else row.kernel(row, query, keys, values, output, settings)
    for segment in segments:
        slots, mask = segment.key_slots(row.pool, query.device), segment.mask(settings, query)
        own = attend_one(query[:, segment.start : segment.end], keys[:, slots], values[:, slots], mask, settings)
        output[segment.start : segment.end] = own.transpose(0, 1)
    return output


def attend_one(query, key, value, mask, settings: AttentionSettings) -> torch.Tensor:
    """Return the attention output of one sequence, [heads, T, head dim of the values].

    Args:
        query: [heads, T, head dim]; `key` and `value`: [kv heads, keys, head dim].
        mask: [T, keys], added to the scores: 0 to attend, -infinity otherwise; it includes the window. None for a
            single query that attends to all keys, or for as many queries as keys, each of which attends to its own
            key and all earlier ones.
    """
    if settings.needs_scores:
        return _attend_by_scores(query, key, value, mask, settings)
    if query.shape[1] == 1 and key.shape[1] > 64 and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        # With a single bfloat16 query, CPUs take half the time if all keys and values are converted to float32.
        mask = None if mask is None else mask.float()
        return attend_one(query.float(), key.float(), value.float(), mask, settings).to(query.dtype)
    causal = mask is None and query.shape[1] > 1  # PyTorch skips the keys that are hidden
    how = {"is_causal": causal, "scale": settings.scaling, "enable_gqa": query.shape[0] > key.shape[0]}
    return scaled_dot_product_attention(query[None], key[None], value[None], mask, **how)[0]


def _attend_by_scores(query, key, value, mask, settings: AttentionSettings) -> torch.Tensor:
    """Compute `attend_one` step by step, where PyTorch's own function knows no bound and no sinks."""
    scaling, softcap, sinks = settings.scaling, settings.softcap, settings.sinks
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[1]] @ value


AttentionInterface.register("ragged", attend)
