"""Prompt scoring: the log-probabilities of a prompt's tokens, for evaluations that compare given texts.

A prompt's forward pass yields logits after each of its tokens. They say how probable the next token was. Generation
needs the last of them only, so the others are computed on request: for chunks of prompts that are to be scored. Tokens
whose logits are still needed are computed even if their keys and values are cached.
"""

from ..engine import Chunk, EngineCore, Feature

NOTE = "prompt_logprobs"  # for each prompt token, as far as they are computed; None for the first


class PromptScoring(Feature):
    """Scores prompts. The sequences of a request share the scores, which the first of them computes."""

    name = "prompt_scoring"

    def __init__(self, engine: EngineCore):
        self.scheduler = engine.scheduler

    def prepare(self, request):
        request.notes[NOTE] = [None]

    def num_reusable_tokens(self, sequence):
        known = len(sequence.request.notes[NOTE])
        return len(sequence.token_ids) if known >= sequence.prompt_tokens else known - 1

    def change_chunk(self, chunk):
        if chunk.sequence.max_tokens == 0:
            chunk.samples_token, chunk.num_logits = False, 0
        if scored := scored_tokens(chunk):
            chunk.num_logits = chunk.end - scored.start + 1

    def read_logits(self, chunk, logits):
        """Return the position of the first scored token, and for each of them a dictionary by token id.

        It has the token itself, then the best ones in its place, as many as the request's `prompt_logprobs`.
        """
        if not (scored := scored_tokens(chunk)):
            return None
        token_ids = chunk.sequence.token_ids[scored.start : scored.stop]
        rows = logits[: len(token_ids)].float().log_softmax(dim=-1).cpu()
        best = rows.topk(min(chunk.sequence.params.prompt_logprobs, rows.shape[1]))
        return scored.start, [
            {token_id: row[token_id].item(), **dict(zip(ids, logprobs, strict=True))}
            for token_id, row, ids, logprobs in zip(
                token_ids, rows, best.indices.tolist(), best.values.tolist(), strict=True
            )
        ]

    def weights_changed(self, request):
        if len(request.notes[NOTE]) < request.prompt_tokens:  # all scores of a prompt are those of the same weights
            request.notes[NOTE] = [None]

    def settle(self, chunk, forward_pass):
        sequence = chunk.sequence
        if reading := forward_pass.readings.get((sequence, self.name)):
            start, scores = reading
            known = sequence.request.notes[NOTE]
            known += scores[len(known) - start :]  # another sequence may have scored the same tokens in this pass
        if sequence.max_tokens == 0 and sequence.prompt_is_computed and sequence.finish_reason is None:
            self.scheduler.finish(sequence, "length")


def scored_tokens(chunk: Chunk) -> range:
    """Return the positions of the prompt tokens that a chunk scores: the logits after a token score the next one."""
    first = max(chunk.start + 1, len(chunk.sequence.request.notes[NOTE]))
    return range(first, min(chunk.end + 1, chunk.sequence.prompt_tokens))


attach = PromptScoring
