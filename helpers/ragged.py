"""Ragged execution: all tokens of an iteration side by side in one row, without any padding.

Decodes and prefill chunks of all requests stand in one row [1, total tokens]. To a linear layer, a token is a token:
it does not matter whose it is. Only attention has to know, and there the row is split: every request's queries meet the
request's own keys and values, which lie in the blocks of `block_manager.py`. Orca (Yu et al., OSDI 2022) calls this
selective batching.

It works for every model that hands its attention to transformers' attention interface, and whether it does is asked of
the model itself: `supports_ragged` compares its answers. All others run padded.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from . import kernels
from .block_manager import BlockManager
from .forward_pass import ForwardPass
from .scheduler import Chunk
from .sequence import Sequence


class Part:
    """One request's part of the row, and where its keys and values are.

    Args:
        start: its first column in the row.
        tokens: how many columns it has.
        past: how many of its tokens were read before.
        where: the places of all its keys, past and present, in the store: a slice, or a tensor of them.
    """

    def __init__(self, start: int, tokens: int, past: int, where: slice | torch.Tensor):
        self.start, self.end, self.tokens, self.past, self.where = start, start + tokens, tokens, past, where
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def mask(self, window: int | None, device) -> torch.Tensor | None:
        """Which of its keys each of its queries sees: bool [tokens, keys], True to look; None for all of them.

        A query sees what came before it and itself, and of these the last `window`.
        """
        if window not in self._masks:
            if self.tokens == 1 and (window is None or self.past < window):
                return None  # a decode sees everything before it: most parts, so no time is lost on it
            queries = torch.arange(self.past, self.past + self.tokens, device=device)[:, None]
            keys = torch.arange(self.past + self.tokens, device=device)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self._masks[window] = None if seen.all() else seen
        return self._masks[window]


def places(table: list[int], block_size: int, length: int, device) -> slice | torch.Tensor:
    """Where the first `length` tokens of a sequence are: neighbours are read in place, others have to be collected."""
    first = table[0]
    if table == list(range(first, first + len(table))):
        return slice(first * block_size, first * block_size + length)
    blocks = torch.tensor(table, device=device)[:, None] * block_size
    return (blocks + torch.arange(block_size, device=device)).flatten()[:length]


class Store:
    """Keys and values of all layers: [kv heads, slots, head dim] each, allocated once and written in place."""

    def __init__(self, slots: int):
        self.slots, self.layers = slots, {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The store of a layer; made when its first keys and values [1, kv heads, T, head dim] show their shapes."""
        if index not in self.layers:
            self.layers[index] = tuple(one.new_zeros(one.shape[1], self.slots, one.shape[3]) for one in (key, value))
        return self.layers[index]

    def copy_slots(self, old: int, new: int, count: int) -> None:
        for tensor in (tensor for layer in self.layers.values() for tensor in layer):
            tensor[:, new : new + count] = tensor[:, old : old + count]


class _Row:
    """The row that is being read: whose tokens it holds and where their keys and values go.

    Args:
        decodes: the parts of one token, as `attend_paged` wants them.
    """

    def __init__(self, store: Store, parts: list[Part], slots: torch.Tensor, decodes: kernels.Decodes | None = None):
        self.store, self.parts, self.slots, self.decodes = store, parts, slots, decodes


# transformers calls `attend` and knows nothing of us: the row is left here for it. Every thread has a row of its own.
_row: ContextVar[_Row] = ContextVar("row")


@contextlib.contextmanager
def _reading(row: _Row):
    token = _row.set(row)
    try:
        yield row
    finally:
        _row.reset(token)


