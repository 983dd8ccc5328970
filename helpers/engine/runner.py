"""The contract between the engine and its runner: a plan goes in, sampled tokens come out.

The engine plans iterations and does the bookkeeping. A runner owns the model and the tensors of the KV cache, and it
samples the tokens. Nothing here imports torch, so a runner may use any device, or simulate a model and compute nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .plan import Chunk, Plan
from .sequence import Sequence

Clock = Callable[[], float]  # returns seconds


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
        sampled: for the sequence of every chunk with `samples_token`, its new tokens, or the exception raised while
            sampling the first one. There is one token, and one more for each accepted draft.
        start, seconds: when the pass began, on the engine's clock, and how long it took, sampling included.
        prompt_logprobs: for the sequence of every chunk that scores prompt tokens, their log-probabilities by token id.
    """

    chunks: list[Chunk]
    padding: list[int]
    sampled: dict[Sequence, list[SampledToken] | Exception]
    start: float
    seconds: float
    prompt_logprobs: dict[Sequence, list[dict[int, float]]] = field(default_factory=dict)


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
        """Compute a plan's chunks, and sample a token for each chunk with `samples_token`.

        A chunk with drafts gets several tokens; `speculation.accept_drafts` samples them.

        The runner first drops the sequences in `plan.released` and copies the blocks in `plan.block_copies`. A forward
        pass that fails ends the run and leaves all other sequences as they are. Its exception becomes the output's
        `error`.
        """


def run_passes(passes) -> RunnerOutput:
    """Collect the forward passes that an iterator yields, up to the first one that raises an Exception."""
    done = []
    try:
        for one in passes:
            done.append(one)
    except Exception as error:
        return RunnerOutput(done, error)
    return RunnerOutput(done)
