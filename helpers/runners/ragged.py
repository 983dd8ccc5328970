"""Ragged execution: all tokens of an iteration in one row, without padding.

Decodes and prefill chunks of all sequences share one row [1, total tokens]. A linear layer treats each token on its
own, so it does not matter which sequence a token belongs to. Only attention depends on that. There, the row is split
into segments (`attention.py`). Orca (Yu et al., OSDI 2022) calls this selective batching.

It works for every model that uses transformers' attention interface. `ragged_or_padded.py` tries out whether a model
does.
"""

import inspect
from collections.abc import Callable

import torch

from ..engine import Chunk, ForwardPass, Plan, RunnerOutput
from ..engine.plan import Clock
from .attention import AttentionMetadata, AttentionSettings, QuerySegment, call_with
from .kv_pool import KVPool, slot_mapping
from .sampling import BatchSampler, read_logits

MOST_QUERIES = 256  # of a segment with a mask: with fewer, PyTorch is called more often than is worth it


class RaggedRunner:
    """Computes all chunks of a plan in one forward pass; a `Runner`.

    Args:
        model: a clone of a model (see `clone_sharing_weights`), because its attention and its config are changed.
        num_blocks, block_size: the size of the KV cache, and the number of tokens per block.

    Attributes:
        pool: the tensors of the KV cache.
        slot_mapping: the function that returns the slots of a sequence's tokens; a lesson's checks replace it.
        call_model: runs the forward pass of a row; see `_call_model`. What makes the engine fast replaces it.
        kernel: computes attention; see `AttentionMetadata`. None for PyTorch.
        attention_settings: what each layer of the model asked of attention in the latest pass.
    """

    name = "ragged"
    not_ragged_because = None

    def __init__(self, model, num_blocks: int, block_size: int):
        self.model, self.num_blocks, self.block_size = model, num_blocks, block_size
        self.model.set_attn_implementation("ragged")
        self.model.config.pad_token_id = -1  # no pads: transformers need not warn about a missing mask
        self.pool = KVPool(num_blocks, block_size)
        self.sampler = BatchSampler()
        self.slot_mapping = slot_mapping
        self.attention_settings: dict[int, AttentionSettings] = {}
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.call_model: Callable = self._call_model
        self.kernel: Callable | None = None

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Compute all chunks in one forward pass and sample from its logits."""
        if not plan.chunks:
            return RunnerOutput()
        start, no_padding = clock(), [0] * len(plan.chunks)
        try:
            logits = self.forward(plan)
            sampled, readings = self.sampler.sample(plan.chunks, logits), read_logits(plan.chunks, logits)
        except Exception as error:
            return RunnerOutput(error=error)
        return RunnerOutput([ForwardPass(plan.chunks, no_padding, sampled, start, clock() - start, readings)])

    def forward(self, plan: Plan) -> torch.Tensor:
        """Run one forward pass; return logits [sum of `num_logits`, vocabulary] in the order of the chunks."""
        device = self.model.device
        token_ids, positions, slots, segments, sampled_columns = [], [], [], [], []
        for chunk in plan.chunks:
            start, end = chunk.start, chunk.start + chunk.tokens
            segments += self.segments(chunk, len(token_ids))
            token_ids += chunk.token_ids
            positions += range(start, end)
            slots += self.slot_mapping(chunk.block_table, self.block_size, start, end)
            sampled_columns += range(len(token_ids) - chunk.num_logits, len(token_ids))

        token_ids, positions = torch.tensor([token_ids, positions], device=device)
        columns, slots = (torch.tensor(values, dtype=torch.long, device=device) for values in (sampled_columns, slots))
        metadata = AttentionMetadata(self.pool, segments, slots, self.kernel)
        with torch.inference_mode():
            for source, destination in plan.block_copies:
                self.pool.copy_block(source, destination)
            return self.call_model(token_ids, positions, columns, metadata)

    def segments(self, chunk: Chunk, column: int) -> list[QuerySegment]:
        """Return the segments of a chunk that begins at a column of the row.

        A sequence's first chunk is one, which needs no mask. A later long one has several, and each reads the keys up
        to its own end; a single one would read all keys for every query, to hide many of them. A kernel computes a
        decode's drafts like further decodes, each with one key more.
        """
        most = MOST_QUERIES if chunk.start else chunk.tokens
        if chunk.draft_token_ids and self.kernel is not None:
            most = 1
        return [
            QuerySegment(column + first, min(most, chunk.tokens - first), chunk.start + first, chunk.block_table)
            for first in range(0, chunk.tokens, most)
        ]

    def _call_model(self, token_ids, positions, columns, metadata: AttentionMetadata) -> torch.Tensor:
        """Run the forward pass through transformers' modules, and return logits [columns, vocabulary].

        Args:
            token_ids, positions: int64 [T], of all tokens of the row.
            columns: int64, the tokens whose logits are wanted.
            metadata: what attention needs to know about the row.
        """
        keep = {"logits_to_keep": columns} if self._selects_rows else {}
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False} | keep
        output = call_with(metadata, self.model, **inputs)
        self.attention_settings = metadata.settings
        return output.logits[0] if self._selects_rows else output.logits[0, columns]
