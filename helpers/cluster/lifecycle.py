"""The life of a replica, and the rules that say which replica is started or drained next.

    starting   its process starts and loads the model; it takes no requests yet
    ready      it takes requests
    draining   it takes no new requests, and is stopped once its requests have finished
    ended      its process was killed, and its cores are not free yet

Losses, a rolling restart and autoscaling need the same rules: they compare the replicas that there are with those that
are wanted, and name one change. In a rolling restart the replicas of older generations are replaced one by one.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

STARTING, READY, DRAINING, ENDED = "starting", "ready", "draining", "ended"


@dataclass(eq=False)
class Member:
    """A replica as the front end sees it.

    Attributes:
        place: which of the places that are wanted it fills.
        generation: a rolling restart replaces the members of older generations.
        handle: how to call it; None until it is ready.
        state: STARTING, READY, DRAINING or ENDED.
        drain_until: when its unfinished requests move to other replicas, by the clock of the event loop.
    """

    place: int
    generation: int
    handle: Any = None
    state: str = STARTING
    drain_until: float = 0.0

    @property
    def name(self) -> str | None:
        """The name of the replica; None until it is ready."""
        return self.handle and self.handle.name

    @property
    def description(self) -> str:
        """The name of a replica that was ready, its process and its machine, for the log."""
        return f"{self.name} (process {self.handle.info.pid} on {self.handle.info.node})"


@dataclass(frozen=True)
class Start:
    """Start another replica, at a place."""

    place: int


@dataclass(frozen=True)
class Drain:
    """Let a replica finish its requests, then stop it."""

    member: Member


def next_change(
    members: Seq[Member], wanted: int, generation: int, has_room: Callable[[], bool], load: Callable[[Member], int]
) -> Start | Drain | None:
    """Return the next change that brings the replicas closer to those that are wanted.

    Args:
        members: all replicas, in the order in which they were started.
        wanted: how many should be ready.
        generation: those of older generations are to be replaced.
        has_room: says whether there are cores for another replica, in addition to all members.
        load: says how much work a member has; the one with the least is drained first.

    Returns:
        The change; None if there is nothing to do until a member changes its state.
    """
    active = [member for member in members if member.state in (STARTING, READY)]
    ready = [member for member in active if member.state == READY]
    outdated = [member for member in active if member.generation < generation]
    free = sorted(set(range(wanted)) - {member.place for member in active})
    if len(active) < wanted:
        return Start(free[0]) if len(members) < wanted or has_room() else None  # the others hold their cores
    if len(active) > wanted:
        if outdated:  # one is replaced, by another that may be starting still
            return Drain(outdated[0]) if len(ready) > wanted else None
        starting = [member for member in active if member.state == STARTING]
        return Drain(starting[-1] if starting else min(reversed(ready), key=load))
    if not outdated or len(ready) < len(members):  # one after another
        return None
    return Start(free[0] if free else outdated[0].place) if has_room() else Drain(outdated[0])
