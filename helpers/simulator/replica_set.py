"""Simulated replicas behind a router, which start, fail and stop.

Replicas affect each other only through the router, which compares them. So each replica keeps its own clock, which
advances only when the replica's state is read or changes. Everything else is an event at a time of its own:

    failure      The replica ends the iteration in progress. Another one is started in its place. Its unfinished
                 requests continue on other replicas from their tokens so far, as in `cluster/dispatcher.py`.
    autoscaling  Replicas are started or drained. A drained one gets no new requests, and stops after its last one.
    ready        A replica takes requests from now on, beginning with those that wait because none was ready.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

from ..cluster.routing import Router, with_salt
from ..engine import Sequence
from .fleet_result import FleetResult, Lifetime
from .simulated_replica import FinishedRequest, FleetClock, SimulatedReplica

MOST_FAILURES = 10_000  # in a row, while requests wait or run and none finishes
COUNTS = ("iterations", "preemptions", "busy_seconds", "computed_tokens")  # what is kept of a replica that stops


@dataclass(eq=False)
class _Member:
    """A replica that has not stopped."""

    number: int  # in the order in which replicas were started
    place: int
    replica: SimulatedReplica
    started: float
    ready: float
    is_draining: bool = False

    @property
    def unfinished(self) -> int:
        return len(self.replica.scheduler.unfinished)


class ReplicaSet:
    """Runs requests on replicas.

    Args:
        make_replica: makes a replica, given a clock.
        replicas: how many are ready from the beginning.
        router: chooses the replica of each request.
        on_finish: called with each finished request.
        start_seconds, failures, autoscaler: as for `simulate_fleet`.

    Attributes:
        clock: the time up to which everything has happened.
        unfinished: how many requests run or wait.
        check: raises a ValueError for the lengths of a request that can never run.

    Raises:
        ValueError: there is no replica, its settings are out of range, or so are those of its events.
    """

    def __init__(
        self,
        make_replica: Callable[..., SimulatedReplica],
        replicas: int,
        router: Router,
        on_finish: Callable[[FinishedRequest], None],
        start_seconds: float = 0.0,
        failures: Iterable[tuple[float, int]] = (),
        autoscaler: Any = None,
    ):
        if replicas < 1:
            raise ValueError(f"A fleet needs at least 1 replica, not {replicas}.")
        if not 0 <= start_seconds < inf:
            raise ValueError(f"start_seconds must be a number of at least 0, not {start_seconds}.")
        self.clock, self.unfinished = FleetClock(-inf), 0
        self._make_replica, self._router, self._on_finish = make_replica, router, on_finish
        self._start_seconds, self._autoscaler = start_seconds, autoscaler
        self._most_places = replicas if autoscaler is None else inf
        self._resumed = self._lost_tokens = self._failures_in_a_row = 0
        self._numbers, self._order = itertools.count(), itertools.count()
        # Two heaps. An entry of the first is out of date if its replica is busy until another time.
        self._due: list[tuple[float, int]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._members: dict[int, _Member] = {}  # by number
        self._stopped: dict[int, tuple[Lifetime, dict[str, float]]] = {}  # by number, with its COUNTS
        self._ready: list[_Member] = []
        self._waiting: list[Sequence] = []  # until a replica is ready
        for place in range(replicas):
            self._start(place, -inf, ready=-inf)
        self.check = partial(self._ready[0].replica.check, may_move=bool(failures))
        self._plan_failure(iter(failures))

    # --- time -----------------------------------------------------------------------------------------------------

    def run(self, arrivals: Iterable[tuple[float, Sequence]]) -> Iterator[float]:
        """Run sequences until all have finished.

        Args:
            arrivals: (seconds, sequence) of each arrival, in order of time.

        Yields:
            For each arrival, its time, once everything up to then has happened; at last, infinity.

        Raises:
            ValueError: the next failure is not valid, or replicas fail so often that no request finishes.
        """
        for number, (time, sequence) in enumerate(arrivals):
            if number == 0 and self._autoscaler is not None:
                self._plan_autoscaling(time)
            self.advance(time)
            yield time
            self.unfinished += 1
            self._dispatch(sequence)
        self._finish()
        yield inf

    def advance(self, time: float) -> None:
        """Let everything happen up to a time."""
        while self._events and self._events[0][0] <= time:
            self._handle_event()
        self.clock.now = time
        self._run_replicas(time)

    def _finish(self) -> None:
        """Let everything happen until all requests have finished."""
        while self._events and self.unfinished:
            self._run_replicas(self._events[0][0])
            if self.unfinished:
                self._handle_event()
        self._run_replicas(inf)

    def _plan(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _handle_event(self) -> None:
        self.clock.now, _, event = heapq.heappop(self._events)
        self._run_replicas(self.clock.now)
        event()

    def _run_replicas(self, time: float) -> None:
        """Run all iterations that begin before `time`, and pass on the requests that have finished."""
        due, members = self._due, self._members
        while due and due[0][0] < time:
            until, number = heapq.heappop(due)
            if number not in members or until != (replica := members[number].replica).busy_until:
                continue
            replica.advance(time)
            self.unfinished -= len(replica.finished)
            if replica.finished:
                self._failures_in_a_row = 0
            for finished in replica.finished:
                self._on_finish(finished)
            replica.finished.clear()
            if replica.busy_until < inf:  # it is still busy
                heapq.heappush(due, (replica.busy_until, number))
            elif members[number].is_draining:
                self._stop(members[number], -inf)  # when its last iteration ended

    # --- requests -------------------------------------------------------------------------------------------------

    def _dispatch(self, sequence: Sequence) -> None:
        """Send a request to a replica; if none is ready, let it wait."""
        if not self._ready:
            self._waiting.append(sequence)
            return
        replicas = with_salt(self._replicas, sequence.request.salt)
        member = self._ready[self._router.choose(sequence.token_ids, replicas)]
        member.replica.add(sequence, self.clock.now)
        heapq.heappush(self._due, (member.replica.busy_until, member.number))

    def _send(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._dispatch(sequence)

    # --- replicas start and stop ------------------------------------------------------------------------------------

    def _start(self, place: int, now: float, ready: float | None = None) -> None:
        ready = now + self._start_seconds if ready is None else ready
        number = next(self._numbers)
        self._members[number] = _Member(number, place, self._make_replica(clock=self.clock), now, ready)
        if ready > self.clock.now:
            self._plan(ready, self._update_ready)
        else:
            self._update_ready()

    def _update_ready(self) -> None:
        """Find the replicas that take requests, and send them those that wait."""
        members = sorted(self._members.values(), key=lambda member: member.place)
        self._ready = [member for member in members if member.ready <= self.clock.now and not member.is_draining]
        self._replicas = [member.replica for member in self._ready]
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def _stop(self, member: _Member, time: float) -> float:
        """Stop a replica at the end of the iteration in progress, keep only its counts, and return that time."""
        replica = self._members.pop(member.number).replica
        lifetime = Lifetime(member.started, member.ready, max(time, member.started, replica.time))
        self._stopped[member.number] = lifetime, {name: getattr(replica, name) for name in COUNTS}
        return lifetime.stopped

    def report(self, result: FleetResult) -> None:
        """Stop all replicas with the last token of a result, and add what each of them did."""
        begin, end = min(result.arrivals), max(result.last_tokens)
        for member in list(self._members.values()):
            self._stop(member, end)
        for _, (lifetime, counts) in sorted(self._stopped.items()):
            result.lifetimes.append(Lifetime(*(max(time, begin) for time in lifetime)))
            for name, count in counts.items():
                getattr(result, name).append(count)
        result.resumed += self._resumed
        result.lost_tokens += self._lost_tokens

    # --- failures -------------------------------------------------------------------------------------------------

    def _plan_failure(self, failures: Iterator[tuple[float, int]]) -> None:
        """Let the next replica fail; the failure after it is read once this one has happened.

        Raises:
            ValueError: the failure has no place, is earlier than the one before, or is not at a finite time.
        """
        for time, place in failures:
            if not (isfinite(time) and time >= self.clock.now):
                raise ValueError(f"A failure at {time} follows one at {self.clock.now}: give finite times, sorted.")
            if not 0 <= place < self._most_places:
                places = "places" if self._most_places == inf else f"{self._most_places} places"
                raise ValueError(f"There is no place {place} that could fail: the {places} count from 0.")
            self._plan(time, partial(self._fail, place, failures))
            return

    def _fail(self, place: int, failures: Iterator[tuple[float, int]]) -> None:
        self._plan_failure(failures)
        member = next((candidate for candidate in self._members.values() if candidate.place == place), None)
        if member is None:
            return
        self._failures_in_a_row += self.unfinished > 0
        if self._failures_in_a_row > MOST_FAILURES:
            raise ValueError(
                f"Replicas failed {MOST_FAILURES} times, up to {self.clock.now:.6g} s, while no request finished: "
                f"let them fail less often, or start sooner (start_seconds is {self._start_seconds:g})."
            )
        sequences = member.replica.fail(self.clock.now)
        end = self._stop(member, self.clock.now)
        if not member.is_draining:
            self._start(place, end)
        self._update_ready()
        self._resumed += len(sequences)
        for sequence in sequences:
            self._lost_tokens += sequence.computed
            sequence.computed = 0
        self._plan(end, partial(self._send, sequences))

    # --- autoscaling ----------------------------------------------------------------------------------------------

    def _plan_autoscaling(self, now: float) -> None:
        """Let the autoscaler decide after its next interval how many replicas there are.

        Raises:
            ValueError: its interval is not positive.
        """
        if not self._autoscaler.interval > 0:
            raise ValueError(f"The interval of an autoscaler is a number above 0, not {self._autoscaler.interval}.")
        self._plan(now + self._autoscaler.interval, self._autoscale)

    def _autoscale(self) -> None:
        self._plan_autoscaling(self.clock.now)
        self._resize(max(1, self._autoscaler.desired(self.unfinished)))

    def _resize(self, wanted: int) -> None:
        """Start or drain replicas until this many are not draining."""
        now, active = self.clock.now, [member for member in self._members.values() if not member.is_draining]
        surplus = sorted(active, key=lambda member: (member.ready <= now, member.unfinished, -member.number))
        for member in surplus[: max(0, len(active) - wanted)]:  # at first those that are not ready yet
            member.is_draining = True
            if not member.unfinished:
                self._stop(member, now)
        taken = {member.place for member in self._members.values()}
        free = (place for place in itertools.count() if place not in taken)
        for place in itertools.islice(free, max(0, wanted - len(active))):
            self._start(place, now)
        self._update_ready()
