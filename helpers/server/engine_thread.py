"""One thread runs the engine; the event loop submits requests, listens to their outputs and takes them back.

The claim: the event loop never waits for the model, and the engine never for a client. Between the two there is
nothing but an inbox, which the thread empties before every step of the engine, and a queue of outputs for each request.
A request that is taken back has therefore left its row before the next step begins.

Back-pressure is a count: the answers that were accepted and have not ended. Above as many as there are rows and places
in the queue, a request is refused at once, which costs its client less than a wait that would be too long.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

from ..admission import Prompt
from ..engine import Engine
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from ..trace import Iteration


def name_of(label: Hashable) -> str:
    """How people call an answer: by the id of its response; with `/1` behind it if it is the choice with index 1."""
    engine_id, index = label if isinstance(label, tuple) else (label, 0)
    response_id, _, first = engine_id.partition("/")
    choice = int(first or 0) + index
    return f"{response_id}/{choice}" if choice else response_id


class Refused(Exception):
    """Not now: try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Refused):
    """There are as many unfinished answers as the server accepts."""


class ShuttingDown(Refused):
    """The server takes no more requests, or has run out of time for this one."""


class DeadlinePassed(Exception):
    """The request took longer than its deadline allows."""


class EngineFailed(Exception):
    """An iteration went wrong, and this request was part of it."""


@dataclass(frozen=True)
class Snapshot:
    """The engine after a step; names as in the trace.

    Attributes:
        iterations: the step's forward passes.
        waiting, running: names of the answers in the queue and in rows.
        blocks_used, blocks_cached: of the KV cache's blocks; 0 where there are none.
    """

    iterations: tuple[Iteration, ...] = ()
    waiting: tuple[Hashable, ...] = ()
    running: tuple[Hashable, ...] = ()
    blocks_used: int = 0
    blocks_cached: int = 0


Observer = Callable[[list[RequestOutput], Snapshot], None]


class Answers:
    """The answers to one request as they come: an asynchronous iterator over `(choice, output)`.

    Choices are numbered prompt by prompt. Use it in a `with`: whoever leaves early takes the request back.

    Raises:
        DeadlinePassed, EngineFailed, ShuttingDown: from the iterator, as soon as that is so.
    """

    def __init__(self, thread: "EngineThread", engine_ids: list[str], n: int, accepted: float, deadline: float | None):
        self.engine_ids, self.unfinished, self.accepted = engine_ids, len(engine_ids) * n, accepted
        self._first_choice = {engine_id: place * n for place, engine_id in enumerate(engine_ids)}
        self._thread, self._deadline = thread, deadline
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_) -> None:
        if self.unfinished:
            self._thread.take_back(self)

    def __aiter__(self) -> "Answers":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self.unfinished:
            raise StopAsyncIteration
        left = None if self._deadline is None else self.accepted + self._deadline - time.perf_counter()
        try:
            if left is not None and left <= 0:
                raise TimeoutError
            async with asyncio.timeout(left):  # unlike wait_for, it never loses a cancellation
                item = await self._items.get()
        except TimeoutError:
            raise DeadlinePassed(f"The request took longer than its deadline of {self._deadline:g} s.") from None
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is not None:
            self.unfinished -= 1
        if item.finish_reason == "error":
            raise EngineFailed(item.error)
        return self._first_choice[item.request_id] + item.index, item

    def put(self, item: RequestOutput | Exception) -> None:
        self._items.put_nowait(item)