def attend(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_):
    """Attention of a whole row: store what is new, then answer every request from its own keys and values.

    Args:
        module: the model's attention layer.
        query: [1, heads, T, head dim]; `key` and `value`: [1, kv heads, T, head dim], for the row's new tokens.
        attention_mask: not used; everybody's mask follows from where their tokens are.
        scaling: of the scores; 1 / sqrt(head dim) if None.
        sliding_window: how many keys a query sees at most, itself included (Mistral, Gemma).
        softcap: scores are squeezed into +-softcap (Gemma 2).
        s_aux: attention sinks [heads], one more score that nobody's value belongs to (gpt-oss).

    Returns:
        [1, T, heads, head dim], and None for the weights.
    """
    row = _row.get()
    keys, values = row.store.layer(module.layer_idx, key, value)
    keys.index_copy_(1, row.slots, key[0])
    values.index_copy_(1, row.slots, value[0])
    answers = []
    for part in row.parts:
        q, k, v = query[0, :, part.start : part.end], keys[:, part.where], values[:, part.where]
        answers.append(_attention(q, k, v, part.mask(sliding_window, query.device), scaling, softcap, s_aux))
    return torch.cat(answers, dim=1).transpose(0, 1)[None], None


def _attention(query, key, value, mask, scaling, softcap, sinks):
    """Attention of one request: query [heads, T, dim], key and value [kv heads, keys, dim], mask [T, keys]."""
    groups = query.shape[0] // key.shape[0]
    if softcap is None and sinks is None:
        q, k, v = query[None], key[None], value[None]
        if query.shape[1] == 1 and key.shape[1] > 64 and query.dtype == torch.bfloat16 and query.device.type == "cpu":
            # CPUs are so slow with a single bfloat16 query that converting all its keys and values takes half the time.
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


def attend_paged(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **others):
    """The same as `attend`, but that one call of a kernel answers all decodes; what it cannot, `attend` does."""
    row = _row.get()
    special = others.get("softcap") is not None or others.get("s_aux") is not None
    if row.decodes is None or special or not kernels.takes(query, key, value):
        return attend(module, query, key, value, attention_mask, scaling, sliding_window, **others)
    keys, values = row.store.layer(module.layer_idx, key, value)
    keys.index_copy_(1, row.slots, key[0])
    values.index_copy_(1, row.slots, value[0])
    _, heads, tokens, dim = query.shape
    answer = query.new_empty(tokens, heads, dim)
    scale = dim**-0.5 if scaling is None else scaling
    kernels.paged_attention(query[0], keys, values, row.decodes, answer, scale, sliding_window)
    for part in row.parts:
        if part.tokens > 1:
            q, k, v = query[0, :, part.start : part.end], keys[:, part.where], values[:, part.where]
            one = _attention(q, k, v, part.mask(sliding_window, query.device), scale, None, None)
            answer[part.start : part.end] = one.transpose(0, 1)
    return answer[None], None


AttentionInterface.register("ragged", attend)
AttentionInterface.register("paged", attend_paged)


class RaggedExecution:
    """Runs all chunks of an iteration in one forward pass.

    Args:
        model: an own shell of a model (see `own_shell`): its attention is replaced.
        blocks: who gives out the memory.
        compiled: decodes are answered by a compiled kernel (`kernels/paged_attention.cpp`).
    """

    def __init__(self, model, blocks: BlockManager, compiled: bool = False):
        self.model, self.memory, self.blocks, self.compiled = model, blocks, blocks, compiled
        self.model.set_attn_implementation("paged" if compiled else "ragged")
        self.model.config.pad_token_id = None  # there are no pads, so transformers need not warn of missing masks
        self.store = Store(blocks.blocks * blocks.block_size)
        self._chooses_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, chunks: list[Chunk]) -> Iterator[ForwardPass]:
        """Read all chunks, in one forward pass."""
        if not chunks:
            return
        blocks, device = self.memory, self.model.device
        ids, positions, slots, parts, newest = [], [], [], [], []
        for chunk in chunks:
            sequence, past = chunk.sequence, chunk.sequence.computed
            end = past + chunk.tokens
            where = places(blocks.block_table(sequence), blocks.block_size, end, device)
            parts.append(Part(len(ids), chunk.tokens, past, where))
            ids += sequence.token_ids[past:end]
            positions += range(past, end)
            slots += blocks.slots(sequence, past, end)
            if chunk.completes:
                newest.append(len(ids) - 1)  # only behind its last token is there anything to choose

        newest = torch.tensor(newest, dtype=torch.long, device=device)
        row = _Row(self.store, parts, torch.tensor(slots, device=device), self._decodes(chunks, parts))
        with torch.inference_mode(), _reading(row):
            for old, new in blocks.copies:
                self.store.copy_slots(old * blocks.block_size, new * blocks.block_size, blocks.block_size)
            blocks.copies.clear()
            logits = self.model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                **({"logits_to_keep": newest} if self._chooses_rows else {}),
            ).logits[0]
        logits = logits if self._chooses_rows else logits[newest]
        yield ForwardPass(chunks, [0] * len(chunks), logits)

    def _decodes(self, chunks: list[Chunk], parts: list[Part]) -> kernels.Decodes | None:
        """The parts of one token, for the kernel."""
        ones = [(part, chunk.sequence) for part, chunk in zip(parts, chunks, strict=True) if chunk.tokens == 1]
        if not self.compiled or not ones:
            return None
        tables = [self.blocks.block_table(sequence) for _, sequence in ones]
        columns, lengths = [part.start for part, _ in ones], [part.past + 1 for part, _ in ones]
        return kernels.Decodes(columns, lengths, tables, self.blocks.block_size)


