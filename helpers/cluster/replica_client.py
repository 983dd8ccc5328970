"""The front end's side of all replicas: an `EngineClient` whose engine is several engines in other processes.

The unfinished requests of a lost replica continue on the replicas that remain, from their prompts and the tokens
delivered so far. If no replica remains, they wait for the next one. A client notices only a pause. The same happens to
requests that a draining replica has not finished in time.

A request may itself cause the losses. So a request that was on three lost replicas ends with an error. On its third
replica, no other request has its last attempt: the request that causes the losses ends after three, and takes no other
with it. Until such a replica is free, a request waits for its last attempt.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ..engine import SamplingParams
from ..server.engine_client import EngineClient
from ..server.output_delta import OutputDelta
from ..server.snapshot import MAX_NAMED, Snapshot
from .autoscaling import QueueLengthAutoscaler
from .connection import ReplicaConnection
from .dispatcher import DispatchedRequest, Dispatcher, NoReplicas
from .fleet_description import FleetDescription
from .lifecycle import READY, STARTING, Member
from .replica import Report
from .replica_pool import ReplicaPool
from .routing import FreeRowsFirst, Router

MAX_LOSSES = 3  # a request that was on this many lost replicas probably caused the losses
logger = logging.getLogger(__name__)


class ReplicaClient(EngineClient):
    """Sends requests to replicas and delivers their outputs.

    Args:
        engine: describes the replicas as one engine.
        max_queue, pace: as for every `EngineClient`.
        replicas: the replicas, ready.
        router: chooses the replica of each request. While some replicas have a free row, it chooses among these.
        start_replica: starts another replica and returns it once it is ready.
        timeout: seconds without a report, or within one iteration, after which a replica is lost.
        drain_grace: seconds in which a draining replica may finish its requests before they move to others.
        autoscaler: says how many replicas there should be; their number stays the same if omitted.

    Attributes:
        pool: starts, drains and replaces the replicas.
        replicas: the replicas that have requests or can take them, by name.
        snapshots: what they reported last.
        num_lost: how many replicas were lost so far.
        num_resumed: how many times a request moved to another replica.
    """

    def __init__(
        self,
        engine: FleetDescription,
        max_queue: int,
        pace: float,
        *,
        replicas: list[ReplicaConnection],
        router: Router,
        start_replica: Callable[[], Awaitable[ReplicaConnection]],
        timeout: float = 10.0,
        drain_grace: float = 30.0,
        autoscaler: QueueLengthAutoscaler | None = None,
    ):
        self.replicas: dict[str, ReplicaConnection] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.num_lost = self.num_resumed = 0
        self.dispatcher = Dispatcher(FreeRowsFirst(router))
        self.pool = ReplicaPool(self, start_replica, timeout, drain_grace)
        self._first, self._autoscaler, self._looking = replicas, autoscaler, None
        self._aborted: set[str] = set()
        super().__init__(engine, max_queue, pace)

    # --- as an EngineClient ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self.pool.start(self._first)
        if self._autoscaler is not None:
            self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self.pool.stop()
        self.prompt_tokenizer.shutdown()

    @property
    def alive(self) -> bool:
        """Whether replicas run or will be started again."""
        return bool(self.pool.members) and not self.crashed

    @property
    def replicas_in_view(self) -> list[dict[str, Any]]:
        members = sorted(self.pool.members, key=lambda member: member.place)
        return [
            {"name": member.name or f"replica {member.place}", "state": member.state, "rows": self.engine.rows}
            for member in members
        ]

    @property
    def problem(self) -> str | None:
        problem = super().problem
        if problem is None and not self.pool.count(READY):
            return f"No replica is ready: {self.pool.count(STARTING)} of {self.pool.wanted} are starting."
        return problem

    @property
    def pace(self) -> float:
        return self._pace

    @pace.setter
    def pace(self, seconds: float) -> None:
        self._pace = seconds
        for handle in self.replicas.values():
            handle.set_pace(seconds)

    def _send(
        self, engine_id: str, token_ids: list[int], params: SamplingParams, priority: int, adapter: str | None = None
    ) -> None:
        max_tokens = self.engine.validator.check_counts(len(token_ids), params)
        salt = b"" if adapter is None else self.engine.info.adapters[adapter]
        self._dispatch(DispatchedRequest(engine_id, token_ids, params, max_tokens, priority, adapter, salt))

    def _send_abort(self, engine_id: str) -> None:
        if (request := self.dispatcher.requests.get(engine_id)) is None:
            return  # it has finished
        if request.replica is None:
            self._end(request, "abort")
        else:
            self._aborted.add(engine_id)
            self.replicas[request.replica].abort(engine_id)

    # --- autoscaling ----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._autoscaler.interval)
                self.autoscale()
        except Exception as error:
            self.on_crash(error)
            raise

    def autoscale(self) -> None:
        """Ask the autoscaler how many replicas there should be, and start or drain some.

        Sequences count, because each takes a row: a request for six outputs counts as six.
        """
        self.pool.scale(self._autoscaler.desired(self.num_in_flight))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _dispatch(self, request: DispatchedRequest) -> None:
        """Send a request to a replica; without one that may take it, let it wait."""
        if request.num_losses >= MAX_LOSSES:
            text = f"{request.num_losses} replicas were lost while they worked on this request"
            return self._end(request, "error", text)
        avoided = {member.name for member in self.pool.members if member.state != READY}
        if request.num_losses == MAX_LOSSES - 1:  # its last attempt
            others = self.dispatcher.requests.values()
            avoided |= {other.replica for other in others if other.num_losses == MAX_LOSSES - 1}
        try:
            name = self.dispatcher.assign(request, avoided)
        except NoReplicas:
            self.dispatcher.requests[request.request_id] = request
            return None
        generated = {index: list(token_ids) for index, token_ids in request.generated.items()}
        options = {} if request.adapter is None else {"adapter": request.adapter}
        try:
            self.replicas[name].add(
                request.request_id, request.prompt_token_ids, request.params, request.priority, generated, **options
            )
        except BaseException:
            self.dispatcher.forget(request)
            raise

    def _dispatch_waiting(self) -> None:
        """Send the requests that wait, in the order of their arrival, as far as there are replicas for them."""
        for request in self.dispatcher.waiting:
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

    # --- as the owner of the pool -----------------------------------------------------------------------------------

    def on_ready(self, member: Member) -> None:
        """Let a replica take requests, beginning with those that wait for one."""
        handle, first = member.handle, self.engine.info
        if (handle.info.model_info, handle.info.num_blocks) != (first.model_info, first.num_blocks):
            logger.warning(
                "Replica %s has another vocabulary, context or number of blocks than the first replica: restart the "
                "front end, which checks requests against the first one.",
                handle.name,
            )
        self.replicas[handle.name], self.snapshots[handle.name] = handle, Snapshot()
        config = handle.info.config
        block_size = handle.info.block_size if config.prefix_caching else None
        self.dispatcher.add_replica(handle.name, block_size, config.max_batch_size)
        if self._pace:
            handle.set_pace(self._pace)
        self._dispatch_waiting()

    def on_left(self, member: Member, lost: bool) -> None:
        """Let the unfinished requests of a replica continue on others."""
        self.num_lost += lost
        del self.replicas[member.name], self.snapshots[member.name]
        for request in self.dispatcher.remove_replica(member.name):
            request.num_losses += lost
            if request.request_id in self._aborted:
                self._end(request, "abort")
            else:
                self.num_resumed += 1
                self._dispatch(request)

    def load(self, member: Member) -> int:
        """Return how many requests a replica has not finished."""
        return self.dispatcher.replicas[member.name].num_requests

    def on_crash(self, error: BaseException) -> None:
        """Fail all requests: the front end cannot continue."""
        logger.error("The front end has stopped.", exc_info=error)
        self._on_crash(error)

    def on_report(self, member: Member, report: Report) -> None:
        """Deliver the outputs in a replica's report."""
        name = member.name
        outputs = self.dispatcher.accept(name, report.outputs, report.cache_events)
        self._aborted.intersection_update(self.dispatcher.requests)
        is_new = bool(report.outputs or report.snapshot.passes or report.snapshot != self.snapshots[name])
        self.snapshots[name] = replace(report.snapshot, passes=())
        if is_new:
            self._deliver(outputs, self._snapshot(report.snapshot.passes, name))
        self._dispatch_waiting()  # a last attempt of another request may have ended

    def _snapshot(self, passes: tuple, replica: str | None = None) -> Snapshot:
        """Describe all replicas as one engine, with the forward passes of one of them."""
        snapshots, waiting = self.snapshots.values(), [request.request_id for request in self.dispatcher.waiting]
        return Snapshot(
            passes,
            (*waiting, *(label for snapshot in snapshots for label in snapshot.waiting))[:MAX_NAMED],
            len(waiting) + sum(snapshot.num_waiting for snapshot in snapshots),
            sum(snapshot.num_running for snapshot in snapshots),
            sum(snapshot.blocks_used for snapshot in snapshots),
            sum(snapshot.blocks_cached for snapshot in snapshots),
            replica,
        )
