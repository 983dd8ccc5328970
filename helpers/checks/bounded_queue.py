"""Lesson 7, a bounded queue: which requests a server accepts, and when it asks the others to retry.

Nothing is sent here: arrivals and departures are given, and the same every time. `simulate_queue` puts a student's
queue in front of rows that only let time pass, to show what a bound is good for.
"""

import heapq
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from math import ceil

from .attempt import Attempt
from .differences import Wrong, expect_numbers, kind

# (rows, max_queue, seconds, what happens: an id arrives, or leaves if a minus precedes it)
STORIES = [
    (2, 3, 6, "a b c d e f -b f g -g h -e i -e j -a -a k l -c -d -f -i -k m -m n o p"),
    (1, 2, 7.5, "a b c d -b d e -a -c -d f g"),
    (4, 1, 1, "a b c d e f -f g -e g"),
    (1, 0, 3, "a b -b c -a b c"),
    (3, 2, 10, "a b c d e f -z f -d -d f -a g h"),
]
HINTS = dict.fromkeys(
    ["not in list", "not in deque"],
    "Whoever leaves may have left before, or was refused: then there is nothing to do.",
)
HINTS["pop from"] = "Perhaps nobody waits."


def bounded_queue(attempt: Attempt) -> None:
    """Check rows and places that fill up, requests that leave while waiting or twice, and refused ones that return."""
    waits, told = [], []
    for rows, max_queue, seconds, story in STORIES:
        setting = f"rows {rows}, max_queue {max_queue}, seconds {seconds:g}"
        queue = attempt(rows, max_queue, seconds, given=setting, hints=HINTS)
        offer, leave = (_method(queue, name, setting) for name in ("offer", "leave"))
        right = Places(rows, max_queue)
        if any(books := _books(queue, setting)):
            raise Wrong(
                f"a new one has {books[0]} running and {books[1]} waiting, and nobody has come. Are these another "
                f"queue's lists? They are its own if `__init__` makes them ({setting})."
            )
        for step in story.split():
            name = step.lstrip("-")
            scene = f"{setting}; running {right.running}, waiting {right.waiting}; {name} "
            scene += "comes" if name == step else "leaves"
            running, waiting = list(right.running), list(right.waiting)
            hints = HINTS | {repr(name): HINTS["not in list"]}
            if name != step:
                leave(name, given=scene, hints=hints)
                right.leave(name)
                wrong = _why_not_left(name, _books(queue, scene), running, waiting, right)
            else:
                got = offer(name, given=scene, hints=hints)
                accepted = right.offer(name)
                wrong = _why_not_offered(name, got, _books(queue, scene), running, waiting, right, accepted)
                if not (wrong or accepted):
                    waits, told = [*waits, got], [*told, (rows, max_queue, seconds, len(running), len(waiting), scene)]
            if wrong:
                raise Wrong(f"{wrong} ({scene}).")
    _expect_waits(waits, told)


class Places:
    """The right answer: which requests run and which wait."""

    def __init__(self, rows: int, max_queue: int):
        self.rows, self.max_queue = rows, max_queue
        self.running: list[str] = []
        self.waiting: list[str] = []

    def offer(self, name: str) -> bool:
        accepted = len(self.running) + len(self.waiting) < self.rows + self.max_queue
        if accepted:
            (self.running if len(self.running) < self.rows else self.waiting).append(name)
        return accepted

    def leave(self, name: str) -> None:
        for names in (self.running, self.waiting):
            if name in names:
                names.remove(name)
        if self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.pop(0))


def _method(queue, name: str, scene: str) -> Attempt:
    if not callable(getattr(queue, name, None)):
        raise Wrong(f"should make an object with the method `{name}`; it made {kind(queue)} without one ({scene}).")
    return Attempt(getattr(queue, name), f"{name}(request_id)")


def _books(queue, scene: str) -> tuple[list, list]:
    """Return the running and the waiting requests of the student's queue."""
    books = []
    for name in ("running", "waiting"):
        value = getattr(queue, name, None)
        if not isinstance(value, list | deque | dict | set | tuple):
            raise Wrong(
                f"should keep the ids of those that are {name} in `self.{name}`, and that is {kind(value)} ({scene})."
            )
        books.append(list(value))
    return books[0], books[1]


def _why_wrong_books(books: tuple[list, list], name: str, before: list[str], right: Places) -> str | None:
    """Return what is wrong whichever request arrived or left."""
    running, waiting = books
    for one in [*running, *waiting]:
        if one != name and one not in before:
            return f"has {one!r}, which is not here"
        if one in running and one in waiting:
            return f"has {one} among the running and among the waiting: it would count twice"
        if (running + waiting).count(one) > 1:
            return f"has {one} twice: it needs one place"
    for one in before:
        if one != name and one not in running and one not in waiting:
            return f"loses {one}: who was accepted keeps the place until the answer is there or the client has gone"
    if len(running) > right.rows:
        return f"has {len(running)} running in {right.rows} row{'s' if right.rows > 1 else ''}"
    return None


def _why_not_left(
    name: str, books: tuple[list, list], running: list[str], waiting: list[str], right: Places
) -> str | None:
    now_running, now_waiting = books
    if name in now_running:
        return f"keeps the row of {name}, which has left: it would stay empty for ever"
    if name in now_waiting:
        return f"keeps the place of {name}, which has left: who hangs up while waiting leaves, too"
    if wrong := _why_wrong_books(books, name, running + waiting, right):
        return wrong
    if len(now_running) < len(right.running):
        return f"leaves a row empty although {now_waiting[0]} waits: who has waited longest gets it at once"
    if sorted(now_running) != sorted(right.running):
        [first] = [one for one in right.running if one not in running]
        return f"gives the row to {next(one for one in now_running if one not in running)}, and {first} came first"
    if now_waiting != right.waiting:
        return f"has {now_waiting} waiting: their order of arrival, {right.waiting}, decides who is next"
    return None


