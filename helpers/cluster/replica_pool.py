"""The pool of replicas: it starts, follows, drains and replaces them, so that as many are ready as are wanted.

Each replica has a task that reads its reports until it is lost (failure_detector.py) and then killed. The rules in
lifecycle.py decide which replica is started or drained next, whenever the state of a replica changes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .connection import ReplicaConnection
from .failure_detector import next_report
from .lifecycle import DRAINING, READY, STARTING, Drain, Member, Start, next_change
from .replica import ReplicaLost

RESTART_PAUSE = 1.0  # seconds before another attempt to start a replica
logger = logging.getLogger(__name__)


class ReplicaPool:
    """Keeps as many replicas ready as are wanted. Its methods must be called from the event loop.

    Args:
        owner: the `ReplicaClient`. Its `on_ready`, `on_report`, `on_left` and `on_crash` are called when that happens,
            and its `load` says how many requests a replica has not finished.
        start_replica, timeout, drain_grace: as for the `ReplicaClient`.

    Attributes:
        members: all replicas, in the order in which they were started.
        wanted: how many replicas should be ready.
    """

    def __init__(
        self,
        owner: Any,
        start_replica: Callable[[], Awaitable[ReplicaConnection]],
        timeout: float,
        drain_grace: float,
    ):
        self.members: list[Member] = []
        self.wanted = 0
        self._owner, self._start_replica = owner, start_replica
        self._timeout, self._drain_grace, self._generation = timeout, drain_grace, 0
        self._tasks: dict[Member, asyncio.Task] = {}
        self._stopped = False

    def start(self, replicas: list[ReplicaConnection]) -> None:
        """Begin with replicas that are ready; as many are wanted."""
        self.wanted = len(replicas)
        for place, handle in enumerate(replicas):
            self._add(Member(place, self._generation, handle))

    async def stop(self) -> None:
        """Kill all replicas, and start no more."""
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members:
            if member.handle is not None:
                member.handle.kill()
        self.members, self._tasks = [], {}

    def scale(self, wanted: int) -> None:
        """Start or drain replicas until `wanted` are ready."""
        self.wanted = wanted
        self._change()

    def restart(self) -> list[str]:
        """Replace all replicas, one after another, and return the names of those that are replaced."""
        self._generation += 1
        names = [member.name for member in self.members if member.state == READY]
        self._change()
        return names

    def count(self, state: str) -> int:
        """Return how many replicas are in a state."""
        return sum(member.state == state for member in self.members)

    # --- the life of a replica ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Start and drain replicas until there is nothing to do but to wait."""
        while change := self._next_change():
            if isinstance(change, Start):
                self._add(Member(change.place, self._generation))
            elif change.member.state == STARTING:
                self._tasks.pop(change.member).cancel()
                self.members.remove(change.member)
            else:
                change.member.state = DRAINING
                change.member.drain_until = asyncio.get_running_loop().time() + self._drain_grace
                logger.info("Replica %s drains.", change.member.name)

    def _next_change(self) -> Start | Drain | None:
        if self._stopped:
            return None
        return next_change(self.members, self.wanted, self._generation, self._owner.load)

    def _add(self, member: Member) -> None:
        self.members.append(member)
        self._tasks[member] = asyncio.create_task(self._run(member))

    async def _run(self, member: Member) -> None:
        """Start a replica unless it is ready, and follow it to its end."""
        try:
            if member.handle is None:
                try:
                    member.handle = await self._start_replica()
                except Exception as error:
                    logger.warning("A replica could not be started: %s", error)
                    await asyncio.sleep(RESTART_PAUSE)
                    self._remove(member)
                    return
            member.state = READY
            self._owner.on_ready(member)
            self._change()
            lost = await self._follow(member)
            member.handle.kill()
            self._owner.on_left(member, lost)
            self._remove(member)
        except Exception as error:  # not of a replica: the front end itself cannot continue
            self._owner.on_crash(error)
            raise

    def _remove(self, member: Member) -> None:
        self.members.remove(member)
        del self._tasks[member]
        self._change()

    async def _follow(self, member: Member) -> bool:
        """Hand on a replica's reports until it is drained or lost, and return whether it is lost."""
        try:
            while True:
                report = await next_report(member.handle, self._timeout)
                if report.error is not None:
                    member.state = DRAINING  # before the report is used, so that no waiting request is sent here
                self._owner.on_report(member, report)
                if report.error is not None:
                    raise ReplicaLost(f"its engine has stopped: {report.error}")
                if member.state == DRAINING:
                    is_late = asyncio.get_running_loop().time() >= member.drain_until
                    if is_late or not self._owner.load(member):
                        return False
        except ReplicaLost as error:
            logger.warning("Replica %s is lost: %s.", member.description, error)
        return True
