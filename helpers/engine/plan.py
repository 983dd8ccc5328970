"""A plan says how many tokens each sequence computes in an iteration: the scheduler makes it, and a runner executes it.

The engine plans iterations and does the bookkeeping. A runner owns the model and the tensors of the KV cache, and it
chooses the tokens. Nothing here imports torch, so a runner may use any device, or simulate a model and compute nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..trace import NO_TRAFFIC, Traffic
from .sequence import Sequence

Clock = Callable[[], float]  # returns seconds


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
        num_logits: the number of tokens, counted from the end, that need logits.
        draft_token_ids: guesses at the next tokens, which the chunk computes, too. Each is kept if it is the token that
            would have been chosen in its place.
    """

    def __init__(self, sequence: Sequence, tokens: int, block_table: list[int] | None = None):
        self.sequence, self.tokens, self.block_table = sequence, tokens, block_table or []
        self.start, self.is_decode = sequence.computed, sequence.is_decode
        self.samples_token = tokens == sequence.num_uncomputed_tokens
        self.num_logits = int(self.samples_token)
        self.draft_token_ids: list[int] = []
        for feature in sequence.request.features:
            feature.change_chunk(self)

    def add_drafts(self, draft_token_ids: list[int]) -> None:
        """Compute these tokens after the others."""
        self.draft_token_ids = draft_token_ids
        self.tokens += len(draft_token_ids)
        self.num_logits += len(draft_token_ids)

    @property
    def end(self) -> int:
        """The position after the last token that is not a draft."""
        return self.start + self.tokens - len(self.draft_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens to compute, drafts included."""
        return self.sequence.token_ids[self.start : self.end] + self.draft_token_ids


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


@dataclass(frozen=True)
class ModelInfo:
    """What an engine needs to know about its model.

    Attributes:
        vocab_size: the number of token ids; all are below it.
        context_length: the most tokens (prompt and output) of a request; None if there is no limit.
        eos_token_ids: the tokens that end an output.
    """

    vocab_size: int
    context_length: int | None = None
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SampledToken:
    """A new token, and the log-probabilities that its request asked for, by token id."""

    token_id: int
    logprobs: dict[int, float] | None = None


@dataclass(frozen=True)
class ForwardPass:
    """The results of one forward pass.

    Attributes:
        chunks: the chunks that it computed.
        padding: for each chunk, the number of pad tokens that were computed in its row.
        sampled: for the sequence of every chunk with `samples_token`, its new tokens: one, and one more for each
            accepted draft. An exception that was raised while choosing a token takes its place, and ends them.
        start, seconds: when the pass began, on the engine's clock, and how long it took, choosing tokens included.
        readings: what features have read from logits, by sequence and by the feature's name.
        traffic: what the processes of a split model have sent.
    """

    chunks: list[Chunk]
    padding: list[int]
    sampled: dict[Sequence, list[SampledToken | Exception]]
    start: float
    seconds: float
    readings: dict[tuple[Sequence, str], Any] = field(default_factory=dict)
    traffic: Traffic = NO_TRAFFIC


@dataclass(frozen=True)
class RunnerOutput:
    """The results of a plan.

    Attributes:
        passes: the forward passes that succeeded, in order.
        error: the exception that the next pass raised; its chunks and all later ones were not computed. None if all
            passes succeeded.
    """

    passes: list[ForwardPass] = field(default_factory=list)
    error: Exception | None = None


class Runner(Protocol):
    """Runs plans on a model.

    Attributes:
        name: "ragged", "padded", ...
        num_blocks: the number of blocks in the KV cache; None if a sequence needs only a row.
        block_size: tokens per block.
        not_ragged_because: why the model is not run ragged; None if it is.
    """

    name: str
    num_blocks: int | None
    block_size: int
    not_ragged_because: str | None

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Compute a plan's chunks, and choose a token for each chunk with `samples_token`.

        The runner first drops the sequences in `plan.released` and copies the blocks in `plan.block_copies`. A forward
        pass that fails ends the run and leaves all other sequences as they are. Its exception becomes the output's
        `error`.
        """
