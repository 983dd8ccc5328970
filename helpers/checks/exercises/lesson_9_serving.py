"""Lesson 9, serving: pieces of text, the inbox of an engine's thread, and the events of a stream."""

import json
import re
from itertools import pairwise

from ..exercise import Exercise
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


HALF = "\ufffd"  # what an incomplete character is decoded to
text_pieces = Exercise(
    "text_pieces(texts, stop)",
    "a client gets no half of a character and no part of a stop text, and everything else at once",
)


@text_pieces.cases
def _(random):
    """Yield the texts after each token: the decoded beginnings of some bytes, cut at random places."""

    def after_each(text, *cuts):
        data = text.encode()
        ends = cuts or sorted(random.sample(range(1, len(data)), min(len(data) - 1, 7)))
        return [data[:end].decode(errors="replace") for end in [*ends, len(data)]]

    for texts, stop in [
        (["M", "M" + HALF, "Mü", "Müll"], "xyz"), (["a", "a!", "a!!", "a!!b"], "!!"),
        (["a", "a!", "a!b", "a!b!"], "!!"), (["ab", "abc", "abcd", "abcd."], "cde"),
        (["ab", "abc", "abcd", "abcde", "abcdef"], "cde"), (["END", "END of"], "END"), (["tea", "tea" + HALF], "zz"),
        (["a", "a" + HALF, "a" + HALF, "a☕", "a☕ b"], "zz"), (["x" + HALF], "zz"), (["a", "a b a b"], " b"),
        (["x", "xa", "xa" + HALF, "xaü", "xaü."], "aü"), (["x", "xa", "xa" + HALF, "xaö", "xaö."], "aü"),
        (["aa", "aaa", "aaab", "aaab."], "aab"), (["ab", "abab", "ababac"], "abac"), (["one", "one two, two"], "w"),
        (["a" + HALF + "b", "a" + HALF + "bc"], "zz"), ([], "zz"),
        (["so", "so?", "so?\n", "so?\n\n", "so?\n\nA"], "\n\n"),
        (after_each("naïve ☕ crêpes for a fox"), "fog"), (after_each("🦊 runs, and 🦊🦊 sleep"), "🦊🦊"),
        (after_each("abcabcabd and abcabe"), "abcabd"),
    ]:  # fmt: skip
        yield (texts, stop), f"texts {texts}, stop {stop!r}"


@text_pieces.reference
def keeping_back(texts, stop, half=True, prefix=True, last=True, found=lambda text, stop: text.index(stop), fresh=True):
    """Yield pieces, with replaceable parts: what is kept back, what comes last, where a stop text cuts, what is new."""
    sent, pieces = 0, []
    for number, text in enumerate(texts):
        if stop in text:
            return [*pieces, text[sent : found(text, stop)]]
        end = text
        if number < len(texts) - 1 or not last:
            end = end.rstrip(HALF) if half else end
            kept = max(n for n in range(len(stop)) if end.endswith(stop[:n])) if prefix else 0
            end = end[: len(end) - kept]
        pieces.append(end[sent:] if fresh else end)
        sent = max(sent, len(end))
    return pieces


text_pieces.add_misconceptions({
    "sends half of a character: an incomplete one decodes to the replacement character.": {"half": False},
    "sends the beginning of the stop text, which the next token may complete.": {"prefix": False},
    "keeps the end of the text back even after the last token: then nothing can complete it.": {"last": False},
    "sends the stop text, too: the output ends before it.": {"found": lambda text, stop: text.index(stop) + len(stop)},
    "cuts at the last stop text: the output ends before the first one.":
        {"found": lambda text, stop: text.rindex(stop)},
    "sends everything again after each token: the client has the earlier pieces.": {"fresh": False},
    "goes on after the stop text: no token after it is of use.": lambda texts, stop: (
        (pieces := keeping_back(texts, stop)) + [""] * (len(texts) - len(pieces))),
    "sends nothing before the end: the client wants each piece as soon as it is safe.": lambda texts, stop: (
        (pieces := keeping_back(texts, stop)) and [""] * (len(pieces) - 1) + ["".join(pieces)]),
    "leaves out the empty pieces: there is a piece for every token.":
        lambda texts, stop: [piece for piece in keeping_back(texts, stop) if piece],
    "keeps back as many characters as the stop text has, whatever they are.": lambda texts, stop: (
        _lagging(texts, stop)),
})  # fmt: skip


