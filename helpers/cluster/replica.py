"""A replica: an engine on a thread of its own process, and its reports.

A report holds everything since the last one, from as many iterations as there were. So the front end reads one message
per report and not one per token. A replica without news still reports after half a second, which is its heartbeat. A
report also says for how long the current iteration has run, since a replica whose engine hangs can still report.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..engine import EngineConfig, EngineCore, ModelInfo, SamplingParams
from ..server.adapters import loaded_adapters
from ..server.engine_thread import EngineThread
from ..server.output_delta import OutputDelta
from ..server.snapshot import Snapshot
from ..server.worker_thread import WorkerThread

HEARTBEAT = 0.5  # seconds between two reports of a replica with nothing new


@dataclass(frozen=True)
class ReplicaInfo:
    """What a replica says about itself once it is ready.

    Attributes:
        pid, node: its process, and the name of the machine that it runs on.
        config: the engine's settings.
        model_info: the vocabulary, the context length and the EOS tokens of the model.
        tokenizer: turns text into token ids and back.
        num_blocks, block_size: of its KV cache; None if a sequence needs only a row.
        node_id: Ray's id of the node that it runs on; a machine can have several.
        adapters: the names of its adapters, each with the salt of the hashes of its blocks.
    """

    pid: int
    node: str
    config: EngineConfig
    model_info: ModelInfo
    tokenizer: Any
    num_blocks: int | None
    block_size: int | None
    node_id: str | None = None
    adapters: Mapping[str, bytes] = field(default_factory=dict)


@dataclass
class Report:
    """What is new in a replica.

    Attributes:
        outputs: new outputs, in order.
        cache_events: see `BlockManager.take_cache_events`.
        snapshot: the engine now, with the forward passes since the last report.
        step_seconds: for how long the current iteration has run; 0 between two iterations.
        error: why the engine has stopped; None if it has not.
    """

    outputs: list[OutputDelta] = field(default_factory=list)
    cache_events: list[tuple[bytes, bool]] = field(default_factory=list)
    snapshot: Snapshot = field(default_factory=Snapshot)
    step_seconds: float = 0.0
    error: str | None = None


class ReplicaLost(Exception):
    """A replica has ended, or it does not respond."""


class Replica(EngineThread):
    """An engine that collects its outputs in reports. Its methods must be called from one event loop.

    Args:
        engine: the engine, used by this object alone.
        worker: as for every `EngineThread`.
    """

    def __init__(self, engine: EngineCore, worker: WorkerThread | None = None):
        super().__init__(engine, worker=worker)
        self._report, self._is_new = Report(), False
        self._compiling: dict[str, asyncio.Task] = {}  # requests that the engine does not have yet, by their ids
        self._on_report: Callable[[Report], None] | None = None  # for a report that was asked for
        self._heartbeat: asyncio.TimerHandle | None = None
        self._step, self._step_started = engine.step, None
        engine.step = self._timed_step
        self._prefix_caching = engine.block_manager is not None and engine.block_manager.prefix_caching
        self._take_cache_events()  # from here on, they are recorded

    @property
    def info(self) -> ReplicaInfo:
        engine = self.engine
        blocks = engine.block_manager
        return ReplicaInfo(
            os.getpid(),
            os.uname().nodename,
            engine.config,
            engine.validator.model,
            engine.tokenizer,
            blocks and blocks.num_blocks,
            blocks and blocks.block_size,
            adapters={name: adapter.digest for name, adapter in loaded_adapters(engine).items()},
        )

    def add(
        self,
        engine_id: str,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
        generated: Mapping[int, Seq[int]],
        **options: Any,
    ) -> None:
        """Add a request to the engine, which continues after the tokens `generated`."""
        add = partial(self._add_request, token_ids, params, engine_id, priority, generated, **options)
        if params.structured_outputs is None:
            self._inbox.put(add)
            return
        # The front end sends a description, not its grammar, and the engine's thread must not compile it.
        end = partial(self._end, engine_id, generated or range(params.n))
        compiling = self._loop.create_task(self.prompt_tokenizer.validate([token_ids], params))
        self._compiling[engine_id] = compiling
        compiling.add_done_callback(partial(self._compiled, engine_id, add, end))

    def _compiled(self, engine_id: str, add: Callable[[], None], end: Callable[..., None], task: asyncio.Task) -> None:
        del self._compiling[engine_id]
        if task.cancelled():
            add = partial(end, "abort")
        elif (error := task.exception()) is not None:
            add = partial(end, "error", error)
        self._inbox.put(add)

    def abort(self, engine_id: str) -> None:
        """Abort a request of the engine; one that it does not have has finished."""
        if (compiling := self._compiling.get(engine_id)) is None:
            self._send_abort(engine_id)
        elif not compiling.cancel():  # it is compiled, and `_compiled` runs before this call
            self._loop.call_soon(self._send_abort, engine_id)

    def set_pace(self, seconds: float) -> None:
        """Set the least number of seconds per iteration."""
        self.pace = seconds

    def next_report(self, on_report: Callable[[Report], None]) -> None:
        """Call `on_report` with what is new, as soon as there is something and at the latest after `HEARTBEAT` seconds.

        A callback, because each further step of the event loop may have to wait for the engine's interpreter lock.
        """
        self._on_report = on_report
        if self._is_new:
            self._send_report()
        else:
            self._heartbeat = self._loop.call_later(HEARTBEAT, self._send_report)

    def _send_report(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        report, self._report = self._report, Report(snapshot=replace(self._report.snapshot, passes=()))
        report.cache_events = self._take_cache_events()
        started = self._step_started
        report.step_seconds = 0.0 if started is None else time.perf_counter() - started
        on_report, self._on_report, self._is_new = self._on_report, None, False
        on_report(report)

    def _take_cache_events(self) -> list[tuple[bytes, bool]]:
        return self.engine.block_manager.take_cache_events() if self._prefix_caching else []

    def _timed_step(self) -> list[OutputDelta]:
        self._step_started = time.perf_counter()
        try:
            return self._step()
        finally:
            self._step_started = None

    def _deliver(self, outputs: list[OutputDelta], snapshot: Snapshot) -> None:
        self._report.outputs += outputs
        self._report.snapshot = replace(snapshot, passes=self._report.snapshot.passes + snapshot.passes)
        self._on_news()

    def _on_crash(self, error: BaseException) -> None:
        self._report.error = f"{type(error).__name__}: {error}"  # the front end then ends this process
        self._on_news()

    def _on_news(self) -> None:
        self._is_new = True
        if self._on_report is not None:
            self._send_report()
