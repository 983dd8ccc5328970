"""Lesson 7, a server and its clients: events out of pieces of a stream, and a queue that says no in time.

Nothing is sent here: pieces, arrivals and leaves are given, and the same every time. `serve` puts a student's queue in
front of rows that only let time pass, so that it can be seen what a bound is good for.
"""

import heapq
import json
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import wraps
from math import ceil

from .attempt import Attempt
from .differences import Wrong, expect_numbers, kind

# --- events out of a stream ---------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
ONE, TWO = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n'
FOX = 'data: {"text": "🦊 über"}\n\n'.encode()
ALL_KINDS = b": hello\n\n" + FOX + b'event: chunk\ndata:{"n":\ndata: 2}\nid: 5\n\n' + FOX + DONE

ANYWHERE = "A stream is cut anywhere: keep what has come until an empty line ends an event, then look for the next one."
COMMENT = "A line that begins with `:` is a comment, to keep a quiet connection open."
CHARACTER = "The bytes of a character may come in two pieces. A line that has ended is whole."
BROKEN = "What has no empty line behind it is not whole: the connection broke."
STREAMS = [  # (what there is to see, the pieces, what an error means)
    ("an event a piece", [ONE, TWO, DONE], "Only what stands behind `data:` is JSON."),
    ("two events in a piece", [ONE + TWO, DONE], ANYWHERE),
    ("all in one piece", [ONE + TWO + DONE], ANYWHERE),
    ("an event in two pieces", [b'data: {"text": "to', b'gether"}\n\n', DONE], ANYWHERE),
    ("the end in two pieces", [ONE, b"data: [DO", b"NE]\n\n"], ANYWHERE),
    ("cut in `data:`", [b"da", b'ta: {"n": 1}\n\nd', b'ata: {"n": 2}\n\n', DONE], ANYWHERE),
    ("cut between two line ends", [ONE[:-1], b"\n" + TWO, DONE], ANYWHERE),
    ("cut in characters", [FOX[:17], FOX[17:22], FOX[22:], DONE], CHARACTER),
    ("a comment between events", [ONE, b": still here\n\n", TWO, DONE], COMMENT),
    ("a comment in an event", [b": look\n" + ONE, DONE], COMMENT),
    (
        "other lines in an event",
        [b'event: chunk\nid: 7\ndata: {"n": 1}\nretry: 9\n\n', DONE],
        "Lines that begin with something else than `data:` are no data.",
    ),
    ("no blank behind `data:`", [b'data:{"n": 1}\n\n', b"data:[DONE]\n\n"], "The blank behind `data:` may be missing."),
    (
        "two `data:` lines in an event",
        [b'data: {"n":\ndata: 1}\n\n', DONE],
        "The lines of an event belong together, and only together they are JSON.",
    ),
    ("a text with [DONE]", [b'data: {"text": "[DONE]"}\n\n', TWO, DONE], "What a text says does not end a stream."),
    (
        "a text with `data:`",
        [b'data: {"text": "metadata: x"}\n\n', TWO, DONE],
        "In a text, `data:` has no meaning: it counts where a line begins.",
    ),
    (
        "a text with a line separator",
        ['data: {"text": "a\u2028b"}\n\n'.encode(), DONE],
        "Only \\n ends a line. `str.splitlines` cuts at other characters, too, and they may stand in a text.",
    ),
    ("more behind [DONE]", [ONE + DONE + TWO], "`[DONE]` is the end, whatever comes behind it."),
    ("the connection breaks", [ONE + b'data: {"n"'], BROKEN),
    ("the connection breaks", [ONE, TWO[:-2]], BROKEN),
    ("every byte a piece", [ALL_KINDS[i : i + 1] for i in range(len(ALL_KINDS))], ANYWHERE),
]


class Wire:
    """Pieces of a stream, one after the other.

    Attributes:
        read: pieces that were asked for; one more than there are if somebody waits for a further one.
    """

    def __init__(self, pieces: Iterable[bytes]):
        self._pieces = list(pieces)
        self.read = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.read = min(self.read, len(self._pieces)) + 1
        if self.read > len(self._pieces):
            raise StopIteration
        return self._pieces[self.read - 1]


def read_events(attempt: Attempt) -> None:
    """Pieces with several events and with parts of one, cut anywhere; what is no data; how a stream ends."""
    for what, pieces, why in STREAMS:
        shown = b" | ".join(pieces).decode(errors="replace").encode("unicode_escape").decode()
        given = what if len(pieces) > 9 else f"{what}: {shown}"
        came, read = _yielded(attempt, pieces, given, why)
        right, done = _expected_events(pieces)
        if wrong := _why_not_read(came, right, len(pieces), why):
            raise Wrong(f"{wrong.rstrip('.')} ({given}).")
        if done and read > len(pieces):
            raise Wrong(
                f"goes on reading behind `[DONE]`. The connection may stay open for the next request: this would wait "
                f"for ever ({given})."
            )