def own_shell(model):
    """The same model with modules and a config of its own, around the same weights: it can be changed, they cannot."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in shared})


def supports_ragged(model) -> bool:
    """Whether the model answers the same in one row with others as it does alone.

    Asked of the model by some short forward passes: two prompts side by side, one of them read in two chunks, so that
    the second pass holds a decode and a prefill. They are shorter than any window, so what layers see of longer texts
    is asked first.
    """
    first, second = (Sequence(name, list(range(1, length + 1)), 2) for name, length in (("a", 5), ("b", 7)))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # this is a question, so the answer need not come as a warning
    try:
        _ask_what_layers_see(own_shell(model))
        execution = RaggedExecution(own_shell(model), BlockManager(4, block_size=4, prefix_caching=False))
        passes = []
        for step in ([Chunk(first, 5), Chunk(second, 3)], [Chunk(first, 1), Chunk(second, 4)]):
            for chunk in step:
                execution.memory.allocate(chunk.sequence, chunk.tokens)
            passes += execution.run(step)
            for chunk in step:
                chunk.sequence.computed += chunk.tokens
            first.token_ids.append(6)
        got = torch.cat([one.logits for one in passes])
        with torch.no_grad():
            texts = [range(1, 6), range(1, 7), range(1, 8)]
            expected = [model(torch.tensor([list(text)], device=model.device)).logits[0, -1:] for text in texts]
    except Exception:  # whatever a model does that does not use the interface
        return False
    finally:
        logging.set_verbosity(verbosity)
    expected = torch.cat(expected)
    tolerance = (0.001 if expected.dtype == torch.float32 else 0.05) * (expected.max() - expected.min())
    return bool((got - expected).abs().max() <= tolerance)


def _ask_what_layers_see(shell) -> None:
    """Raise a ValueError if a layer's mask hides more than the window that `attend` would be told.

    Llama 4 attends in chunks and Qwen2-MoE has windows that only the mask knows of. Masks are rules, which can be asked
    about any places, so this takes no long text.
    """
    shell.set_attn_implementation("ragged_question")
    ids = torch.tensor([[1, 2]], device=shell.device)
    with torch.no_grad():
        shell(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _far_and_near(device) -> torch.Tensor:
    """Places in a text, near and far apart: 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, ... a million."""
    return torch.tensor(sorted({2**power + step for power in range(21) for step in (-1, 0, 1)}), device=device)


def _what_they_see(mask_function, **_) -> torch.Tensor:
    """In the place of a mask: which of the far places see which."""
    tokens, first = _far_and_near(None), torch.tensor(0)
    return mask_function(first, first, tokens[:, None], tokens)[None, None]


def _compare_with_window(module, query, key, value, attention_mask, sliding_window=None, **_):
    tokens = _far_and_near(attention_mask.device)
    distance = tokens[:, None] - tokens
    told = (distance >= 0) & (distance < (float("inf") if sliding_window is None else sliding_window))
    if not torch.equal(attention_mask[0, 0], told):
        raise ValueError(f"Layer {module.layer_idx} does not see just the last {sliding_window} tokens.")
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register("ragged_question", _compare_with_window)
AttentionMaskInterface.register("ragged_question", _what_they_see)
