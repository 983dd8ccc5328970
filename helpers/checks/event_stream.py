"""Lesson 7, server-sent events: a client reads each event as soon as it is complete, wherever the stream is cut.

Nothing is sent here: the pieces of each stream are given.
"""

import json
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import wraps

from .attempt import Attempt
from .differences import Wrong, kind

DONE = b"data: [DONE]\n\n"
ONE, TWO = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n'
FOX = 'data: {"text": "🦊 über"}\n\n'.encode()
ALL_KINDS = b": hello\n\n" + FOX + b'event: chunk\ndata:{"n":\ndata: 2}\nid: 5\n\n' + FOX + DONE

ANYWHERE = "A stream is cut anywhere: keep what has come until an empty line ends an event, then look for the next one."
COMMENT = "A line that begins with `:` is a comment, to keep a quiet connection open."
CHARACTER = "The bytes of a character may come in two pieces. A line that has ended is whole."
BROKEN = "What has no empty line behind it is not whole: the connection broke."
STREAMS = [  # (what the case shows, the pieces, what an error means)
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
    """An iterator over the pieces of a stream that counts the pieces read.

    Attributes:
        read: the number of pieces requested; one more than there are once the client asks for another.
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
    """Check pieces that hold several events or parts of one, lines without data, and the ends of streams."""
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
    """Return the events, each with the number of pieces read by then, and the number read in the end."""
    wire, came = Wire(pieces), []

    @wraps(attempt.function)  # keeps the names of the parameters
    def listen(wire: Wire):
        events = attempt.function(wire)
        if not isinstance(events, Iterator):
            return events
        for event in events:
            came.append((event, wire.read))
            if len(came) > 50:
                break
        return came

    says_done = "Expecting value: line 1 column 2 (char 1)"  # the error that `json` raises
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
    """Return each event with the number of pieces that complete it, and whether the stream ends with `[DONE]`."""
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


TASKS = {
    "read_events(pieces)": (
        read_events,
        "wherever the network cuts a stream, each event is there as soon as it is whole",
    ),
}
