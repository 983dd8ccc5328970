"""Streams as a network may cut them, and what a client's function yields for each of them, and when.

`read_stream` feeds the pieces of a stream to the function, and counts how many it has asked for at each event.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice

from .comparing import kind

MOST = 24  # events; a function that yields more of them may never end

DONE, ONE, TWO = b"data: [DONE]\n\n", b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n'
FOX = 'data: {"text": "🦊 über"}\n\n'.encode()
ALL_KINDS = b": hello\n\n" + FOX + b'event: chunk\ndata:{"n":\ndata: 2}\nid: 5\n\n' + FOX + DONE
STREAMS = [
    ("one event per piece", [ONE, TWO, DONE]), ("two events in one piece", [ONE + TWO, DONE]),
    ("a stream in one piece", [ONE + TWO + DONE]),
    ("an event cut in two", [b'data: {"text": "to', b'gether"}\n\n', DONE]),
    ("[DONE] cut in two", [ONE, b"data: [DO", b"NE]\n\n"]),
    ("`data:` cut in two", [b"da", b'ta: {"n": 1}\n\nd', b'ata: {"n": 2}\n\n', DONE]),
    ("an empty line cut in two", [ONE[:-1], b"\n" + TWO, DONE]),
    ("a comment between events", [ONE, b": still here\n\n", TWO, DONE]),
    ("a comment in an event", [b": look\n" + ONE, DONE]),
    ("a comment that contains `data:`", [b": no data: here\n\n" + ONE, b':data: {"n": 3}\n\n', TWO, DONE]),
    ("an event with another field only", [ONE, b"event: ping\n\n", b"id: data: 5\n\n", TWO, DONE]),
    ("values that begin with the letters of `data`", [b"data: true\n\n", b"data:false\n\n", b'data: "at"\n\n', DONE]),
    ("lines of an event that are not data", [b'event: chunk\ndataset: 7\ndata: {"n": 1}\nretry: 9\n\nid: 8\n\n', DONE]),
    ("no space after `data:`", [b'data:{"n": 1}\n\n', b"data:[DONE]\n\n"]),
    ("an event of two `data:` lines", [b'data: {"n":\ndata: 1}\n\n', DONE]),
    ("an event of two `data:` lines, cut between them", [b'data: {"n": [1,\n', b"data: 2]}\n\n", DONE]),
    ("a text that contains [DONE]", [b'data: {"text": "[DONE]"}\n\n', TWO, DONE]),
    ("a text that is [DONE]", [ONE, b'data: "[DONE]"\n\n', TWO, DONE]),
    ("a text that contains `data:`", [b'data: {"text": "metadata: x"}\n\n', b'data: "data: y"\n\n', TWO, DONE]),
    ("a text with a line separator", ['data: {"text": "a\u2028b"}\n\n'.encode(), DONE]),
    (
        "JSON that is not a dict",
        [b"data: true\n\n", b'data: null\n\ndata: 0\n\ndata: ""\n\ndata: {}\n\n', b"data: false\n\n", DONE],
    ),
    ("more after [DONE]", [ONE + DONE + TWO, TWO]), ("the connection breaks within an event", [ONE + b'data: {"n"']),
    ("the connection breaks before the empty line", [ONE, TWO[:-2]]),
    ("the bytes of a character in two pieces", [FOX[:17], FOX[17:22], FOX[22:], DONE]),
    ("every byte a piece", [ALL_KINDS[start : start + 1] for start in range(len(ALL_KINDS))]),
]  # fmt: skip


class Stream:
    """An iterator over the pieces of a stream that counts how many were asked for, a missing one included."""

    def __init__(self, pieces: list[bytes]):
        self._pieces = pieces
        self.read = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self.read = min(self.read, len(self._pieces)) + 1
        if self.read > len(self._pieces):
            raise StopIteration
        return self._pieces[self.read - 1]


def read_stream(function: Callable, pieces: list[bytes]) -> dict:
    """Return the events that a function yields, and how many pieces it had asked for by each event and in all."""
    stream = Stream(pieces)
    yielded = function(stream)
    if not isinstance(yielded, Iterable) or isinstance(yielded, Sized):
        return {"returned": "None" if yielded is None else kind(yielded)}
    events, read = [], []
    for event in islice(yielded, MOST):
        events.append(event)
        read.append(stream.read)
    return {"events": events, "pieces read by then": read, "pieces read in all": stream.read}
