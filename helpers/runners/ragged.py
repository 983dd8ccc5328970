"""Ragged execution: all tokens of an iteration in one row, without padding.

Decodes and prefill chunks of all sequences share one row [1, total tokens]. A linear layer treats each token on its
own, so it does not matter which sequence a token belongs to. Only attention depends on that. There, the row is split
into segments (`attention.py`). Orca (Yu et al., OSDI 2022) calls this selective batching.

It works for every model that uses transformers' attention interface. `choice.py` tries out whether a model does.
"""

import inspect
from collections.abc import Iterator

import torch

from ..engine import Chunk, ForwardPass, Plan, RunnerOutput
from ..engine.runner import Clock, run_passes
from .attention import AttentionMetadata, AttentionSettings, QuerySegment, attending_with
from .kv_pool import KVPool, slot_mapping
from .lean_recognition import recognise
from .sampling import BatchSampler
from .scoring import score_prompts


class RaggedRunner:
    """Computes all chunks of a plan in one forward pass; a `Runner`.

    Args:
        model: a clone of a model (see `clone_sharing_weights`), because its attention and its config are changed.
        num_blocks, block_size: the size of the KV cache, and the number of tokens per block.
        compiled: whether a compiled kernel computes the attention (`kernels/paged_attention.cpp`).
        lean: whether to look for a lean forward for the model (`lean.py`); it is used while no hooks are registered.

    Attributes:
        pool: the tensors of the KV cache.
        slot_mapping: the function that returns the slots of a sequence's tokens; a lesson's checks replace it.
        lean: the lean forward, or None if the model is called as usual.
        attention_settings: what each layer of the model asked of attention in the latest pass.
    """

    name = "ragged"
    not_ragged_because = None

    def __init__(self, model, num_blocks: int, block_size: int, compiled: bool = False, lean: bool = False):
        self.model, self.num_blocks, self.block_size, self.compiled = model, num_blocks, block_size, compiled
        self.model.set_attn_implementation("ragged")
        self.model.config.pad_token_id = -1  # no pads: transformers need not warn about a missing mask
        self.pool = KVPool(num_blocks, block_size)
        self.sampler = BatchSampler()
        self.slot_mapping = slot_mapping
        self.attention_settings: dict[int, AttentionSettings] = {}
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.lean = recognise(self) if lean else None

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Compute all chunks in one forward pass and sample from its logits."""
        return run_passes(self._passes(plan, clock))

    def _passes(self, plan: Plan, clock: Clock) -> Iterator[ForwardPass]:
        if plan.chunks:
            start = clock()
            logits = self.forward(plan)
            sampled, scores = self.sampler.sample(plan.chunks, logits), score_prompts(plan.chunks, logits)
            yield ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, start, clock() - start, scores)

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
        columns, slots = (torch.tensor(one, dtype=torch.long, device=device) for one in (sampled_columns, slots))
        metadata = AttentionMetadata(self.pool, segments, slots, self.compiled)
        with torch.inference_mode():
            for source, destination in plan.block_copies:
                self.pool.copy_block(source, destination)
            if self.lean is not None and not self.lean.is_hooked():
                return self.lean(token_ids, positions, columns, metadata)
            return self._call_model(token_ids, positions, columns, metadata)

    def segments(self, chunk: Chunk, column: int) -> list[QuerySegment]:
        """Return the segments of a chunk that begins at a column of the row.

        The kernel computes a decode's drafts like further decodes, each with one key more.
        """
        tokens = 1 if chunk.draft_token_ids and self.compiled else chunk.tokens
        return [
            QuerySegment(column + first, tokens, chunk.start + first, chunk.block_table)
            for first in range(0, chunk.tokens, tokens)
        ]

    def _call_model(self, token_ids, positions, columns, metadata: AttentionMetadata) -> torch.Tensor:
        """Run the forward pass through transformers' modules."""
        keep = {"logits_to_keep": columns} if self._selects_rows else {}
        with attending_with(metadata):
            output = self.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **keep)
        self.attention_settings = metadata.settings
        return output.logits[0] if self._selects_rows else output.logits[0, columns]
