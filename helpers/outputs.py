"""What a request got, so far or in the end."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from .metrics import RequestMetrics


@dataclass(frozen=True)
class RequestOutput:
    """The answer to a request: all of it so far, and what the last iteration added.

    Attributes:
        request_id: whose answer it is.
        prompt: the text to continue, or its token ids.
        text: what follows the prompt; EOS and a stop string are not part of it.
        token_ids: the generated tokens, the EOS that ended them included.
        finish_reason: None while it runs, "stop" (EOS or a stop string), "length" (max_tokens), "abort" (taken back) or
            "error" (see `error`).
        index: which of the request's answers, if it asked for several.
        new_text, new_token_ids: what came since the last output of this answer.
        logprobs: for each generated token, the log-probabilities that its request asked for, by token id.
        arrival: when the request came, in seconds on the engine's clock.
        token_times: when each of its tokens was there.
        error: what went wrong, if that ended it.
    """

    request_id: Hashable
    prompt: str | list[int]
    text: str
    token_ids: list[int]
    finish_reason: str | None
    index: int = 0
    new_text: str = ""
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """TTFT, ITL, TPOT and end-to-end latency, for an answer of at least one token."""
        return RequestMetrics(self.request_id, self.arrival, self.token_times)
