"""Lesson 7, streams: right answers in other styles, and wrong ones that fail in ways of their own."""

import codecs
import json

from answers import right, wrong
from helpers.load_test.client import EventStream

# --- read_events ----------------------------------------------------------------------------------------------------


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


@right("read_events")
def with_a_decoder_that_waits(pieces):
    decode, text = codecs.getincrementaldecoder("utf-8")().decode, ""
    for piece in pieces:
        text += decode(piece)
        while "\n\n" in text:
            event, _, text = text.partition("\n\n")
            data = "".join(line[5:] for line in event.split("\n") if line.startswith("data:"))
            if data.strip() == "[DONE]":
                return
            if data:
                yield json.loads(data)


@right("read_events")
class AnIterator:
    """A class with `__next__` in the place of a generator."""

    def __init__(self, pieces):
        self.events = line_by_line_in_bytes(pieces)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.events)


@wrong("read_events", "given: two events in one piece")
def a_piece_is_an_event(pieces):
    for piece in pieces:
        text = piece.decode().removeprefix("data:").strip()
        if text == "[DONE]":
            return
        yield json.loads(text)


@wrong("read_events", "given: an event of two `data:` lines")
def each_data_line_an_event(pieces):
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for line in (line for event in events for line in event.split(b"\n")):
            if line.startswith(b"data:"):
                if line[5:].strip() == b"[DONE]":
                    return
                yield json.loads(line[5:])


@wrong("read_events", "`events` should be [{'text': '🦊 über'}], and is")
def replaced_characters(pieces):
    return line_by_line_in_bytes(piece.decode(errors="replace").encode() for piece in pieces)


@wrong("read_events", "reads the whole stream before anything comes out")
def joined_first(pieces):
    return line_by_line_in_bytes([b"".join(pieces)])


@wrong("read_events", "returns a list. A client sees each event")
def returned_as_a_list(pieces):
    return list(line_by_line_in_bytes(pieces))


@wrong("read_events", "returns None")
def prints_the_events(pieces):
    for event in line_by_line_in_bytes(pieces):
        str(event)


@wrong("read_events", "keeps {'n': 1} back until more has come")
def one_event_late(pieces):
    before = []
    for event in line_by_line_in_bytes(pieces):
        yield from before
        before = [event]
    yield from before


@wrong("read_events", "before its empty line has come")
def as_soon_as_it_can_be_parsed(pieces):
    rest = b""
    for piece in pieces:
        rest = (rest + piece).lstrip()
        while rest.startswith(b"data:"):
            if rest[5:].strip().startswith(b"[DONE]"):
                return
            try:
                event, end = json.JSONDecoder().raw_decode(rest[5:].decode().lstrip())
            except ValueError:
                break
            yield event
            rest = rest[5:].lstrip()[len(rest[5:].decode().lstrip()[:end].encode()) :].lstrip()


@wrong("read_events", "goes on reading behind [DONE]. The connection may stay open")
def waits_for_the_connection_to_end(pieces):
    yield from line_by_line_in_bytes(pieces)
    for _ in pieces:
        pass


@wrong("read_events", "given: more behind [DONE]")
def finishes_the_piece(pieces):
    rest, done = b"", False
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            done = done or data == b"[DONE]"
            if data and data != b"[DONE]":
                yield json.loads(data)
        if done:
            return


@wrong("read_events", "given: JSON that is no dict")
def falsy_events_are_none(pieces):
    return (event for event in line_by_line_in_bytes(pieces) if event)


@wrong("read_events", "given: JSON that is no dict")
def only_null_is_dropped(pieces):
    return (event for event in line_by_line_in_bytes(pieces) if event is not None)


@wrong("read_events", "the pieces come one by one")
def pieces_by_their_numbers(pieces):
    for number in range(len(pieces)):
        yield json.loads(pieces[number])


@wrong("read_events", "is called as read_events(pieces), and your function does not take that")
def from_nowhere():
    yield {"n": 1}


@wrong("read_events", "`events` should be [{'n': 1}, {'n': 2}], and is [{}, {}")
def for_ever(pieces):
    while True:
        yield {}


@wrong("read_events", "calls the course's own `EventStream.feed`")
def the_course_s_own_stream(pieces):
    stream = EventStream()
    for piece in pieces:
        for data in stream.feed(piece):
            if data == "[DONE]":
                return
            yield json.loads(data)
