"""Padded execution: an iteration on left-padded batches, for every model that the four verbs can run.

A batch is one tensor, in which every row computes the same number of tokens. Decodes fit into one batch. With left
padding, so do the first chunks of several prompts. Prefills and decodes do not fit together. A plan that mixes them
takes several forward passes: one for all decodes, one for all first chunks, then one for each later chunk of a prompt.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from ..engine import Chunk, ForwardPass, Plan, RunnerOutput, Sequence
from ..engine.plan import Clock
from ..padded_batch import concatenate_rows, forward, left_padded, select_rows
from .sampling import BatchSampler, read_logits


class PaddedRunner:
    """Computes chunks as rows of batches; a `Runner`. The batches also hold the KV cache.

    Args:
        model, tokenizer: the model to run, and its tokenizer, which defines the pad token.
        not_ragged_because: why the model is not run ragged.
    """

    name = "padded"
    num_blocks = None
    block_size = 1

    def __init__(self, model, tokenizer, not_ragged_because: str | None = None):
        self.model, self.pad_id, self.not_ragged_because = model, tokenizer.pad_token_id, not_ragged_because
        self.sampler = BatchSampler()
        self._decoding: dict | None = None  # one batch of all sequences that have been prefilled
        self._prefilling: dict[Sequence, dict] = {}  # partly prefilled sequences, each in a batch of one row

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Compute all chunks in as many forward passes as needed. A failed pass leaves the state unchanged."""
        passes = []
        try:
            for forward_pass in self._passes(plan, clock):
                passes.append(forward_pass)
        except Exception as error:
            return RunnerOutput(passes, error)
        return RunnerOutput(passes)

    def _passes(self, plan: Plan, clock: Clock) -> Iterator[ForwardPass]:
        for sequence in plan.released:
            self._prefilling.pop(sequence, None)
        self._decoding = _without(self._decoding, plan.released)

        decoding = _sequences(self._decoding)
        decodes = [chunk for chunk in plan.chunks if chunk.sequence in decoding]
        begins = [chunk for chunk in plan.chunks if chunk.start == 0]
        continued = [chunk for chunk in plan.chunks if chunk.sequence in self._prefilling and chunk.start > 0]
        if decodes:
            yield self._decode(decodes, clock)
        if begins:
            batch = left_padded([chunk.token_ids for chunk in begins], self.pad_id, self.model.device)
            yield self._prefill(batch, begins, clock)
        for chunk in continued:
            yield self._prefill(self._next_chunk(chunk), [chunk], clock)

    def _decode(self, chunks: list[Chunk], clock: Clock) -> ForwardPass:
        start = clock()
        chunk_of = {chunk.sequence: chunk for chunk in chunks}
        others = _without(self._decoding, list(chunk_of))
        batch = _without(self._decoding, _sequences(others))
        chunks = [chunk_of[sequence] for sequence in batch["sequences"]]
        batch["input_ids"] = torch.tensor([chunk.token_ids for chunk in chunks], device=self.model.device)
        batch["position_ids"] = torch.tensor([[chunk.start] for chunk in chunks], device=self.model.device)
        logits, cache = forward(batch, self.model)
        sampled = self.sampler.sample(chunks, logits[:, -1])
        grown = batch | {"attention_mask": pad(batch["attention_mask"], (0, 1), value=1), "past_key_values": cache}
        self._decoding = _joined(others, grown)
        return ForwardPass(chunks, [0] * len(chunks), sampled, start, clock() - start)

    def _prefill(self, batch: dict, chunks: list[Chunk], clock: Clock) -> ForwardPass:
        start, width = clock(), batch["input_ids"].size(1)
        logits, cache = forward(batch, self.model, max(1, *(chunk.num_logits for chunk in chunks)))
        logits = torch.cat([row[len(row) - chunk.num_logits :] for row, chunk in zip(logits, chunks, strict=True)])
        computed = {
            "sequences": [chunk.sequence for chunk in chunks],
            # One column each, so that rows can be concatenated; the next pass fills in its tokens and positions.
            "input_ids": batch["input_ids"][:, -1:],
            "position_ids": batch["position_ids"][:, -1:],
            "attention_mask": pad(batch["attention_mask"], (0, 1), value=1),
            "past_key_values": cache,
        }
        partial = [chunk.sequence for chunk in chunks if not chunk.samples_token]
        sampled, readings = self.sampler.sample(chunks, logits), read_logits(chunks, logits)
        for chunk in chunks:
            self._prefilling.pop(chunk.sequence, None)
        for sequence in partial:
            others = [other for other in computed["sequences"] if other is not sequence]
            self._prefilling[sequence] = _without(computed, others)
        self._decoding = _joined(self._decoding, _without(computed, partial))
        padding = [width - chunk.tokens for chunk in chunks]
        return ForwardPass(chunks, padding, sampled, start, clock() - start, readings)

    def _next_chunk(self, chunk: Chunk) -> dict:
        """Return the batch of one row that computes a later chunk of a prompt."""
        batch = left_padded([chunk.sequence.token_ids[: chunk.start + chunk.tokens]], device=self.model.device)
        new_columns = {key: batch[key][:, chunk.start :] for key in ("input_ids", "position_ids")}
        return batch | new_columns | {"past_key_values": self._prefilling[chunk.sequence]["past_key_values"]}


def _sequences(batch: dict | None) -> list[Sequence]:
    return batch["sequences"] if batch else []


def _without(batch: dict | None, sequences: list[Sequence]) -> dict | None:
    """Return the batch without the rows of these sequences; None if no rows remain."""
    stay = [row for row, sequence in enumerate(_sequences(batch)) if sequence not in sequences]
    if len(stay) == len(_sequences(batch)):
        return batch and dict(batch)
    return select_rows(batch, stay) if stay else None


def _joined(first: dict | None, second: dict | None) -> dict | None:
    return concatenate_rows(first, second) if first and second else first or second
