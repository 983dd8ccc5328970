"""Lesson 9, serving: pieces of text, and the events of a stream."""

import json
from itertools import chain, pairwise

from ..exercise import Exercise
from ..streams import DONE, ONE, STREAMS, read_stream


@Exercise.declare(
    "wherever the network cuts a stream, each event is yielded as soon as it is complete",
    observe=read_stream,
)
def read_events(pieces):
    rest = b""
    for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            lines = [line for line in event.decode().split("\n") if line.startswith("data:")]
            data = "\n".join(line.removeprefix("data:").strip() for line in lines)
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)


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


DATA = r'"\n".join(line.removeprefix("data:").strip() for line in lines)'
read_events.add_misconceptions({
    "parses [DONE], which is not JSON: it ends the stream.": 'if data == "[DONE]" -> if None',
    "treats comments as data: lines that begin with `:` have none.": f"{DATA} -> event.decode()[5:].strip()",
    "removes letters instead of the field name: `lstrip` takes a set of characters, and removes the t of `true`, "
    "too.": 'removeprefix("data:").strip() -> lstrip("data: ")',
    "ends at a text that contains [DONE]. Only an event whose whole data is [DONE] ends the stream.":
        'data == "[DONE]" -> "[DONE]" in data',
    "treats each piece as whole events. The network cuts a stream anywhere: an event is complete only when its empty "
    "line has arrived.": "rest + piece -> piece",
    "decodes each piece by itself. The bytes of a character may arrive in two pieces, which cannot be decoded one by "
    "one.": lambda pieces: read_events.solution(piece.decode().encode() for piece in pieces),
    "treats every line as an event. An empty line ends an event, so its `data:` lines belong "
    "together.": r'b"\n\n" -> b"\n"',
    "yields an event without its empty line: the connection broke before it was complete.":
        lambda pieces: read_events.solution(chain(pieces, [b"\n\n"])),
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


@Exercise.declare("a client gets no half of a character and no part of a stop text, and everything else at once")
def text_pieces(texts, stop):
    sent, pieces = 0, []
    for number, text in enumerate(texts, 1):
        if stop in text:
            return [*pieces, text[sent : text.index(stop)]]
        kept = 0
        if number < len(texts):
            text = text.rstrip(HALF)
            kept = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
        pieces.append(text[sent : len(text) - kept])
        sent = max(sent, len(text) - kept)
    return pieces


def _after_each(random, text):
    """Return the texts after each token: the decoded beginnings of a text's bytes, cut at random places."""
    data = text.encode()
    ends = sorted(random.sample(range(1, len(data)), 7))
    return [data[:end].decode(errors="replace") for end in [*ends, len(data)]]


text_pieces.table([
    (["M", "M" + HALF, "Mü", "Müll"], "xyz"), (["a", "a!", "a!!", "a!!b"], "!!"), (["a", "a!", "a!b", "a!b!"], "!!"),
    (["ab", "abc", "abcd", "abcd."], "cde"), (["ab", "abc", "abcd", "abcde", "abcdef"], "cde"),
    (["END", "END of"], "END"), (["tea", "tea" + HALF], "zz"), (["a", "a" + HALF, "a" + HALF, "a☕", "a☕ b"], "zz"),
    (["x" + HALF], "zz"), (["a", "a b a b"], " b"), (["x", "xa", "xa" + HALF, "xaü", "xaü."], "aü"),
    (["x", "xa", "xa" + HALF, "xaö", "xaö."], "aü"), (["aa", "aaa", "aaab", "aaab."], "aab"),
    (["ab", "abab", "ababac"], "abac"), (["one", "one two, two"], "w"), (["a" + HALF + "b", "a" + HALF + "bc"], "zz"),
    ([], "zz"), (["so", "so?", "so?\n", "so?\n\n", "so?\n\nA"], "\n\n"),
], lambda random: [
    (_after_each(random, text), stop)
    for text, stop in [
        ("naïve ☕ crêpes for a fox", "fog"), ("🦊 runs, and 🦊🦊 sleep", "🦊🦊"),
        ("abcabcabd and abcabe", "abcabd"),
    ]
], given="texts {}, stop {!r}")  # fmt: skip

text_pieces.add_misconceptions({
    "sends half of a character: an incomplete one decodes to the replacement character.": ".rstrip(HALF) -> ",
    "sends the beginning of the stop text, which the next token may complete.": "range(len(stop)) -> [0]",
    "keeps the end of the text back even after the last token: then nothing can complete it.": "number < -> 0 <",
    "leaves out empty pieces: each token has its piece, and piece i belongs to token i.":
        ("return [* -> return [piece for piece in [*", ".index(stop)]] -> .index(stop)]] if piece]",
         "return pieces -> return [piece for piece in pieces if piece]"),
    "sends the stop text: the output ends before it.": "text.index(stop)] -> text.index(stop) + len(stop)]",
    "keeps back as many characters as the stop text has, whatever they are.":
        "max(n for n in range(len(stop)) if text.endswith(stop[:n])) -> min(len(text), len(stop) - 1)",
})  # fmt: skip