def _yielded(attempt: Attempt, pieces: Seq[bytes], given: str, why: str) -> tuple[list[tuple[object, int]], int]:
    """The events that come out, each with the number of pieces read by then; and the pieces read in the end."""
    wire, came = Wire(pieces), []

    @wraps(attempt.function)  # for its arguments
    def listen(wire: Wire):
        events = attempt.function(wire)
        if not isinstance(events, Iterator):
            return events
        for event in events:
            came.append((event, wire.read))
            if len(came) > 50:
                break
        return came

    says_done = "Expecting value: line 1 column 2 (char 1)"  # what `json` thinks of it
    hints = {says_done: "`[DONE]` is no JSON: it says that the stream is over."}
    hints |= dict.fromkeys(["Expecting", "Extra data", "Unterminated string", "Invalid control"], why)
    hints["codec can't decode"] = CHARACTER
    hints |= dict.fromkeys(["has no len()", "not subscriptable"], "The pieces come one by one: go through them.")
    got = Attempt(listen, attempt.signature)(wire, given=given, hints=hints)
    if got is came:
        return came, wire.read
    if isinstance(got, list | tuple):
        raise Wrong(
            f"returns {kind(got)}, when the stream is over: nobody could read along. `yield` each event as soon as "
            f"it is there ({given})."
        )
    returned = "None (is a `yield` missing?)" if got is None else kind(got)
    raise Wrong(f"should yield the events one after the other; it returned {returned} ({given}).")


def _expected_events(pieces: Seq[bytes]) -> tuple[list[tuple[object, int]], bool]:
    """Each event with the number of pieces after which it is there, and whether the stream ends with `[DONE]`."""
    events: list[tuple[object, int]] = []
    seen, stream = 0, b""
    for number, piece in enumerate(pieces, start=1):
        stream += piece
        blocks = stream.split(b"\n\n")[:-1]
        for block in blocks[seen:]:
            lines = [line.removeprefix(b"data:") for line in block.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines).strip()
            if data == b"[DONE]":
                return events, True
            if data:
                events.append((json.loads(data), number))
        seen = len(blocks)
    return events, False


def _why_not_read(came: Seq[tuple[object, int]], right: Seq[tuple[object, int]], pieces: int, why: str) -> str | None:
    got, wanted = [event for event, _ in came], [event for event, _ in right]
    for event in got:
        if isinstance(event, str | bytes):
            if "[DONE]" in str(event) and event not in wanted:
                return "yields `[DONE]`: that is no event, it says that the stream is over"
            return f"yields {kind(event)}: wanted is what the JSON of an event says, parsed"
        if not isinstance(event, dict):
            return f"yields {kind(event)}, and all that comes here are events with data: dicts. {why}"
    if got[: len(wanted)] == wanted and len(got) > len(wanted):
        return f"yields {got[len(wanted)]}, too many. {why}"
    if missing := [event for event in wanted if event not in got]:
        if garbled := [event for event in got if event not in wanted]:
            return f"yields {garbled[0]}, and should yield {missing[0]}. {why}"
        return f"loses {missing[0]}. {why}"
    if got != wanted:
        return f"yields {got}, and should yield {wanted}. {why}"

    for (_, at), (event, there) in zip(came, right, strict=True):
        if at > there and all(read >= pieces for _, read in came):
            return "reads the whole stream before anything comes out. An event is to be seen as soon as it is there"
        if at > there:
            return (
                f"keeps {event} back until more has come. With its empty line it is whole: yield it before you read on"
            )
        if at < there:
            return f"yields {event} before its empty line has come. Another `data:` line may belong to it"
    return None


# --- a queue that says no -----------------------------------------------------------------------------------------

# (rows, max_queue, seconds, what happens: an id offers itself, or leaves if there is a minus before it)
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
    """Rows and places that fill up, are left, also by those who wait, and twice; who was refused comes again."""
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
    """What is right: who runs, who waits."""

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
    """Who runs and who waits, as the student's queue has it."""
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
    """What cannot be, whoever came or left."""
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
    """Say in words if whoever was refused is told something else than when a row is likely to be free."""
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


# --- under load ---------------------------------------------------------------------------------------------------


def simulate_queue(
    queue, arrivals: Seq[float], tokens: int = 20, step: float = 0.05
) -> list[tuple[float, list[float]]]:
    """Let requests come to a student's queue and run in rows that only let time pass; nobody comes a second time.

    Args:
        queue: has `offer`, `leave` and `running`.
        arrivals: when each request is sent.
        tokens, step: whoever runs gets a token each `step` seconds, and leaves with the last one.

    Returns:
        For each request when it was sent and when each of its tokens came, none if it was refused.
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
    "read_events(pieces)": (
        read_events,
        "wherever the network cuts a stream, each event is there as soon as it is whole",
    ),
    "BoundedQueue(rows, max_queue, seconds)": (
        bounded_queue,
        "no more than can be served in time are let in, and who leaves, for whatever reason, leaves once",
    ),
}
