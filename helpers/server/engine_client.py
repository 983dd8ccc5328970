"""The engine's client: it accepts HTTP requests or refuses them, and hands each output to its stream.

An `EngineClient` lives on the event loop. Its subclasses run the engine: on a thread of this process
(engine_thread.py), or as replicas in other processes (`helpers/cluster`).

Back-pressure is a count of the sequences in flight: accepted and not finished. Once there are as many as rows and
places in the queue, new requests are refused at once. A refusal costs a client less than a wait that is too long.
"""

import asyncio
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any

from ..engine import EngineCore, SamplingParams
from ..server.output_delta import OutputDelta
from .http_errors import EngineFailed, QueueFull, ShuttingDown
from .output_budget import OutputBudget, most_values
from .prompt_tokenizer import PromptSource, PromptTokenizer
from .response_stream import ResponseStream, engine_request_ids
from .snapshot import Observer, Snapshot


class EngineClient(ABC):
    """Accepts requests for an engine and delivers their outputs. All methods must be called from the event loop.

    Args:
        engine: the engine. Only its `config`, `tokenizer`, `validator` and `block_manager` are read here.
        max_queue: how many sequences may wait for a row.
        pace: the least number of seconds per iteration; 0 for full speed.

    Attributes:
        prompt_tokenizer: turns prompts into token ids, off the event loop.
        output_budget: bounds the memory of outputs that clients have not read.
        observers: called on the event loop after every step, with its outputs and a `Snapshot` of the engine.
        capacity: how many sequences may be in flight.
        num_in_flight: how many sequences were accepted and have not finished.
        draining: whether new requests are refused because the server is about to stop.
        crashed: whether the engine has stopped because of an error.
    """

    def __init__(self, engine: EngineCore, max_queue: int = 64, pace: float = 0.0):
        self.engine, self.capacity, self.pace = engine, engine.config.max_batch_size + max_queue, pace
        self.observers: list[Observer] = []
        self.num_in_flight, self.draining, self.crashed = 0, False, False
        self._streams: dict[str, ResponseStream] = {}  # by the engine's request id, until finished or cancelled
        self._num_unfinished: dict[str, int] = {}  # how many sequences of each request the engine still works on
        self.prompt_tokenizer, self.output_budget = PromptTokenizer(engine), OutputBudget()

    # --- what a subclass does -----------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Begin to deliver outputs, on the running event loop."""

    @abstractmethod
    async def stop(self) -> None:
        """End what `start` has begun."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether requests can be accepted and will be worked on."""

    @property
    def replicas_in_view(self) -> list[dict[str, Any]]:
        """The replicas behind the live view, each with its name, state and rows; empty if there is one engine."""
        return []

    @property
    def problem(self) -> str | None:
        """Why the server takes no requests now; None if it does."""
        return "The server takes no requests." if self.draining or not self.alive else None

    @abstractmethod
    def _send(
        self, engine_id: str, token_ids: list[int], params: SamplingParams, priority: int, **options: Any
    ) -> None:
        """Hand a request to the engine, which answers with outputs. The options are those of `add_request`."""

    @abstractmethod
    def _send_abort(self, engine_id: str) -> None:
        """Let the engine abort a request. Unless it has finished, its last outputs have finish reason "abort"."""

    # --- requests ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        response_id: str,
        prompts: list[PromptSource],
        params: SamplingParams,
        priority: int = 0,
        deadline: float | None = None,
        adapter: str | None = None,
    ) -> tuple[ResponseStream, list[list[int]]]:
        """Accept an HTTP request with all of its prompts, or refuse it.

        Args:
            response_id: names the request; unique among those in flight.
            prompts: text, token ids, or a function that makes either and is called off the event loop.
            params: how to continue each prompt.
            priority: the smaller, the more urgent.
            deadline: seconds that the request may take; None for no limit.
            adapter: the adapter whose model continues the prompts; None for the model itself.

        Returns:
            The stream of its outputs, and the token ids of its prompts.

        Raises:
            ValueError: a request that can never run.
            QueueFull, ShuttingDown: the server cannot take the request now.
            EngineFailed: the engine has stopped.
        """
        num_sequences = len(prompts) * params.n
        if num_sequences > self.capacity:
            raise ValueError(
                f"The request asks for {num_sequences} sequences, but this server holds at most {self.capacity} "
                f"at a time: split the request."
            )
        accepted = time.perf_counter()
        self.refuse_if_unable(num_sequences)
        self.num_in_flight += num_sequences  # before any work for it: more requests arrive during the await below
        try:
            validated = await self.prompt_tokenizer.validate(prompts, params)
            self.refuse_if_unable(0)  # the server may have begun to drain
            reserved = self.output_budget.reserve(most_values(validated, params))
        except BaseException:
            self.num_in_flight -= num_sequences
            raise

        options = {} if adapter is None else {"adapter": adapter}
        engine_ids = engine_request_ids(response_id, len(prompts), params.n)
        stream = ResponseStream(engine_ids, params.n, accepted, deadline, self.cancel)
        stream.on_close = weakref.finalize(stream, self.output_budget.release, reserved)  # at the latest if it is lost
        prompt_token_ids = [token_ids for token_ids, _ in validated]
        for number, (engine_id, token_ids) in enumerate(zip(engine_ids, prompt_token_ids, strict=True)):
            self._streams[engine_id], self._num_unfinished[engine_id] = stream, params.n
            try:
                self._send(engine_id, token_ids, params, priority, **options)
            except BaseException:  # the engine has the prompts before this one only
                del self._num_unfinished[engine_id]
                self.num_in_flight -= (len(prompts) - number) * params.n
                self.cancel(stream)
                raise
        return stream, prompt_token_ids

    def cancel(self, stream: ResponseStream) -> None:
        """Abort a stream's requests. Their places are free again once the engine has aborted them."""
        for engine_id in stream.engine_ids:
            self._streams.pop(engine_id, None)
            self._send_abort(engine_id)

    def stream_of(self, engine_id: str) -> ResponseStream | None:
        """Return the stream that a request's outputs go to; None if it has finished or was cancelled."""
        return self._streams.get(engine_id)

    async def drain(self, grace: float) -> None:
        """Refuse new requests, finish those in flight, and fail what is left after `grace` seconds."""
        self.draining = True
        end = time.perf_counter() + grace
        while self.num_in_flight and self.alive and time.perf_counter() < end:
            await asyncio.sleep(0.05)
        self.fail_pending()

    def fail_pending(self) -> None:
        """End all streams with the error that the server is shutting down."""
        for stream in set(self._streams.values()):
            stream.fail(ShuttingDown("The server is shutting down and could not finish this request."))

    def refuse_if_unable(self, num_sequences: int) -> None:
        """Return if that many more sequences can be accepted now.

        Raises:
            QueueFull, ShuttingDown, EngineFailed: see `submit`.
        """
        if not self.alive:
            raise EngineFailed("The engine has stopped, and the server must be restarted.")
        if self.draining:
            raise ShuttingDown("The server is shutting down and takes no more requests.")
        if self.num_in_flight + num_sequences > self.capacity:
            raise QueueFull(
                f"The queue is full: {self.num_in_flight} of at most {self.capacity} sequences are in flight. "
                f"Try again later."
            )

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[OutputDelta], snapshot: Snapshot) -> None:
        for observe in self.observers:
            observe(outputs, snapshot)
        for output in outputs:
            if (stream := self.stream_of(output.request_id)) is not None:
                stream.put(output)
            if output.finish_reason is not None:
                self._count_finished(output.request_id)

    def _count_finished(self, engine_id: str) -> None:
        self.num_in_flight -= 1
        self._num_unfinished[engine_id] -= 1
        if not self._num_unfinished[engine_id]:
            del self._num_unfinished[engine_id]
            self._streams.pop(engine_id, None)

    def _on_crash(self, error: BaseException) -> None:
        self.crashed = True
        for stream in set(self._streams.values()):
            stream.fail(EngineFailed(f"The engine has stopped: {type(error).__name__}: {error}"))
        self.num_in_flight -= sum(self._num_unfinished.values())
        self._streams, self._num_unfinished = {}, {}
