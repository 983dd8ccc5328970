"""Attention over a ragged row: the queries of each sequence attend to the sequence's own keys and values.

transformers calls `attend` in every layer of a model whose attention implementation is "ragged". Because transformers
knows nothing about sequences, a context variable passes the row's metadata to `attend`.
"""

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .. import kernels
from .kv_pool import KVPool


class QuerySegment:
    """The columns of the row that belong to one sequence, and the slots of its keys and values.

    Args:
        start: the first column.
        tokens: the number of columns.
        past: how many of the sequence's tokens were computed in earlier passes.
        key_slots: the slots of all the sequence's keys, old and new: a slice, or an int64 tensor.
    """

    def __init__(self, start: int, tokens: int, past: int, key_slots: slice | torch.Tensor):
        self.start, self.end, self.tokens, self.past = start, start + tokens, tokens, past
        self.key_slots = key_slots
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None, device) -> torch.Tensor | None:
        """Return which keys each query attends to, bool [tokens, keys]; None for all of them.

        A query attends to its own key and all earlier ones, or only to the last `window` of these.
        """
        if window not in self._masks:
            if self.tokens == 1 and (window is None or self.past < window):
                return None  # the most frequent case: a decode attends to all keys
            queries = torch.arange(self.past, self.past + self.tokens, device=device)[:, None]
            keys = torch.arange(self.past + self.tokens, device=device)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            self._masks[window] = None if visible.all() else visible
        return self._masks[window]


@dataclass
class AttentionMetadata:
    """What `attend` needs to know about the row that is being computed.

    Attributes:
        pool: the keys and values of all sequences.
        segments: the row's segments, from left to right.
        slots: int64 [T], the slots to which the keys and values of the row's tokens are written.
        decodes: the segments of one token, in the kernel's format; None if the kernel is not used.
    """

    pool: KVPool
    segments: list[QuerySegment]
    slots: torch.Tensor
    decodes: kernels.Decodes | None = None


_metadata: ContextVar[AttentionMetadata] = ContextVar("attention_metadata")


@contextlib.contextmanager
def attending_with(metadata: AttentionMetadata):
    """Make the metadata available to `attend`, in this thread, while a forward pass runs."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)


def attend(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_):
    """Store the row's new keys and values, then compute the attention of each sequence over its own keys and values.

    Args:
        module: the model's attention layer.
        query: [1, heads, T, head dim]; `key` and `value`: [1, kv heads, T, head dim], for the row's tokens.
        attention_mask: not used; each sequence's mask follows from its segment.
        scaling: the factor of the scores; 1 / sqrt(head dim) if None.
        sliding_window: the most keys that a query attends to, its own included (Mistral, Gemma).
        softcap: the bound of the scores, which are passed through a scaled tanh (Gemma 2).
        s_aux: attention sinks [heads]: one additional score per head, without a value (gpt-oss).

    Returns:
        The output [1, T, heads, head dim of the values], and None in place of the attention weights.
    """
    row = _metadata.get()
    keys, values = row.pool.write(module.layer_idx, key, value, row.slots)
    output = query.new_empty(query.shape[2], query.shape[1], values.shape[2])
    segments = row.segments
    if row.decodes is not None and softcap is None and s_aux is None and kernels.is_supported(query, keys, values):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        kernels.paged_attention(query[0], keys, values, row.decodes, output, scale, sliding_window)
        segments = [segment for segment in segments if segment.tokens > 1]
    for segment in segments:
        q, k, v = query[0, :, segment.start : segment.end], keys[:, segment.key_slots], values[:, segment.key_slots]
        own = attend_one(q, k, v, segment.mask(sliding_window, query.device), scaling, softcap, s_aux)
        output[segment.start : segment.end] = own.transpose(0, 1)
    return output[None], None


def attend_one(query, key, value, mask, scaling=None, softcap=None, sinks=None) -> torch.Tensor:
    """Return the attention output of one sequence, [heads, T, head dim of the values].

    Args:
        query: [heads, T, head dim]; `key` and `value`: [kv heads, keys, head dim].
        mask: bool [T, keys], True to attend; None for all keys.
        scaling, softcap, sinks: as for `attend`.
    """
    groups = query.shape[0] // key.shape[0]
    if softcap is None and sinks is None:
        q, k, v = query[None], key[None], value[None]
        if query.shape[1] == 1 and key.shape[1] > 64 and query.dtype == torch.bfloat16 and query.device.type == "cpu":
            # With a single bfloat16 query, CPUs take half the time if all keys and values are converted to float32.
            q, k, v = q.float(), k.float(), v.float()
        return scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=groups > 1)[0].to(query.dtype)
    key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[1]] @ value


AttentionInterface.register("ragged", attend)
