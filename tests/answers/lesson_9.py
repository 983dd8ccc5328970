"""Lesson 9, streams: right answers in other styles, and wrong ones that fail in ways of their own."""

import json
from itertools import chain, count, pairwise

from answers import ALMOST, RIGHT, WRONG, right, solutions
from helpers.checks.edits import edited

by_empty_lines = solutions.read_events


@right("read_events")
def line_by_line_in_bytes(pieces):
    rest, data = bytearray(), []
    for piece in pieces:
        rest += piece
        while (end := rest.find(b"\n")) >= 0:
            line, rest = bytes(rest[:end]), rest[end + 1 :]
            if line[:5] == b"data:":
                data.append(line[5:].lstrip())
            elif not line and data:
                text, data = b"\n".join(data), []
                if text == b"[DONE]":
                    return
                yield json.loads(text)


RIGHT["read_events"]["an_iterator"] = lambda pieces: iter(line_by_line_in_bytes(pieces).__next__, "no end")
WRONG["read_events"] |= {
    "and its events are [{'text': '🦊 über'}]": lambda pieces: by_empty_lines(
        piece.decode(errors="replace").encode() for piece in pieces
    ),
    "and its events are [True, None, 0": lambda pieces: (
        event for event in by_empty_lines(pieces) if event is not None
    ),
    "yields [{}, {}": lambda pieces: ({} for _ in count()),
    "(given: lines of an event that are not data": edited(
        by_empty_lines,
        ('startswith("data:") -> startswith("data")', 'prefix("data:").strip() -> prefix("data").strip(": ")'),
    ),
    "reads the whole stream before": lambda pieces: by_empty_lines([b"".join(pieces)]),
    "returns a list. A client": lambda pieces: list(by_empty_lines(pieces)),
    "holds {'n': 1} back": lambda pieces: (event for event, _ in pairwise(chain(by_empty_lines(pieces), [None]))),
    "yields {'n': 1} before its empty line": lambda pieces: by_empty_lines(
        piece + b"\n" * piece.endswith(b"}\n") for piece in pieces
    ),
    "keeps reading after [DONE]": lambda pieces: by_empty_lines(p.replace(b"data: [DONE]\n\n", b"") for p in pieces),
    "'Stream' object is not subscriptable": lambda pieces: [json.loads(pieces[0][5:])],
}


@right("text_pieces")
def by_what_may_still_change(texts, stop):
    shown, pieces = "", []
    for number, text in enumerate(texts, start=1):
        before, found, _ = text.partition(stop)
        safe = before
        if not found and number < len(texts):
            safe = safe.rstrip("\ufffd")
            safe = next(safe[: len(safe) - n] for n in reversed(range(len(stop))) if not n or safe[-n:] == stop[:n])
        pieces.append(safe.removeprefix(shown))
        shown = shown + pieces[-1]
        if found:
            break
    return pieces


ALMOST["text_pieces"] |= {"should be a list, but is a str": lambda pieces, *_: "".join(pieces)}
