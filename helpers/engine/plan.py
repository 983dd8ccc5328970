"""A plan: how many tokens each sequence computes in an iteration. The scheduler makes it, and a runner executes it."""

from dataclasses import dataclass, field

from .sequence import Sequence


class Chunk:
    """The next tokens of a sequence, which one iteration computes.

    Args:
        sequence: the sequence.
        tokens: the number of tokens.
        block_table: the blocks that hold the sequence's keys and values; empty if it needs only a row.

    Attributes:
        start: the position of the first token, which is the sequence's `computed` when the chunk is planned.
        is_decode: whether the chunk is the newest generated token alone, apart from drafts.
        samples_token: whether the chunk contains all uncomputed tokens, so that the sequence gets a new one.
        scored: the positions of the prompt tokens that the chunk's logits score, if the request asks for their
            log-probabilities: the logits after a token score the next one.
        draft_token_ids: guesses at the next tokens, which the chunk computes, too (`speculation.py`).
    """

    def __init__(self, sequence: Sequence, tokens: int, block_table: list[int] | None = None):
        self.sequence, self.tokens, self.block_table = sequence, tokens, block_table or []
        self.start, self.is_decode = sequence.computed, sequence.is_decode
        self.samples_token = tokens == sequence.num_uncomputed_tokens and sequence.max_tokens > 0
        self.scored = range(0)
        if sequence.prompt_logprobs is not None:
            first = max(self.start + 1, len(sequence.prompt_logprobs))
            self.scored = range(first, min(self.start + tokens + 1, sequence.prompt_tokens))
        self.draft_token_ids: list[int] = []

    def add_drafts(self, draft_token_ids: list[int]) -> None:
        """Compute these tokens after the others."""
        self.draft_token_ids = draft_token_ids
        self.tokens += len(draft_token_ids)

    @property
    def end(self) -> int:
        """The position after the last token that is not a draft."""
        return self.start + self.tokens - len(self.draft_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens to compute, drafts included."""
        return self.sequence.token_ids[self.start : self.end] + self.draft_token_ids

    @property
    def num_logits(self) -> int:
        """For how many of the last tokens logits are needed: those that score, or the newest token and each draft."""
        if self.scored:
            return self.end - self.scored.start + 1
        return 1 + len(self.draft_token_ids) if self.samples_token else 0


@dataclass
class Plan:
    """The work of one iteration.

    Attributes:
        chunks: how many tokens each sequence computes, running sequences first.
        preempted: sequences that lost their row and memory; they recompute their tokens later.
        released: sequences that a runner can drop: they finished or were preempted since the last plan that ran.
        block_copies: (source, destination) blocks to copy before the forward pass writes anything.
    """

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    released: list[Sequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The number of tokens that the iteration computes."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that compute tokens."""
        return [chunk.sequence for chunk in self.chunks]
