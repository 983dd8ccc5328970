"""Lesson 9, serving: the events of a stream, and a bounded queue. `load_testing` has the lesson's other tasks."""

import json
import re
from itertools import pairwise
from math import ceil

from ..exercise import Exercise
from ..queues import first_mistake, run_story
from ..streams import DONE, ONE, STREAMS, read_stream

read_events = Exercise(
    "read_events(pieces)",
    "wherever the network cuts a stream, each event is yielded as soon as it is complete",
    observe=read_stream,
    forbidden=["helpers.load_test.client:EventStream.feed"],
)
ANYWHERE = "The network cuts a stream anywhere: an event is complete only when its empty line has arrived."
CHARACTER = "The bytes of a character may arrive in two pieces, which cannot be decoded one by one."


@read_events.cases
def _(random):
    for what, pieces in STREAMS:
        shown = b" | ".join(pieces).decode(errors="replace").encode("unicode_escape").decode()
        yield (pieces,), what if len(pieces) > 9 else f"{what}: {shown}"
    for _ in range(6):
        stream = b""
        for value in random.choices([None, True, [], {"a": ": \n"}, "", 'ß🦊\u2028"', "data: x", 0, 7.5], k=4):
            before = random.choice(["", ": quiet\n\n", "event: chunk\n", ":\n"]) + random.choice(["data:", "data: "])
            stream += f"{before}{json.dumps(value, ensure_ascii=False)}\n\n".encode()
        stream += random.choice([DONE + ONE, b'data: {"text": "'])
        cuts = sorted(random.choices(range(len(stream)), k=random.randint(0, 30)))
        yield ([stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])],), "several events, cut anywhere"


def data_of(event, prefix="data:", lines_of=lambda text: text.split("\n")):
    lines = [line.removeprefix(prefix).strip() for line in lines_of(event.decode()) if line.startswith(prefix)]
    return "\n".join(lines)


@read_events.reference
def by_empty_lines(pieces, data=data_of, parse=json.loads, keep=True, end=b"\n\n", at_end=False):
    """Read a stream, with replaceable parts."""
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece if keep else piece).split(end)
        for event in events:
            if (text := data(event)) == "[DONE]":
                return
            if text:
                yield parse(text)
    if at_end and rest:
        yield parse(data(rest))


FALSY = "", "null", "0", "false", '""', "[]", "{}"
read_events.add_misconceptions({
    "parses [DONE], which is not JSON: it ends the stream.": lambda event: data_of(event).replace("[DONE]", " [DONE]"),
    "treats comments as data: lines that begin with `:` have none.": lambda event: event.decode()[5:].strip(),
    "drops falsy events: `null` and 0 are data, too.": lambda event: (d := data_of(event)) * (d not in FALSY),
    "removes letters instead of the field name: `lstrip` takes a set of characters, and removes the t of `true`, "
    "too.": lambda event: "\n".join(
        re.sub("^[data: ]*", "", line) for line in event.decode().split("\n") if line.startswith("data:")
    ),
    "takes the data from behind `data:` wherever it is in an event: a comment may contain it, too.":
        lambda event: event.decode().partition("data:")[2].strip(),
    "requires the space after `data:`, which may be missing.": lambda event: data_of(event, "data: "),
    "keeps one `data:` line of an event: its JSON may need several.": lambda event: data_of(event).rpartition("\n")[2],
    "ends at a text that contains [DONE]. Only an event whose whole data is [DONE] ends the stream.":
        lambda event: "[DONE]" if b"[DONE]" in event else data_of(event),
    "removes `data:` from texts: it is a field name only where a line begins.":
        lambda event: data_of(event).replace("data:", ""),
    "splits lines where `str.splitlines` does, even within a text: only \\n ends a line.":
        lambda event: data_of(event, lines_of=str.splitlines),
}, part="data")  # fmt: skip
read_events.add_misconceptions({
    f"treats each piece as whole events. {ANYWHERE}": lambda pieces: by_empty_lines(pieces, keep=False),
    f"decodes each piece by itself. {CHARACTER}":
        lambda pieces: by_empty_lines(piece.decode().encode() for piece in pieces),
    "treats every line as an event. An empty line ends an event, so its `data:` lines belong "
    "together.": lambda pieces: by_empty_lines(pieces, end=b"\n"),
    "yields text: the task asks for the value that the JSON of an event describes.":
        lambda pieces: by_empty_lines(pieces, parse=str),
    "yields an event without its empty line: the connection broke before it was complete.":
        lambda pieces: by_empty_lines(pieces, at_end=True),
})  # fmt: skip


@read_events.rule
def yields_in_time(arguments, outcome, right):
    """Report a function that is not a generator, or events that are yielded too early or too late."""
    got, wanted = outcome.result, right.result
    if "returned" in got:
        return f"returns {got['returned']}. A client shows each event as soon as it is complete: `yield` it"
    if got["events"] != wanted["events"]:
        return f"yields {got['events']} for this stream, and its events are {wanted['events']}"
    reads, needs = got["pieces read by then"], wanted["pieces read by then"]
    if reads != needs and all(read >= len(arguments[0]) for read in reads):
        return "reads the whole stream before it yields an event. A client shows each event as soon as it is complete"
    for event, read, needed in zip(got["events"], reads, needs, strict=True):
        if read > needed:
            return (
                f"holds {event!r} back until another piece arrives. Its empty line completes it: yield it before "
                "you ask for more"
            )
        if read < needed:
            return f"yields {event!r} before its empty line has arrived. Another `data:` line may belong to it"
    if got["pieces read in all"] > wanted["pieces read in all"]:
        return "keeps reading after [DONE]. The connection may stay open for the next request: this could wait forever"
    return None


