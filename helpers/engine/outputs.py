"""Outputs: what is new for each request, delivered to the caller that waits for it.

A request has one reader. `generate` and `stream` subscribe to their requests; the outputs of all others go to the
caller of `step`. All three can therefore drive one engine without taking each other's outputs.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from copy import copy
from dataclasses import dataclass, field

from ..metrics import RequestMetrics
from .plan import Plan
from .sequence import Prompt, Sequence


@dataclass(frozen=True)
class RequestOutput:
    """A request's output so far, and what is new in it.

    Attributes:
        request_id: the request.
        prompt: the text to continue, or its token ids.
        text: what follows the prompt, without EOS or a stop string.
        token_ids: the generated tokens, including the EOS that ended them.
        finish_reason: None until the output is finished, then "stop" (EOS or a stop string), "length" (max_tokens),
            "abort" (cancelled) or "error" (see `error`).
        index: which of the request's `n` outputs this is, from 0.
        new_text, new_token_ids: what was added since the previous output with this index.
        logprobs: for each generated token, the requested log-probabilities by token id; None if none were requested.
        prompt_logprobs: for each token of the prompt, the requested log-probabilities by token id, and None for the
            first, which nothing precedes; None if none were requested.
        arrival: when the request was added, in seconds on the engine's clock.
        token_times: when each token was available, on the same clock.
        error: the error message if the finish reason is "error", otherwise None.
    """

    request_id: Hashable
    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: str | None
    index: int = 0
    new_text: str = ""
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """TTFT, ITL, TPOT and end-to-end latency of an output with at least one token."""
        return RequestMetrics(self.request_id, self.arrival, self.token_times)

    @classmethod
    def from_sequence(cls, sequence: Sequence, num_tokens: int, num_characters: int) -> "RequestOutput":
        """Make the output of a sequence of which this many tokens and characters were emitted before."""
        generated, text = sequence.token_ids[sequence.prompt_tokens :], sequence.detokenizer.text
        return cls(
            sequence.request_id,
            sequence.request.prompt,
            text,
            generated,
            sequence.finish_reason,
            index=sequence.index,
            new_text=text[num_characters:],
            new_token_ids=generated[num_tokens:],
            logprobs=copy(sequence.logprobs),
            prompt_logprobs=copy(sequence.request.notes.get("prompt_logprobs")),
            arrival=sequence.request.arrival,
            token_times=list(sequence.token_times),
            error=sequence.error,
        )


class OutputCollector:
    """Makes outputs and keeps them until they are delivered.

    Attributes:
        output_type: the form of the outputs; a server replaces it (`../server/output_delta.py`).
        pending: outputs for the next caller of `step`.
    """

    def __init__(self):
        self.output_type: type = RequestOutput
        self.pending: list[RequestOutput] = []
        self._subscribers: dict[Hashable, deque[RequestOutput]] = {}
        # How many tokens and characters were emitted of each sequence, until its last output is queued.
        self._emitted: dict[Sequence, tuple[int, int]] = {}

    def add(self, sequence: Sequence) -> None:
        """Expect outputs of a sequence, beginning after the tokens that it has already generated."""
        self._emitted[sequence] = sequence.generated, len(sequence.detokenizer.text)

    def subscribe(self, request_id: Hashable, queue: deque[RequestOutput]) -> None:
        """Put a request's outputs into this queue until `unsubscribe`."""
        self._subscribers[request_id] = queue

    def unsubscribe(self, request_id: Hashable) -> None:
        """End a subscription."""
        self._subscribers.pop(request_id, None)

    def has_subscriber(self, request_id: Hashable) -> bool:
        """Return whether a caller of `generate` or `stream` reads the outputs of this request."""
        return request_id in self._subscribers

    def read_by(self, queue: deque[RequestOutput]) -> list[Hashable]:
        """Return the requests whose outputs go to this queue."""
        # A copy of the ids, because a stream that is collected meanwhile may change the dictionary.
        return [request_id for request_id in list(self._subscribers) if self._subscribers.get(request_id) is queue]

    def holds(self, request_id: Hashable) -> bool:
        """Return whether a request has undelivered outputs or a subscriber."""
        return request_id in self._subscribers or any(output.request_id == request_id for output in self.pending)

    def collect(self, plan: Plan, finished: Iterable[Sequence]) -> None:
        """Make and queue the outputs of an iteration."""
        for sequence in dict.fromkeys([*plan.sequences, *finished]):
            if sequence.finish_reason is not None or sequence.generated > self._emitted[sequence][0]:
                self.put(sequence)

    def put(self, sequence: Sequence) -> None:
        """Make an output of what is new in a sequence, and queue it for the reader of its request."""
        output = self.output_type.from_sequence(sequence, *self._emitted.pop(sequence))
        self._subscribers.get(sequence.request_id, self.pending).append(output)
        if sequence.finish_reason is None:
            self.add(sequence)

    def take_pending(self) -> list[RequestOutput]:
        """Return the outputs without a subscriber, in their order, and forget them."""
        taken, self.pending = self.pending, []
        return taken
