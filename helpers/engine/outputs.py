"""Outputs: what is new for each request, delivered to the caller that waits for it.

An output comes in two forms. A `RequestOutput` holds everything so far, for callers that keep only the newest one. An
`OutputDelta` holds only what is new, for a server, where outputs wait for slow clients: the memory of deltas grows with
the number of tokens, that of cumulative outputs with its square.

A request has one reader. `generate` and `stream` subscribe to their requests; the outputs of all others go to the
caller of `step`. All three can therefore drive one engine without taking each other's outputs.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from operator import attrgetter

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
    def of(cls, sequence: Sequence, num_tokens: int, num_characters: int) -> "RequestOutput":
        """Make the output of a sequence of which this many tokens and characters were emitted before."""
        generated, text = sequence.token_ids[sequence.prompt_tokens :], sequence.detokenizer.text
        return cls(
            sequence.request_id,
            sequence.prompt,
            text,
            generated,
            sequence.finish_reason,
            index=sequence.index,
            new_text=text[num_characters:],
            new_token_ids=generated[num_tokens:],
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            prompt_logprobs=None if sequence.prompt_logprobs is None else list(sequence.prompt_logprobs),
            arrival=sequence.arrival,
            token_times=list(sequence.token_times),
            error=sequence.error,
        )


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new in a request's output.

    Attributes:
        request_id, index, finish_reason, error: as in `RequestOutput`.
        new_text, new_token_ids: what was added since the previous delta with this index.
        new_logprobs: for each new token, the requested log-probabilities by token id; None if none were requested.
        num_tokens: how many tokens the output has so far, the new ones included.
        prompt_logprobs: as in `RequestOutput`, in the first delta of an output; None in the others.
    """

    request_id: Hashable
    index: int
    new_text: str
    new_token_ids: list[int]
    new_logprobs: list[dict[int, float]] | None
    num_tokens: int
    finish_reason: str | None
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int, num_characters: int) -> "OutputDelta":
        """Make the delta of a sequence of which this many tokens and characters were emitted before."""
        return cls(
            sequence.request_id,
            sequence.index,
            sequence.detokenizer.text[num_characters:],
            sequence.token_ids[sequence.prompt_tokens + num_tokens :],
            None if sequence.logprobs is None else sequence.logprobs[num_tokens:],
            sequence.generated,
            sequence.finish_reason,
            sequence.error,
            None if num_tokens else sequence.prompt_logprobs,
        )

    @classmethod
    def join(cls, deltas: Seq["OutputDelta"]) -> "OutputDelta":
        """Return the deltas of one output, in their order and at least one, as a single delta."""
        last = deltas[-1]
        return replace(
            last,
            new_text="".join(delta.new_text for delta in deltas),
            new_token_ids=[token_id for delta in deltas for token_id in delta.new_token_ids],
            new_logprobs=None if last.new_logprobs is None else [one for delta in deltas for one in delta.new_logprobs],
            prompt_logprobs=deltas[0].prompt_logprobs,
        )

    def __reduce__(self):
        """Pickle as a call with all fields, which takes less than half the time of a frozen dataclass with slots."""
        return OutputDelta, _fields_of(self)


_fields_of = attrgetter(*OutputDelta.__slots__)


class OutputCollector:
    """Makes outputs and keeps them until they are delivered.

    Attributes:
        output_type: the form of the outputs.
        pending: outputs for the next caller of `step`.
    """

    def __init__(self):
        self.output_type: type[RequestOutput] | type[OutputDelta] = RequestOutput
        self.pending: list[RequestOutput] = []
        self._subscribers: dict[Hashable, deque[RequestOutput]] = {}
        # How many tokens and characters were emitted of each sequence, until its last output is queued.
        self._emitted: dict[Sequence, tuple[int, int]] = {}

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences whose last output is not queued yet, in order of arrival."""
        return list(self._emitted)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Expect outputs of these sequences, beginning after the tokens that they have already generated."""
        for sequence in sequences:
            self._mark_emitted(sequence)

    def discard(self, sequences: Iterable[Sequence]) -> None:
        """Expect no outputs of these sequences any more."""
        for sequence in sequences:
            self._emitted.pop(sequence, None)

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

    def collect(self, plan: Plan, finished: Iterable[Sequence]) -> None:
        """Make and queue the outputs of an iteration."""
        for sequence in dict.fromkeys([*plan.sequences, *finished]):
            if self._has_news(sequence):
                self.put(sequence)

    def put(self, sequence: Sequence) -> None:
        """Make an output of what is new in a sequence, and queue it for the reader of its request."""
        output = self._make(sequence)
        self._queue(sequence).append(output)
        self._mark_emitted(sequence)

    def recover(self) -> None:
        """Queue the outputs that an interrupt has prevented, and no output twice."""
        for sequence in filter(self._has_news, self.unfinished):
            if self._make(sequence) in self._queue(sequence):  # the interrupt came before it was marked
                self._mark_emitted(sequence)
            else:
                self.put(sequence)

    def take_pending(self) -> list[RequestOutput]:
        """Return the outputs without a subscriber, in their order, and forget them."""
        taken = []
        try:
            taken, self.pending = self.pending, []
            return taken
        except BaseException:  # an interrupt, so the caller does not get them
            self.pending = taken + self.pending
            raise

    def _queue(self, sequence: Sequence) -> list[RequestOutput] | deque[RequestOutput]:
        return self._subscribers.get(sequence.request_id, self.pending)

    def _has_news(self, sequence: Sequence) -> bool:
        return sequence.finish_reason is not None or sequence.generated > self._emitted.get(sequence, (0, 0))[0]

    def _make(self, sequence: Sequence) -> RequestOutput | OutputDelta:
        return self.output_type.of(sequence, *self._emitted.get(sequence, (0, 0)))

    def _mark_emitted(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            self._emitted[sequence] = sequence.generated, len(sequence.detokenizer.text)
        else:
            self._emitted.pop(sequence, None)
