"""The life of a replica, and the rules that say which replica is started or drained next.

    starting   its process starts and loads the model; it takes no requests yet
    ready      it takes requests
    draining   it takes no new requests, and is stopped once its requests have finished

Losses, a rolling restart and autoscaling need the same rules: they compare the replicas that there are with those that
are wanted, and name one change. In a rolling restart, the replicas of older generations are drained one after another.
Once one drains, a new one is started in its place.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

STARTING, READY, DRAINING = "starting", "ready", "draining"


@dataclass(eq=False)
class Member:
    """A replica as the front end sees it.

    Attributes:
        place: which of the places that are wanted it fills.
        generation: a rolling restart replaces the members of older generations.
        handle: how to call it; None until it is ready.
        state: STARTING, READY or DRAINING.
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
    members: Seq[Member], wanted: int, generation: int, load: Callable[[Member], int]
) -> Start | Drain | None:
    """Return the next change that brings the replicas closer to those that are wanted.

    Args:
        members: all replicas, in the order in which they were started.
        wanted: how many should be ready.
        generation: those of older generations are to be replaced.
        load: says how much work a member has; the one with the least is drained first.

    Returns:
        The change; None if there is nothing to do until a member changes its state.
    """
    active = [member for member in members if member.state in (STARTING, READY)]
    if len(active) < wanted:
        taken = {member.place for member in active}
        return Start(next(place for place in range(wanted) if place not in taken))
    if len(active) > wanted:
        starting = [member for member in active if member.state == STARTING]
        return Drain(starting[-1] if starting else min(reversed(active), key=load))
    outdated = [member for member in members if member.generation < generation]
    all_ready = all(member.state == READY for member in members)
    return Drain(outdated[0]) if outdated and all_ready else None  # one after another
