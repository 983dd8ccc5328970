"""The thread that runs the engine; the event loop submits requests to it, reads their outputs and cancels them.

The claim: the event loop never waits for the model, and the engine never waits for a client. They share nothing but an
inbox, which the thread empties before every step of the engine, and one stream of outputs per request. A cancelled
request has therefore left its row before the next step begins.
"""

import asyncio
import queue
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..engine import EngineCore, RequestOutput, SamplingParams
from ..server.output_delta import OutputDelta
from .engine_client import EngineClient
from .http_errors import EngineFailed
from .snapshot import take_snapshot
from .worker_thread import WorkerThread


class EngineThread(EngineClient):
    """Runs an engine for an event loop. All methods must be called from that loop.

    Args:
        engine: used by this thread alone, from `start` to `stop`.
        max_queue, pace: as for every `EngineClient`.
        worker: the thread, which this object ends; the one that has loaded the model is the fastest
            (worker_thread.py). A new one if omitted.
    """

    def __init__(self, engine: EngineCore, max_queue: int = 64, pace: float = 0.0, worker: WorkerThread | None = None):
        super().__init__(engine, max_queue, pace)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = worker
        self._running: Future | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- on the event loop --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.outputs.output_type = OutputDelta
        self._worker = self._worker or WorkerThread()
        self._running = self._worker.submit(self._run)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and the engine has not crashed."""
        return self._running is not None and not self._running.done() and not self.crashed

    async def stop(self) -> None:
        """End the thread after the current iteration."""
        self._inbox.put(None)
        if self._worker is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._worker.end)
        self.engine.outputs.output_type = RequestOutput
        self.prompt_tokenizer.shutdown()

    async def run(self, function: Callable[[], None]) -> None:
        """Run a function on the engine's thread, between two iterations.

        Raises:
            Exception: that of the function.
            EngineFailed: the engine has stopped.
        """
        future: Future = Future()

        def task() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(task)
        while not future.done():
            if not self.alive:
                raise EngineFailed("The engine has stopped, and the server must be restarted.")
            await asyncio.wait([asyncio.wrap_future(future)], timeout=1)
        future.result()

    def _send(
        self, engine_id: str, token_ids: list[int], params: SamplingParams, priority: int, **options: Any
    ) -> None:
        self._inbox.put(partial(self._add_request, token_ids, params, engine_id, priority, **options))

    def _send_abort(self, engine_id: str) -> None:
        self._inbox.put(partial(self.engine.abort_request, engine_id))

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
                if (rest := self.pace - (time.perf_counter() - started)) > 0:
                    time.sleep(rest)
        except BaseException as error:  # `step` handles all that it can: the engine cannot go on
            self._loop.call_soon_threadsafe(self._on_crash, error)
            traceback.print_exc()

    def _add_request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        engine_id: str,
        priority: int,
        generated: Mapping[int, Seq[int]] | None = None,
        **options: Any,
    ) -> None:
        try:
            self.engine.add_request(token_ids, params, engine_id, priority, generated=generated, **options)
        except Exception as error:
            self._end(engine_id, generated or range(params.n), "error", error)

    def _end(self, engine_id: str, indices: Iterable[int], reason: str, error: Exception | None = None) -> None:
        """Deliver the last outputs of a request that the engine does not have."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        last = [OutputDelta(engine_id, index, "", [], None, 0, reason, text) for index in indices]
        self._loop.call_soon_threadsafe(self._deliver, last, take_snapshot(self.engine, stepped=False))

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