class EngineThread:
    """Runs an engine for an event loop. All methods are called from that loop.

    Args:
        engine: nobody else may use it meanwhile.
        max_queue: how many answers may wait for a row.
        pace: seconds that an iteration takes at least; 0 for as fast as it can.

    Attributes:
        observers: called on the event loop after every step, with its outputs and what the engine looks like now.
        open: how many answers were accepted and have not ended.
        draining: whether new requests are refused because the server is about to stop.
        died: whether the engine has come to an end that nobody wanted.
    """

    def __init__(self, engine: Engine, max_queue: int = 64, pace: float = 0.0):
        if max_queue < 0:
            raise ValueError(f"max_queue is how many answers may wait, at least 0, not {max_queue}.")
        self.engine, self.capacity, self.pace = engine, engine.config.max_batch_size + max_queue, pace
        self.observers: list[Observer] = []
        self.open, self.draining = 0, False
        self._listeners: dict[str, Answers] = {}  # by the engine's request id
        self._unfinished: dict[str, int] = {}  # how many answers of each request the engine still works on
        self._ended: deque[float] = deque(maxlen=100)  # when the last answers ended
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.died = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.died

    # --- what the event loop asks -------------------------------------------------------------------------------

    async def submit(
        self,
        request_id: str,
        prompts: list[Prompt | Callable[[], Prompt]],
        params: SamplingParams,
        priority: int = 0,
        deadline: float | None = None,
    ) -> tuple[Answers, int]:
        """Accept a request with all of its prompts, or refuse it. A function makes a prompt that takes time to make.

        Returns:
            Its answers to come, and how many tokens its prompts have.

        Raises:
            ValueError: it can never run.
            QueueFull, ShuttingDown: not now.
            EngineFailed: not any more.
        """
        wanted = len(prompts) * params.n
        if wanted > self.capacity:
            raise ValueError(
                f"The request asks for {wanted} answers, and this server works on {self.capacity} at most: split it."
            )
        accepted = time.perf_counter()
        self._refuse_if_unable(wanted)
        self.open += wanted  # from here on, before any work is done for it: others are coming meanwhile
        try:
            loop = asyncio.get_running_loop()
            checked = await loop.run_in_executor(self._tokenizing, self._token_ids, prompts, params)
            self._refuse_if_unable(0)  # the server may have begun to stop
        except BaseException:
            self.open -= wanted
            raise

        ids = [f"{request_id}/{place * params.n}" if place else request_id for place in range(len(prompts))]
        answers = Answers(self, ids, params.n, accepted, deadline)
        for engine_id, token_ids in zip(ids, checked, strict=True):
            self._listeners[engine_id], self._unfinished[engine_id] = answers, params.n
            self._inbox.put(partial(self._add, token_ids, params, engine_id, priority))
        return answers, sum(map(len, checked))

    def take_back(self, answers: Answers) -> None:
        """Nobody waits for these answers any more. Their places are free again when the engine says so."""
        for engine_id in answers.engine_ids:
            self._listeners.pop(engine_id, None)
            self._inbox.put(partial(self.engine.abort_request, engine_id))

    def listener(self, engine_id: str) -> Answers | None:
        """Who waits for a request; None if nobody does any more."""
        return self._listeners.get(engine_id)

    async def drain(self, grace: float) -> None:
        """Take no more requests, finish those that the engine has, and after `grace` seconds refuse the rest."""
        self.draining = True
        end = time.perf_counter() + grace
        while self.open and self.alive and time.perf_counter() < end:
            await asyncio.sleep(0.05)
        self.give_up()

    def give_up(self) -> None:
        """Tell everybody who still waits that it was in vain."""
        for answers in set(self._listeners.values()):
            answers.put(ShuttingDown("The server is shutting down and could not finish this request.", 1))

    async def stop(self) -> None:
        """End the thread, after the iteration that it is in."""
        self._inbox.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._tokenizing.shutdown()

    def _refuse_if_unable(self, wanted: int) -> None:
        if not self.alive:
            raise EngineFailed("The engine has stopped, and the server has to be started anew.")
        if self.draining:
            raise ShuttingDown("The server takes no more requests: it is about to stop.", 1)
        if self.open + wanted > self.capacity:
            raise QueueFull(
                f"The server works on {self.open} answers already, {self.capacity} at most: try again later.",
                self.retry_after(),
            )

    def _token_ids(self, prompts: list[Prompt | Callable[[], Prompt]], params: SamplingParams) -> list[list[int]]:
        """On a thread of its own: a long text takes a while."""
        made = [prompt() if callable(prompt) else prompt for prompt in prompts]
        return [self.engine.admission.check(prompt, params)[0] for prompt in made]

    def retry_after(self) -> int:
        """Seconds until there is likely room again: the usual time between the last ends of answers, 1 to 60."""
        gaps = [later - earlier for earlier, later in itertools.pairwise(self._ended)]
        return min(60, max(1, math.ceil(median(gaps)))) if gaps else 1

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._empty_inbox(wait=not self.engine.has_unfinished_requests()):
                started = time.perf_counter()
                try:
                    outputs = self.engine.step()
                except Exception:
                    if self.engine.waiting or self.engine.running:
                        raise
                    traceback.print_exc()  # the policy's: everybody has ended, which the next step tells
                    continue
                self._loop.call_soon_threadsafe(self._deliver, outputs, self._snapshot())
                time.sleep(max(0.0, self.pace - (time.perf_counter() - started)))
        except BaseException as error:  # `step` answers for all that it can: this is the end of the engine
            self._loop.call_soon_threadsafe(self._died, error)
            raise

    def _add(self, token_ids: list[int], params: SamplingParams, engine_id: str, priority: int) -> None:
        try:
            self.engine.add_request(token_ids, params, engine_id, priority)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            failed = [RequestOutput(engine_id, token_ids, "", [], "error", i, error=text) for i in range(params.n)]
            self._loop.call_soon_threadsafe(self._deliver, failed, self._snapshot(idle=True))

    def _snapshot(self, idle: bool = False) -> Snapshot:
        engine, iterations = self.engine, reversed(self.engine.trace.iterations)
        blocks = getattr(engine.execution, "blocks", None)
        return Snapshot(
            () if idle else tuple(itertools.takewhile(lambda one: one.step == engine.steps - 1, iterations))[::-1],
            tuple(engine.waiting),
            tuple(engine.running),
            blocks.used if blocks else 0,
            blocks.cached if blocks else 0,
        )

    def _empty_inbox(self, wait: bool) -> bool:
        """Do what the event loop asked for since the last iteration; False if that is to stop."""
        with_next = self._inbox.get if wait else self._inbox.get_nowait
        try:
            while (task := with_next()) is not None:
                task()
                with_next = self._inbox.get_nowait
        except queue.Empty:
            return True
        return False

    def _deliver(self, outputs: list[RequestOutput], snapshot: Snapshot) -> None:
        """On the event loop: hand out what a step yielded."""
        for observe in self.observers:
            observe(outputs, snapshot)
        for output in outputs:
            listener = self.listener(output.request_id)
            if listener is not None:
                listener.put(output)
            if output.finish_reason is not None:
                self._end(output.request_id)

    def _died(self, error: BaseException) -> None:
        """On the event loop: nobody will hear from the engine again."""
        self.died = True
        for answers in set(self._listeners.values()):
            answers.put(EngineFailed(f"The engine has stopped: {type(error).__name__}: {error}"))
        self.open -= sum(self._unfinished.values())
        self._listeners, self._unfinished = {}, {}

    def _end(self, engine_id: str) -> None:
        if self.open >= self.engine.config.max_batch_size:
            self._ended.append(time.perf_counter())
        else:  # rows are free: how soon the next answer ends says nothing of how soon it could
            self._ended.clear()
        self.open -= 1
        self._unfinished[engine_id] -= 1
        if not self._unfinished[engine_id]:
            del self._unfinished[engine_id]
            self._listeners.pop(engine_id, None)