BoundedQueue = Exercise(
    "BoundedQueue(rows, max_queue, seconds)",
    "the queue holds no more requests than can be served in time, and a request leaves once, for whatever reason",
    observe=run_story,
)


@BoundedQueue.cases
def _(random):
    """Yield stories, in which a minus precedes a request that leaves. Ids are in no order, and one of them is 0."""
    letters = random.sample("abcdefghijklmnopqrstuvwxyz", 9)
    drawn = " ".join(random.choice(["", "-"]) + random.choice(letters) for _ in range(60))
    for what, rows, max_queue, seconds, story in [
        ("requests that fill the rows and the queue", 3, 2, 10, "d c b a 0 e f"),
        ("a running request leaves", 2, 3, 6, "d c b a -c"),
        ("a waiting request leaves", 2, 3, 6, "d c b 0 -0 a -b -d e"),
        ("a refused request leaves", 1, 2, 7.25, "d c b a -a 0 e"),
        ("a request leaves twice", 2, 3, 5.5, "d c b -c -c a 0 -a -a e f g"),
        ("a refused request is offered again", 4, 1, 1, "f e d c b 0 -c 0 -b g"),
        ("no places in the queue", 1, 0, 3, "b a -a -b c 0 b"), ("an empty queue", 3, 2, 10, "-z f -d -f -f a"),
        ("a long story", 2, 3, 6, "d c b a 0 e f -b f g -g h -e i -e j -d -d k l -c -a -f -i -k m -m n o p"),
        ("a long story", random.randint(1, 3), random.randint(0, 3), random.choice([1, 2.5, 7, 40]), drawn),
    ]:  # fmt: skip
        steps, here = [], []
        for step in story.split():
            name = 0 if step.strip("-") == "0" else step.strip("-")
            if step[0] == "-" or name not in here:  # a request that has a place is not offered again
                steps.append(("leave" if step[0] == "-" else "offer", name))
                here = [one for one in here if one != name]
                here += [name] if step[0] != "-" and len(here) < rows + max_queue else []
        yield (rows, max_queue, seconds, steps), f"{what}; rows {rows}, max_queue {max_queue}, seconds {seconds:g}"


class Bounded:
    """The reference, with the number of seconds as a replaceable part."""

    def __init__(self, rows, max_queue, seconds, retry_after=lambda queue: ceil(queue.seconds / queue.rows)):
        self.rows, self.max_queue, self.seconds, self.retry_after = rows, max_queue, seconds, retry_after
        self.running, self.waiting = [], []

    def offer(self, request_id):
        if len(self.running) < self.rows:
            self.running.append(request_id)
        elif len(self.waiting) < self.max_queue:
            self.waiting.append(request_id)
        else:
            return self.retry_after(self)
        return 0

    def leave(self, request_id):
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif request_id in self.running:
            self.running.remove(request_id)
            self.running += self.waiting[:1]
            del self.waiting[:1]


BoundedQueue.reference(Bounded)


@BoundedQueue.misconception(
    "assumes that a request that leaves has a place. It may have left before, or may have been refused: then "
    "nothing happens."
)
class TakesPlacesForGranted(Bounded):
    def leave(self, request_id):
        if request_id not in self.waiting + self.running:
            self.running.remove(request_id)
        super().leave(request_id)


ROW = "Each row is busy for `seconds`, but there are several, and any of them will do."
EARLY = "A client that retries too early is refused again."
PLACE = "Each request that finishes makes room for another: a client need not wait until the queue is empty."

BoundedQueue.add_misconceptions({
    f"returns the time until one particular row is free. {ROW}": lambda queue: ceil(queue.seconds),
    f"multiplies by the number of rows. {ROW}": lambda queue: ceil(queue.seconds * queue.rows),
    f"rounds down. {EARLY}": lambda queue: max(1, int(queue.seconds / queue.rows)),
    f"rounds to the nearest second. {EARLY}": lambda queue: max(1, round(queue.seconds / queue.rows)),
    "adds a second even to a whole number of seconds, which needs no rounding.":
        lambda queue: int(queue.seconds / queue.rows) + 1,
    f"returns the time until all waiting requests have started. {PLACE}":
        lambda queue: max(1, ceil(len(queue.waiting) * queue.seconds / queue.rows)),
    f"returns the time until all waiting requests and one more have started. {PLACE}":
        lambda queue: ceil((len(queue.waiting) + 1) * queue.seconds / queue.rows),
    f"returns the time until all requests have finished. {PLACE}":
        lambda queue: ceil(len(queue.waiting + queue.running) * queue.seconds / queue.rows),
    "returns 1 second, however fast the server is: it depends on `seconds` and on the rows.": lambda queue: 1,
}, part="retry_after")  # fmt: skip


@BoundedQueue.rule
def keeps_its_promises(arguments, outcome, right):
    """Report what makes a queue unusable, or the first step after which it is wrong."""
    if outcome.result["problem"]:
        return outcome.result["problem"]
    return first_mistake(outcome.result["steps"], right.result["steps"], arguments[0])
