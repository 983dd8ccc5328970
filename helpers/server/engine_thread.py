"""The thread that runs the engine; the event loop submits requests to it, reads their outputs and cancels them.

The claim: the event loop never waits for the model, and the engine never waits for a client. They share nothing but an
inbox, which the thread empties before every step of the engine, and one stream of outputs per request. A cancelled
request has therefore left its row before the next step begins.

Back-pressure is a count of the sequences in flight: accepted and not finished. Once there are as many as rows and
places in the queue, new requests are refused at once. A refusal costs a client less than a wait that is too long.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median

from ..engine import EngineCore, OutputDelta, RequestOutput, SamplingParams
from .errors import EngineFailed, QueueFull, ShuttingDown
from .prompt_tokenizer import PromptSource, PromptTokenizer
from .response_stream import ResponseStream, engine_request_ids
from .snapshot import Observer, Snapshot, take_snapshot


class EngineThread:
    """Runs an engine for an event loop. All methods must be called from that loop.

    Args:
        engine: used by this thread alone, from `start` to `stop`.
        max_queue: how many sequences may wait for a row.
        pace: the least number of seconds per iteration; 0 for full speed.

    Attributes:
        prompt_tokenizer: turns prompts into token ids, off the event loop.
        observers: called on the event loop after every step, with its outputs and a `Snapshot` of the engine.
        capacity: how many sequences may be in flight.
        num_in_flight: how many sequences were accepted and have not finished.
        draining: whether new requests are refused because the server is about to stop.
        crashed: whether the engine has stopped because of an error.

    Raises:
        ValueError: a negative max_queue.
    """

    def __init__(self, engine: EngineCore, max_queue: int = 64, pace: float = 0.0):
        if max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, the number of sequences that may wait, not {max_queue}.")
        self.engine, self.capacity, self.pace = engine, engine.config.max_batch_size + max_queue, pace
        self.observers: list[Observer] = []
        self.num_in_flight, self.draining, self.crashed = 0, False, False
        self._streams: dict[str, ResponseStream] = {}  # by the engine's request id, until finished or cancelled
        self._num_unfinished: dict[str, int] = {}  # how many sequences of each request the engine still works on
        self._finish_times: deque[float] = deque(maxlen=100)  # of the last sequences
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.prompt_tokenizer = PromptTokenizer(engine)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.outputs.output_type = OutputDelta
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and the engine has not crashed."""
        return self._thread.is_alive() and not self.crashed

    # --- on the event loop --------------------------------------------------------------------------------------

    async def submit(
        self,
        response_id: str,
        prompts: list[PromptSource],
        params: SamplingParams,
        priority: int = 0,
        deadline: float | None = None,
    ) -> tuple[ResponseStream, list[list[int]]]:
        """Accept an HTTP request with all of its prompts, or refuse it.

        Args:
            response_id: names the request; unique among those in flight.
            prompts: text, token ids, or a function that makes either and is called off the event loop.
            params: how to continue each prompt.
            priority: the smaller, the more urgent.
            deadline: seconds that the request may take; None for no limit.

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
        except BaseException:
            self.num_in_flight -= num_sequences
            raise

        engine_ids = engine_request_ids(response_id, len(prompts), params.n)
        stream = ResponseStream(engine_ids, params.n, accepted, deadline, self.cancel)
        for engine_id, token_ids in zip(engine_ids, validated, strict=True):
            self._streams[engine_id], self._num_unfinished[engine_id] = stream, params.n
            self._inbox.put(partial(self._add_request, token_ids, params, engine_id, priority))
        return stream, validated

    def cancel(self, stream: ResponseStream) -> None:
        """Abort a stream's requests. Their places are free again once the engine has aborted them."""
        for engine_id in stream.engine_ids:
            self._streams.pop(engine_id, None)
            self._inbox.put(partial(self.engine.abort_request, engine_id))

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
            stream.fail(ShuttingDown("The server is shutting down and could not finish this request.", 1))

    async def stop(self) -> None:
        """End the thread after the current iteration."""
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self.engine.outputs.output_type = RequestOutput
        self.prompt_tokenizer.shutdown()

    def retry_after(self) -> int:
        """Estimate the seconds until there is room: the median time between the last finished sequences, 1 to 60."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._finish_times)]
        return min(60, max(1, math.ceil(median(gaps)))) if gaps else 1

    def refuse_if_unable(self, num_sequences: int = 1) -> None:
        """Return if that many more sequences can be accepted now.

        Raises:
            QueueFull, ShuttingDown, EngineFailed: see `submit`.
        """
        if not self.alive:
            raise EngineFailed("The engine has stopped, and the server must be restarted.")
        if self.draining:
            raise ShuttingDown("The server is shutting down and takes no more requests.", 1)
        if self.num_in_flight + num_sequences > self.capacity:
            raise QueueFull(
                f"The queue is full: {self.num_in_flight} of at most {self.capacity} sequences are in flight. "
                f"Try again later.",
                self.retry_after(),
            )

    # --- on the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self.engine
        try:
            while self._empty_inbox(wait=not engine.has_unfinished_requests()):
                if not engine.has_unfinished_requests():
                    continue
                started = time.perf_counter()
                try:
                    outputs = engine.step()
                except Exception:
                    if engine.num_waiting or engine.num_running:
                        raise
                    traceback.print_exc()  # the policy's error: all requests have ended, and the next step says so
                    continue
                self._loop.call_soon_threadsafe(self._deliver, outputs, take_snapshot(engine))
                time.sleep(max(0.0, self.pace - (time.perf_counter() - started)))
        except BaseException as error:  # `step` handles all that it can: the engine cannot go on
            self._loop.call_soon_threadsafe(self._on_crash, error)
            raise

    def _add_request(self, token_ids: list[int], params: SamplingParams, engine_id: str, priority: int) -> None:
        try:
            self.engine.add_request(token_ids, params, engine_id, priority)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            failed = [OutputDelta(engine_id, index, "", [], None, 0, "error", text) for index in range(params.n)]
            self._loop.call_soon_threadsafe(self._deliver, failed, take_snapshot(self.engine, stepped=False))

    def _empty_inbox(self, wait: bool) -> bool:
        """Run the inbox's tasks, and wait for the first one if told to; return False if one of them is to stop."""
        get = self._inbox.get if wait else self._inbox.get_nowait
        try:
            while (task := get()) is not None:
                task()
                get = self._inbox.get_nowait
        except queue.Empty:
            return True
        return False

    # --- on the event loop again, called by the engine's thread -----------------------------------------------------

    def _deliver(self, outputs: list[OutputDelta], snapshot: Snapshot) -> None:
        for observe in self.observers:
            observe(outputs, snapshot)
        for output in outputs:
            if (stream := self.stream_of(output.request_id)) is not None:
                stream.put(output)
            if output.finish_reason is not None:
                self._count_finished(output.request_id)

    def _count_finished(self, engine_id: str) -> None:
        if self.num_in_flight >= self.engine.config.max_batch_size:
            self._finish_times.append(time.perf_counter())
        else:  # rows are free, so the times between finished sequences say nothing about waiting for one
            self._finish_times.clear()
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
