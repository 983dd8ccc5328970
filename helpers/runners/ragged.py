"""Ragged execution: all tokens of an iteration in one row, without padding.

Decodes and prefill chunks of all sequences share one row [1, total tokens]. A linear layer treats each token on its
own, so it does not matter which sequence a token belongs to. Only attention depends on that. There, the row is split
into segments (`attention.py`). Orca (Yu et al., OSDI 2022) calls this selective batching.

It works for every model that uses transformers' attention interface. `choice.py` tries out whether a model does.
"""

import inspect
from collections.abc import Iterator

import torch

from .. import kernels
from ..engine import Chunk, ForwardPass, Plan, RunnerOutput
from ..engine.runner import Clock, run_passes
from .attention import AttentionMetadata, QuerySegment, attending_with
from .kv_pool import KVPool, key_slots, slot_mapping
from .sampling import BatchSampler


class RaggedRunner:
    """Computes all chunks of a plan in one forward pass; a `Runner`.

    Args:
        model: a clone of a model (see `clone_sharing_weights`), because its attention and its config are changed.
        num_blocks, block_size: the size of the KV cache, and the number of tokens per block.
        compiled: whether a compiled kernel computes the attention of decodes (`kernels/paged_attention.cpp`).

    Attributes:
        pool: the tensors of the KV cache.
        slot_mapping: the function that returns the slots of a sequence's tokens; a lesson's checks replace it.
    """

    name = "ragged"
    not_ragged_because = None

    def __init__(self, model, num_blocks: int, block_size: int, compiled: bool = False):
        self.model, self.num_blocks, self.block_size, self.compiled = model, num_blocks, block_size, compiled
        self.model.set_attn_implementation("ragged")
        self.model.config.pad_token_id = None  # no pads: transformers need not warn about a missing mask
        self.pool = KVPool(num_blocks, block_size)
        self.sampler = BatchSampler()
        self.slot_mapping = slot_mapping
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Compute all chunks in one forward pass and sample from its logits."""
        return run_passes(self._passes(plan, clock))

    def _passes(self, plan: Plan, clock: Clock) -> Iterator[ForwardPass]:
        if plan.chunks:
            start = clock()
            logits = self.forward(plan)
            sampled = self.sampler.sample(plan.chunks, logits)
            yield ForwardPass(plan.chunks, [0] * len(plan.chunks), sampled, start, clock() - start)

    def forward(self, plan: Plan) -> torch.Tensor:
        """Run one forward pass; return logits [chunks that sample a token, vocabulary] in the order of the chunks."""
        device = self.model.device
        token_ids, positions, slots, segments, sampled_columns = [], [], [], [], []
        for chunk in plan.chunks:
            start, end = chunk.start, chunk.start + chunk.tokens
            own_slots = key_slots(chunk.block_table, self.block_size, end, device)
            segments.append(QuerySegment(len(token_ids), chunk.tokens, start, own_slots))
            token_ids += chunk.token_ids
            positions += range(start, end)
            slots += self.slot_mapping(chunk.block_table, self.block_size, start, end)
            if chunk.samples_token:
                sampled_columns.append(len(token_ids) - 1)

        columns = torch.tensor(sampled_columns, dtype=torch.long, device=device)
        slots = torch.tensor(slots, device=device)
        metadata = AttentionMetadata(self.pool, segments, slots, self._decodes(plan.chunks, segments))
        with torch.inference_mode(), attending_with(metadata):
            for source, destination in plan.block_copies:
                self.pool.copy_block(source, destination)
            logits = self.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                **({"logits_to_keep": columns} if self._selects_rows else {}),
            ).logits[0]
        return logits if self._selects_rows else logits[columns]

    def _decodes(self, chunks: list[Chunk], segments: list[QuerySegment]) -> kernels.Decodes | None:
        """Return the segments of one token in the kernel's format; None without a kernel or such segments."""
        ones = [(chunk, segment) for chunk, segment in zip(chunks, segments, strict=True) if chunk.tokens == 1]
        if not self.compiled or not ones:
            return None
        return kernels.Decodes(
            [segment.start for _, segment in ones],
            [segment.past + 1 for _, segment in ones],
            [chunk.block_table for chunk, _ in ones],
            self.block_size,
        )
