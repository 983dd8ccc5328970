"""The front end's side of all replicas: an `EngineClient` whose engine is several engines in other processes.

Each replica has a task that asks it for reports. A replica is lost if it ends, if it does not report for `timeout`
seconds, or if one of its iterations takes longer than that. It is then killed, and another one is started in its place.
Its unfinished requests continue on the replicas that remain, from their prompts and the tokens delivered so far. If no
replica remains, they wait for the next one. A client notices only a pause.

A request may itself cause the losses. So a request that was on three lost replicas ends with an error. On its third
replica, no other request has its last attempt: the request that causes the losses ends after three, and takes no other
with it. Until such a replica is free, a request waits for its last attempt.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from ..engine import EngineConfig, OutputDelta, SamplingParams
from ..engine.block_manager import BlockManager
from ..engine.validation import RequestValidator
from ..server.engine_client import EngineClient
from ..server.snapshot import MAX_NAMED, Snapshot
from ..trace import RowStep
from .dispatcher import DispatchedRequest, Dispatcher, NoReplicas
from .replica import ReplicaHandle, ReplicaInfo, ReplicaLost, Report
from .routing import Router

MAX_ASSIGNMENTS = 3  # a request that was on this many lost replicas probably caused the losses
GRACE = 1.0  # seconds to read a report that came while the front end itself was stopped
RESTART_PAUSE = 1.0  # seconds before another attempt to start a replica
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _AllBlocks:
    num_blocks: int


class ResumableValidator(RequestValidator):
    """Also refuses requests that another replica could not resume."""

    def check_counts(self, prompt_tokens: int, params: SamplingParams) -> int:
        max_tokens = super().check_counts(prompt_tokens, params)
        self.check_recomputation(prompt_tokens, max_tokens)
        return max_tokens


class ReplicatedEngine:
    """All replicas as one engine, as far as the server needs it: settings, tokenizer and limits.

    Args:
        info: what one of the replicas says about itself; all have the same model and settings.
        num_replicas: how many there are.
    """

    def __init__(self, info: ReplicaInfo, num_replicas: int):
        config = info.config
        blocks = None
        if info.num_blocks is not None:
            blocks = BlockManager(info.num_blocks, info.block_size, config.prefix_caching)
        self.config: EngineConfig = replace(
            config,
            max_batch_size=num_replicas * config.max_batch_size,
            max_tokens_per_step=num_replicas * config.max_tokens_per_step,
        )
        self.tokenizer = info.tokenizer
        # A request has to fit into a single replica.
        self.validator = ResumableValidator(info.tokenizer, config, info.model_info, blocks)
        self.block_manager = blocks and _AllBlocks(num_replicas * info.num_blocks)


class ReplicaClient(EngineClient):
    """Sends requests to replicas and delivers their outputs.

    Args:
        engine: the replicas, as one engine.
        max_queue, pace: as for every `EngineClient`.
        replicas: the replicas, ready.
        router: chooses the replica of each request.
        start_replica: starts another replica and returns it once it is ready.
        timeout: seconds without a report, or within one iteration, after which a replica is lost.

    Attributes:
        replicas: the replicas that take requests, by name.
        snapshots: what they reported last.
        num_lost: how many replicas were lost so far.
        num_resumed: how many times a request moved to another replica.
    """

    def __init__(
        self,
        engine: ReplicatedEngine,
        max_queue: int,
        pace: float,
        *,
        replicas: list[ReplicaHandle],
        router: Router,
        start_replica: Callable[[], Awaitable[ReplicaHandle]],
        timeout: float = 10.0,
    ):
        self.replicas: dict[str, ReplicaHandle] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.num_lost = self.num_resumed = 0
        self.dispatcher = Dispatcher(router)
        self._first, self._start_replica, self._timeout = replicas, start_replica, timeout
        self._waiting: list[DispatchedRequest] = []  # for a replica
        self._aborted: set[str] = set()
        self._tasks: list[asyncio.Task] = []
        self._rows: list[str | None] = [None] * len(replicas)  # the names of the replicas, by their place
        super().__init__(engine, max_queue, pace)

    # --- as an EngineClient ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._run(*pair)) for pair in enumerate(self._first)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in self.replicas.values():
            handle.kill()
        self.prompt_tokenizer.shutdown()

    @property
    def alive(self) -> bool:
        """Whether replicas run or will be started again."""
        return bool(self._tasks) and not self.crashed

    @property
    def pace(self) -> float:
        return self._pace

    @pace.setter
    def pace(self, seconds: float) -> None:
        self._pace = seconds
        for handle in self.replicas.values():
            handle.set_pace(seconds)

    def _send(self, engine_id: str, token_ids: list[int], params: SamplingParams, priority: int) -> None:
        max_tokens, context = params.max_tokens, self.engine.validator.model.context_length
        if max_tokens is None:  # the validator has made sure that there is a limit
            limits = self.engine.config.max_output_tokens, context and context - len(token_ids)
            max_tokens = min(limit for limit in limits if limit is not None)
        self._dispatch(DispatchedRequest(engine_id, token_ids, params, max_tokens, priority))

    def _send_abort(self, engine_id: str) -> None:
        if (request := self.dispatcher.requests.get(engine_id)) is None:
            return  # it has finished
        if request.replica is None:
            self._waiting.remove(request)
            self._end(request, "abort")
        else:
            self._aborted.add(engine_id)
            self.replicas[request.replica].abort(engine_id)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _dispatch(self, request: DispatchedRequest) -> None:
        """Send a request to a replica; without one that may take it, let it wait."""
        if len(request.history) >= MAX_ASSIGNMENTS:
            text = f"{len(request.history)} replicas were lost while they worked on this request"
            return self._end(request, "error", text)
        avoided = set()
        if len(request.history) == MAX_ASSIGNMENTS - 1:  # its last attempt
            others = self.dispatcher.requests.values()
            avoided = {other.replica for other in others if len(other.history) == MAX_ASSIGNMENTS}
        try:
            name = self.dispatcher.assign(request, avoided)
        except NoReplicas:
            self.dispatcher.requests[request.request_id] = request
            self._waiting.append(request)
            return None
        generated = {index: list(token_ids) for index, token_ids in request.generated.items()}
        try:
            self.replicas[name].add(
                request.request_id, request.prompt_token_ids, request.params, request.priority, generated
            )
        except BaseException:
            self.dispatcher.forget(request)
            raise

    def _dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._dispatch(request)

    def _end(self, request: DispatchedRequest, reason: str, error: str | None = None) -> None:
        """End a request that no replica has."""
        logprobs = None if request.params.logprobs is None else []
        outputs = [
            OutputDelta(request.request_id, index, "", [], logprobs, len(token_ids), reason, error)
            for index, token_ids in request.generated.items()
        ]
        self._aborted.discard(request.request_id)
        self.dispatcher.forget(request)
        self._deliver(outputs, self._snapshot(()))

    # --- replicas ---------------------------------------------------------------------------------------------------

    async def _run(self, place: int, handle: ReplicaHandle | None) -> None:
        """Follow the replica at a place, and start another one whenever it is lost."""
        try:
            await self._follow(place, handle)
        except Exception as error:  # not of a replica: the front end itself cannot continue
            logger.exception("The front end has stopped.")
            self._on_crash(error)
            raise

    async def _follow(self, place: int, handle: ReplicaHandle | None) -> None:
        while True:
            if handle is None:
                try:
                    handle = await self._start_replica()
                except Exception as error:
                    logger.warning("A replica could not be started: %s", error)
                    await asyncio.sleep(RESTART_PAUSE)
                    continue
            self._join(place, handle)
            try:
                while True:
                    report = await self._report_of(handle)
                    if report.step_seconds > self._timeout:
                        raise ReplicaLost(f"an iteration has taken {report.step_seconds:.1f} s")
                    self._on_report(handle.name, report)
            except TimeoutError:
                logger.warning("Replica %s is lost: no report for %g s.", handle.name, self._timeout)
            except ReplicaLost as error:
                logger.warning("Replica %s is lost: %s.", handle.name, error)
            self._lose(place, handle)
            handle = None

    async def _report_of(self, handle: ReplicaHandle) -> Report:
        """Return a replica's next report.

        Raises:
            ReplicaLost: it has ended.
            TimeoutError: it does not report in time.
        """
        asked = asyncio.ensure_future(handle.report())
        try:
            for seconds in (self._timeout, GRACE):
                done, _ = await asyncio.wait([asked], timeout=seconds)
                if done:
                    return asked.result()
            raise TimeoutError
        finally:
            asked.cancel()

    def _join(self, place: int, handle: ReplicaHandle) -> None:
        """Let a replica take requests, beginning with those that wait for one."""
        self.replicas[handle.name], self._rows[place] = handle, handle.name
        self.snapshots[handle.name] = Snapshot()
        prefix_caching = handle.info.config.prefix_caching
        self.dispatcher.add_replica(handle.name, handle.info.block_size if prefix_caching else None)
        if self._pace:
            handle.set_pace(self._pace)
        self._dispatch_waiting()

    def _lose(self, place: int, handle: ReplicaHandle) -> None:
        """Kill a replica, and let its requests continue on others."""
        self.num_lost += 1
        handle.kill()
        del self.replicas[handle.name], self.snapshots[handle.name]
        self._rows[place] = None
        for request in self.dispatcher.remove_replica(handle.name):
            if request.request_id in self._aborted:
                self._end(request, "abort")
            else:
                self.num_resumed += 1
                self._dispatch(request)

    def _on_report(self, name: str, report: Report) -> None:
        outputs = self.dispatcher.accept(name, report.outputs, report.cache_events)
        self._aborted.intersection_update(self.dispatcher.requests)
        is_new = bool(report.outputs or report.snapshot.passes or report.snapshot != self.snapshots[name])
        self.snapshots[name] = replace(report.snapshot, passes=())
        if is_new:
            self._deliver(outputs, self._snapshot(self._widened(name, report)))
        self._dispatch_waiting()  # those whose last attempt another request's has held back

    def _widened(self, name: str, report: Report) -> tuple:
        """Return the forward passes of a replica as passes of all rows; the other replicas' rows are empty."""
        rows = self.engine.config.max_batch_size // len(self._rows)
        before = self._rows.index(name) * rows
        after = self.engine.config.max_batch_size - before - rows
        return tuple(
            replace(one, row_steps=(RowStep(),) * before + one.row_steps + (RowStep(),) * after)
            for one in report.snapshot.passes
        )

    def _snapshot(self, passes: tuple) -> Snapshot:
        """Describe all replicas as one engine."""
        all_of, waiting = self.snapshots.values(), [request.request_id for request in self._waiting]
        return Snapshot(
            passes,
            (*waiting, *(label for one in all_of for label in one.waiting))[:MAX_NAMED],
            len(waiting) + sum(one.num_waiting for one in all_of),
            sum(one.num_running for one in all_of),
            sum(one.blocks_used for one in all_of),
            sum(one.blocks_cached for one in all_of),
        )