def _why_not_offered(
    name: str, got, books: tuple[list, list], running: list[str], waiting: list[str], right: Places, accepted: bool
) -> str | None:
    if isinstance(got, bool) or not isinstance(got, int | float):
        returned = str(got) if isinstance(got, bool) else kind(got)
        return f"should return seconds, 0 for whoever is accepted; it returned {returned}"
    inside = name in books[0] or name in books[1]
    if accepted and got != 0:
        free_row = len(running) < right.rows
        room = (
            "a row is free" if free_row else f"only {len(waiting)} of {right.max_queue} places in the queue are taken"
        )
        return f"says {got:g}, and so refuses, although {room}"
    if accepted and not inside:
        return f"says 0 and so accepts {name}, but has it neither running nor waiting: nobody would ever answer"
    if not accepted and inside and got == 0:
        if lost := [one for one in waiting if one not in books[0] and one not in books[1]]:
            return f"makes room for {name} by sending {lost[0]} away: who was accepted is to be answered"
        return f"accepts {name} although all rows and all places in the queue are taken"
    if not accepted and inside:
        return f"refuses {name} and keeps it: its client goes away, and its place would be taken for ever"
    if wrong := _why_wrong_books(books, name, running + waiting, right):
        return wrong
    if not accepted and got == 0:
        return f"says 0, which means accepted, and does not take {name} in. Less than a second is rounded up"
    if not accepted and (got < 0 or got != got or isinstance(got, float)):
        return f"says {got!r}: the header `Retry-After` takes whole seconds, so make it an int"
    if len(books[0]) < len(right.running):
        return f"lets {name} wait although a row is free"
    if list(books[1]) != right.waiting:
        return f"has {books[1]} waiting: their order of arrival, {right.waiting}, decides who is next"
    return None


def _expect_waits(got: list[int], cases: list[tuple[int, int, float, int, int, str]]) -> None:
    """Raise `Wrong` unless each refused request is told when a row is likely to be free."""
    by_rows = "A row is busy for `seconds`, but there are several, and any of them will do."
    one_place = "One that ends makes room for one: nobody has to wait until the queue is empty."

    def each(of) -> list[float]:
        return [of(*case[:5]) for case in cases]

    expect_numbers(
        got,
        each(lambda rows, places, seconds, running, waiting: ceil(seconds / rows)),
        [
            (each(lambda rows, places, seconds, *_: ceil(seconds)), f"says when one row is free. {by_rows}"),
            (each(lambda rows, places, seconds, *_: int(seconds)), f"says when one row is free. {by_rows}"),
            (
                each(lambda rows, places, seconds, *_: max(1, int(seconds / rows))),
                "rounds down: who comes back too early is refused once more. Round up.",
            ),
            (
                each(lambda rows, places, seconds, *_: max(1, round(seconds / rows))),
                "rounds to the nearest second: who comes back too early is refused once more. Round up.",
            ),
            (
                each(lambda rows, places, seconds, *_: int(seconds / rows) + 1),
                "adds a second even to whole ones: round up.",
            ),
            (
                each(lambda rows, places, seconds, running, waiting: max(1, ceil(waiting * seconds / rows))),
                f"says when all who wait will have begun. {one_place}",
            ),
            (
                each(lambda rows, places, seconds, running, waiting: ceil((waiting + 1) * seconds / rows)),
                f"says when all who wait will have begun. {one_place}",
            ),
            (
                each(lambda rows, places, seconds, running, waiting: ceil((waiting + running) * seconds / rows)),
                f"says when all who are there will be done. {one_place}",
            ),
            (each(lambda rows, places, seconds, *_: ceil(seconds * rows)), f"multiplies by the rows. {by_rows}"),
            (
                each(lambda *_: got[0]),
                "says the same however fast the server is: it should depend on `seconds` and on the rows.",
            ),
        ],
        [f"Retry-After, {case[5]}" for case in cases],
    )


# --- under load -------------------------------------------------------------------------------------------------------


def simulate_queue(
    queue, arrivals: Seq[float], tokens: int = 20, step: float = 0.05
) -> list[tuple[float, list[float]]]:
    """Run requests through a student's queue, in rows that only let time pass; refused requests do not retry.

    Args:
        queue: has `offer`, `leave` and `running`.
        arrivals: when each request is sent.
        tokens, step: a running request gets a token every `step` seconds, and leaves with the last one.

    Returns:
        For each request, when it was sent and when each of its tokens came; a refused request has no tokens.
    """
    times: list[list[float]] = [[] for _ in arrivals]
    ends: list[tuple[float, Hashable]] = []

    def begin(now: float) -> None:
        for number in list(queue.running):
            if not times[number]:
                times[number] = [now + step * (token + 1) for token in range(tokens)]
                heapq.heappush(ends, (times[number][-1], number))

    for number, sent in enumerate([*arrivals, float("inf")]):
        while ends and ends[0][0] <= sent:
            now, done = heapq.heappop(ends)
            queue.leave(done)
            begin(now)
        if sent < float("inf"):
            queue.offer(number)
            begin(sent)
    return list(zip(arrivals, times, strict=True))


TASKS = {
    "BoundedQueue(rows, max_queue, seconds)": (
        bounded_queue,
        "no more than can be served in time are let in, and who leaves, for whatever reason, leaves once",
    ),
}
