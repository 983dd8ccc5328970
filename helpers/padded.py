"""Padded execution: an iteration of the engine on the four verbs' batches, for every model they can run.

A batch is one tensor, in which every row reads equally many tokens. Decodes fit together, prompts that begin together
fit behind left padding; prefill and decode do not. So a plan that mixes them is run as forward passes after each
other: first the decodes, then the newcomers, then a pass for each chunk in the middle of a prompt.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from .batching import Batch, filter_batch, forward, left_padded, merge_batches
from .forward_pass import ForwardPass
from .scheduler import Chunk, Unlimited
from .sequence import Sequence


class PaddedExecution(Unlimited):
    """Runs chunks through batches. The batches are the memory, too: a row that is released leaves them."""

    def __init__(self, model, tokenizer):
        self.model, self.pad_id, self.memory = model, tokenizer.pad_token_id, self
        self._decoding: Batch = {"request_ids": []}  # everybody whose prompt has been read
        self._reading: dict[Sequence, Batch] = {}  # prompts read in part, a batch of one row each
        self._released: set[Sequence] = set()

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        if self._reading.pop(sequence, None) is None:
            self._released.add(sequence)

    def run(self, chunks: list[Chunk]) -> Iterator[ForwardPass]:
        """Read all chunks; yields after each forward pass. What a pass that fails would have changed, is unchanged."""
        self._decoding = _without(self._decoding, self._released)
        self._released = set()

        decoding = set(self._decoding["request_ids"])
        decodes = [chunk for chunk in chunks if chunk.sequence in decoding]
        beginnings = [chunk for chunk in chunks if chunk.sequence.computed == 0]
        if decodes:
            yield self._decode(decodes)
        if beginnings:
            ids = [chunk.sequence.token_ids[: chunk.tokens] for chunk in beginnings]
            batch = left_padded(ids, self.pad_id, self.model.device)
            yield self._prefill(batch, beginnings)
        for chunk in chunks:
            if chunk.sequence in self._reading and chunk not in beginnings:
                yield self._prefill(self._next_chunk(chunk), [chunk])

    def _decode(self, chunks: list[Chunk]) -> ForwardPass:
        taking_part = {chunk.sequence: chunk for chunk in chunks}
        standing = set(self._decoding["request_ids"]) - set(taking_part)
        batch, others = _without(self._decoding, standing), _without(self._decoding, set(taking_part))
        sequences = batch["request_ids"]
        batch["input_ids"] = torch.tensor([s.token_ids[-1:] for s in sequences], device=self.model.device)
        batch["position_ids"] = torch.tensor([[s.computed] for s in sequences], device=self.model.device)
        logits, cache = forward(batch, self.model)
        grown = batch | {"attention_mask": pad(batch["attention_mask"], (0, 1), value=1), "past_key_values": cache}
        self._decoding = merge_batches(others, grown)
        return ForwardPass([taking_part[sequence] for sequence in sequences], [0] * len(sequences), logits)

    def _prefill(self, batch: Batch, chunks: list[Chunk]) -> ForwardPass:
        width = batch["input_ids"].size(1)
        logits, cache = forward(batch, self.model)
        # From now on every row has one token to read: a shape that can be merged. What it is, is set when it is read.
        read = {
            "request_ids": [chunk.sequence for chunk in chunks],
            "tokens_remaining": [1] * len(chunks),
            "input_ids": batch["input_ids"][:, -1:],
            "position_ids": batch["position_ids"][:, -1:],
            "attention_mask": pad(batch["attention_mask"], (0, 1), value=1),
            "past_key_values": cache,
        }
        complete = [chunk.completes for chunk in chunks]
        partial = {chunk.sequence for chunk, done in zip(chunks, complete, strict=True) if not done}
        for chunk in chunks:
            self._reading.pop(chunk.sequence, None)
        for sequence in partial:
            self._reading[sequence] = _without(read, set(read["request_ids"]) - {sequence})
        self._decoding = merge_batches(self._decoding, _without(read, partial))
        rows = torch.tensor(complete, device=logits.device)
        return ForwardPass(chunks, [width - chunk.tokens for chunk in chunks], logits[rows])

    def _next_chunk(self, chunk: Chunk) -> Batch:
        sequence, start, end = chunk.sequence, chunk.sequence.computed, chunk.sequence.computed + chunk.tokens
        row = left_padded([sequence.token_ids[:end]], device=self.model.device)
        cache = self._reading[sequence]["past_key_values"]
        return row | {key: row[key][:, start:] for key in ("input_ids", "position_ids")} | {"past_key_values": cache}


def _without(batch: Batch, sequences: set[Sequence]) -> Batch:
    """The batch's other rows."""
    stay = [int(sequence not in sequences) for sequence in batch["request_ids"]]
    return filter_batch(batch | {"tokens_remaining": stay})[0]
