"""Outputs: what is new for each request, delivered to the caller that waits for it.

A request has one reader. `generate` and `stream` subscribe to their requests; the outputs of all others go to the
caller of `step`. All three can therefore drive one engine without taking each other's outputs.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ..metrics import RequestMetrics
from .scheduler import Plan
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
    arrival: float = 0.0
    token_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def metrics(self) -> RequestMetrics:
        """TTFT, ITL, TPOT and end-to-end latency of an output with at least one token."""
        return RequestMetrics(self.request_id, self.arrival, self.token_times)


class OutputCollector:
    """Makes outputs and keeps them until they are delivered.

    Attributes:
        pending: outputs for the next caller of `step`.
    """

    def __init__(self):
        self.pending: list[RequestOutput] = []
        self._subscribers: dict[Hashable, deque[RequestOutput]] = {}
        self._emitted: dict[Sequence, tuple[int, int]] = {}  # how many tokens and characters were emitted

    def subscribe(self, request_id: Hashable, queue: deque[RequestOutput] | None = None) -> deque[RequestOutput]:
        """Return the queue (the given one, or a new one) that receives a request's outputs until `unsubscribe`."""
        return self._subscribers.setdefault(request_id, deque() if queue is None else queue)

    def unsubscribe(self, request_id: Hashable) -> None:
        """End a subscription and drop its undelivered outputs."""
        self._subscribers.pop(request_id, None)

    def has_subscriber(self, request_id: Hashable) -> bool:
        """Return whether a caller of `generate` or `stream` reads the outputs of this request."""
        return request_id in self._subscribers

    def holds(self, request_id: Hashable) -> bool:
        """Return whether a request has undelivered outputs or a subscriber."""
        return self.has_subscriber(request_id) or any(output.request_id == request_id for output in self.pending)

    def collect(self, plan: Plan, finished: Iterable[Sequence]) -> list[RequestOutput]:
        """Make the outputs of an iteration; return those without a subscriber, after all earlier undelivered ones."""
        for sequence in dict.fromkeys([*plan.sequences, *finished]):
            if sequence.finish_reason is not None or sequence.generated > self._emitted.get(sequence, (0, 0))[0]:
                self.put(sequence)
        delivered, self.pending = self.pending, []
        return delivered

    def put(self, sequence: Sequence) -> None:
        """Make an output of what is new in a sequence, and queue it for the reader of its request."""
        output = self._make(sequence)
        self._subscribers.get(output.request_id, self.pending).append(output)

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Keep outputs that `step` returned, because its caller does not read their requests."""
        self.pending = outputs + self.pending

    def _make(self, sequence: Sequence) -> RequestOutput:
        generated, text = sequence.token_ids[sequence.prompt_tokens :], sequence.detokenizer.text
        num_tokens, num_characters = self._emitted.get(sequence, (0, 0))
        if sequence.finish_reason is None:
            self._emitted[sequence] = len(generated), len(text)
        else:
            self._emitted.pop(sequence, None)
        return RequestOutput(
            sequence.request_id,
            sequence.prompt,
            text,
            generated,
            sequence.finish_reason,
            index=sequence.index,
            new_text=text[num_characters:],
            new_token_ids=generated[num_tokens:],
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            arrival=sequence.arrival,
            token_times=list(sequence.token_times),
            error=sequence.error,
        )
