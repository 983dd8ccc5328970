"""A sequence: the tokens of one output, and how many of them are computed.

A scheduler needs only two counts: how many tokens a sequence has, and how many are *computed*, that is, have their keys
and values in the KV cache. Prefill, a chunk of a prefill, decode and recomputation after a preemption are then one
operation: compute the next n tokens. Once all of its tokens are computed, a sequence gets a new one.
"""

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams
from .token_rules import TokenRules

if TYPE_CHECKING:
    from .detokenizer import IncrementalDetokenizer
    from .grammar import Grammar
    from .speculation import Drafting

Prompt = str | list[int]  # text, or token ids
GREEDY, NO_RULES = SamplingParams(), TokenRules()


@dataclass(eq=False)
class Sequence:
    """One output being generated. Compared by identity, so it can be a dictionary key.

    Attributes:
        request_id: the request that it belongs to; a request with `n` outputs has `n` sequences.
        token_ids: the prompt, then the generated tokens.
        max_tokens: the most tokens to generate.
        index: which of the request's outputs this is, from 0.
        priority: for the policy "priority"; a smaller number is more urgent.
        parent: the request's first sequence, whose computed prompt this one shares; None for the first one.
        computed: how many tokens, from the first, have their keys and values in the KV cache.
        is_beam: whether it is a beam of a beam search, which decides its tokens.
        paused: whether it computes no more tokens for now: a beam waits until the other beams of its round are done.
        waited: the iterations since it was added, updated whenever a policy reads it from the queue.
        prompt: the prompt as the user gave it.
        params: how its tokens are sampled, and when it finishes.
        token_rules: the token ids behind `params`.
        detokenizer: decodes its text, as far as it is certain.
        grammar: what its text must match; None if any text will do.
        arrival: when it was added, in seconds on the engine's clock.
        token_times: when each generated token was available, on the same clock.
        logprobs: for each generated token, the requested log-probabilities by token id; None if none were requested.
        prompt_logprobs: for each prompt token, the requested log-probabilities by token id, as far as they are
            computed, and None for the first; None if none were requested. All sequences of a request share the list.
        finish_reason: None until it is finished, then "stop", "length", "abort" or "error".
        error: the error message if the finish reason is "error", otherwise None.
        prompt_tokens: the number of tokens in the prompt.
        number: its position in the order of arrival, set by the scheduler.
        block_hashes: a hash for each full block of tokens, set by the block manager.
        drafting: what speculation knows about it; None before its first decode with speculation.
    """

    request_id: Hashable
    token_ids: list[int]
    max_tokens: int
    index: int = 0
    priority: int = 0
    parent: "Sequence | None" = None
    computed: int = 0
    is_beam: bool = False
    paused: bool = False
    waited: int = 0
    prompt: Prompt = ""
    params: SamplingParams = GREEDY
    token_rules: TokenRules = NO_RULES
    detokenizer: "IncrementalDetokenizer | None" = None
    grammar: "Grammar | None" = None
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = field(default=None, init=False)
    prompt_logprobs: list[dict[int, float] | None] | None = field(default=None, init=False)
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = field(init=False)
    number: int = field(default=0, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False, repr=False)
    drafting: "Drafting | None" = field(default=None, init=False, repr=False)

    def __post_init__(self):
        self.prompt_tokens = len(self.token_ids)
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] if self.parent is None else self.parent.prompt_logprobs

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """Set the finish reason, with the error if there is one, and complete the text."""
        self.error = error and f"{type(error).__name__}: {error}"
        self.finish_reason = reason
        if self.detokenizer is not None:
            with contextlib.suppress(Exception):  # fails only after a token has, and that is the error
                self.detokenizer.finish()

    @property
    def label(self) -> Hashable:
        """The name in the trace: the request's id, with the index if there are several outputs or beams."""
        is_single = self.params.n == 1 and not self.is_beam
        return self.request_id if is_single else (self.request_id, self.index)

    @property
    def generated(self) -> int:
        """The number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def num_shareable_tokens(self) -> int:
        """How many tokens, from the first, need not be computed if their keys and values are cached.

        The last token's logits give the next token. In a prompt to score, each token's logits score the next one.
        """
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens:
            return len(self.prompt_logprobs) - 1
        return len(self.token_ids) - 1

    def add_prompt_logprobs(self, start: int, logprobs: list[dict[int, float]]) -> None:
        """Enter the log-probabilities of the prompt's tokens from `start` on, as far as they are missing."""
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens to compute before the next one can be sampled; 0 while it is paused."""
        return 0 if self.paused else len(self.token_ids) - self.computed

    @property
    def is_decode(self) -> bool:
        """Whether the newest generated token is the only one left to compute."""
        return self.num_uncomputed_tokens == 1 and self.generated > 0

    @property
    def prompt_is_computed(self) -> bool:
        """Whether the keys and values of the whole prompt are in the KV cache."""
        return self.computed >= self.prompt_tokens
