"""A sequence: the tokens of one output, and how many of them are computed.

A scheduler needs only two counts: how many tokens a sequence has, and how many are *computed*, that is, have their keys
and values in the KV cache. Prefill, a chunk of a prefill, decode and recomputation after a preemption are then one
operation: compute the next n tokens. Once all of its tokens are computed, a sequence gets a new one.
"""

import contextlib
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from ..detokenizer import IncrementalDetokenizer
from ..sampling_params import SamplingParams

Prompt = str | list[int]  # text, or token ids
GREEDY = SamplingParams()


@dataclass(eq=False)
class EngineRequest:
    """A request as the engine runs it: what all of its sequences share.

    Attributes:
        request_id: identifies the request.
        max_tokens: the most tokens that each output may have.
        prompt: the prompt as the user gave it.
        prompt_tokens: the number of tokens in the prompt.
        params: how tokens are sampled, and when an output ends.
        priority: for the policy "priority"; a smaller number is more urgent.
        arrival: when it was added, in seconds on the engine's clock.
        end_token_ids: the tokens that end an output.
        indices: the outputs to generate, as numbers from 0.
        features: those that the request needs (`hooks.py`).
        options: further arguments of `add_request`, which features read.
        notes: what features know about the request, by name.
        salt: starts the hashes of its blocks: requests with different salts share no cached block.
        sequences: one for each of the indices.
    """

    request_id: Hashable
    max_tokens: int
    prompt: Prompt = ""
    prompt_tokens: int = 0
    params: SamplingParams = GREEDY
    priority: int = 0
    arrival: float = 0.0
    end_token_ids: frozenset[int] = frozenset()
    indices: tuple[int, ...] = (0,)
    features: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    salt: bytes = b""
    sequences: "list[Sequence]" = field(default_factory=list, repr=False)

    @cached_property
    def seed(self) -> int:
        """The seed of its random draws: that of its parameters, or a random one."""
        return random.getrandbits(63) if self.params.seed is None else int(self.params.seed)


class Sequence:
    """One output being generated. Compared by identity, so it can be a dictionary key.

    Args:
        request_id: the request that it belongs to.
        token_ids: the prompt, then the generated tokens.
        max_tokens: the most tokens to generate.
        index: which of the request's outputs this is, from 0.
        request: what it shares with the other sequences of its request; a new one if omitted.
        shared: attributes of the new `EngineRequest`.

    Attributes:
        computed: how many tokens, from the first, have their keys and values in the KV cache.
        number: its position in the order of arrival, set by the scheduler.
        waited: the iterations since it was added, updated whenever a policy reads it from the queue.
        block_hashes: a hash for each full block of tokens, set by the block manager.
        detokenizer: decodes its text, as far as it is certain; None to generate no text.
        token_times: when each generated token was available, in seconds on the engine's clock.
        logprobs: for each generated token, the requested log-probabilities by token id; None if none were requested.
        finish_reason: None until it is finished, then "stop", "length", "abort" or "error".
        error: the error message if the finish reason is "error", otherwise None.
    """

    def __init__(
        self, request_id: Hashable, token_ids: list[int], max_tokens: int, index: int = 0, request=None, **shared
    ):
        self.request = request or EngineRequest(request_id, max_tokens, prompt_tokens=len(token_ids), **shared)
        self.request.sequences.append(self)
        self.index, self.token_ids = index, token_ids
        self.computed = self.waited = self.number = 0
        self.block_hashes: list[bytes] = []
        self.detokenizer: IncrementalDetokenizer | None = None
        self.token_times: list[float] = []
        self.logprobs: list[dict[int, float]] | None = None if self.params.logprobs is None else []
        self.finish_reason: str | None = None
        self.error: str | None = None

    # What all sequences of a request share.
    request_id = property(attrgetter("request.request_id"))
    prompt_tokens = property(attrgetter("request.prompt_tokens"))
    max_tokens = property(attrgetter("request.max_tokens"))
    params = property(attrgetter("request.params"))
    priority = property(attrgetter("request.priority"))
    arrival = property(attrgetter("request.arrival"))

    def append(self, token_id: int, time: float, logprobs: dict[int, float] | None = None) -> str | None:
        """Append a new token, and return why the sequence finishes with it; None if it continues.

        Raises:
            Exception: the tokenizer cannot decode the token.
        """
        self.token_ids.append(token_id)
        self.token_times.append(time)
        if self.logprobs is not None:
            self.logprobs.append(logprobs or {})
        stopped = token_id in self.request.end_token_ids  # these tokens have no text
        if self.detokenizer is not None and not stopped:
            self.detokenizer.push(token_id)
            stopped = self.detokenizer.stopped
        return "stop" if stopped else "length" if self.generated >= self.max_tokens else None

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """Set the finish reason, with the error if there is one, and complete the text."""
        self.finish_reason, self.error = reason, error and f"{type(error).__name__}: {error}"
        if self.detokenizer is not None:
            with contextlib.suppress(Exception):  # fails only after a token has, and that is the error
                self.detokenizer.finish()

    @property
    def label(self) -> Hashable:
        """The name in the trace: the request's id, with the index if there are several outputs or beams."""
        single = self.params.n == len(self.request.indices) == 1
        return self.request_id if single else (self.request_id, self.index)

    @property
    def generated(self) -> int:
        """The number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.computed

    @property
    def is_decode(self) -> bool:
        """Whether the newest generated token is the only one left to compute."""
        return self.num_uncomputed_tokens == 1 and self.generated > 0

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the keys and values of the whole prompt are in the KV cache."""
        return self.computed >= self.prompt_tokens