def _lagging(texts, stop):
    """Return pieces that always lag behind the text by the length of a stop text, less one."""
    pieces, sent = keeping_back(texts, stop), 0
    whole = "".join(pieces)
    for number, text in enumerate(texts[: len(pieces)]):
        end = len(whole) if number == len(pieces) - 1 else max(sent, len(text.rstrip(HALF)) - len(stop) + 1)
        pieces[number] = whole[sent:end]
        sent = min(end, len(whole))
    return pieces


read_inbox = Exercise(
    "read_inbox(messages, unfinished)",
    "the engine hears once, before an iteration, what has changed, and nothing of requests that came and went",
    names=("the requests to add", "the requests to abort"),
)


@read_inbox.cases
def _(random):
    """Yield messages in which a minus precedes a request that is aborted."""
    drawn, here = [], {"a", "b"}
    for _ in range(24):
        name = random.choice("abcdef")
        drawn.append("-" + name if name in here else name)
        here ^= {name}
    for story, unfinished in [
        ("c a", "b"), ("c -a", "ab"), ("c -c", "ab"), ("-a", "b"), ("-a -a", "ab"), ("", "ab"), ("c -c c", "ab"),
        ("-a a", "ab"), ("-a a -a", "ab"), ("d c -d e -a", "ab"), ("-a a -a a", "ab"), ("-z d -z", ""),
        ("d e -e f -d", "a"), ("-a -b -a", "ab"), ("-b d -b", "abc"),
        ("f d -f e f", "a"), ("-b -a", "ab"), (" ".join(drawn), "ab"),
    ]:  # fmt: skip
        messages = [("abort" if one[0] == "-" else "add", one.strip("-")) for one in story.split()]
        yield (messages, list(unfinished)), f"messages {messages}; unfinished: {list(unfinished)}"


@read_inbox.reference
def net_changes(messages, unfinished, cancel=True, known=True, once=True, order=list):
    """List what changes, with replaceable parts."""
    added, aborted = [], []
    for kind, name in messages:
        if kind == "add":
            added.append(name)
        elif name in added and cancel:
            added.remove(name)
        elif (name in unfinished or not known) and (name not in aborted or not once):
            aborted.append(name)
    return order(added), order(aborted)


read_inbox.add_misconceptions({
    "adds a request whose client has left already: both messages are in the same inbox.": {"cancel": False},
    "aborts requests that the engine no longer has: they have finished, and there is nothing to abort.":
        {"known": False},
    "aborts a request twice.": {"once": False},
    "changes the order: requests are added in the order in which they arrived.": {"order": sorted},
    "lists the newest first: requests are added in the order in which they arrived.":
        {"order": lambda names: names[::-1]},
    "reads only the first message: the inbox is emptied before every iteration.":
        lambda messages, unfinished: net_changes(messages[:1], unfinished),
    "reads all additions first: an abort cancels the additions before it, not the ones after it.":
        lambda messages, unfinished: net_changes(sorted(messages, key=lambda one: one[0] == "abort"), unfinished),
    "returns the requests that the engine has afterwards: the task asks for the changes.":
        lambda messages, unfinished: (
        [name for name in unfinished if name not in net_changes(messages, unfinished)[1]]
        + net_changes(messages, unfinished)[0], net_changes(messages, unfinished)[1]),
    "swaps the two lists: those to add come first.": lambda *case: net_changes(*case)[::-1],
    "forgets the aborts of running requests: their rows would generate tokens that no client reads.":
        lambda *case: (net_changes(*case)[0], []),
})  # fmt: skip
