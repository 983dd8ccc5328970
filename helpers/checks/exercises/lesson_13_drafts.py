"""Lesson 13, speculative decoding: drafts, verification, and how many draft tokens pay."""

from ..exercise import Exercise
from .lesson_1_next_token import ids


@Exercise.declare("a longer match gives a better draft, and no draft exceeds what the output can still take")
def propose(token_ids, k, remaining):
    for n in (3, 2, 1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                return token_ids[start + n :][: min(k, remaining - 1)]
    return []


propose.table([
    ([5, 6, 7, 8, 5, 6], 4, 10), ([5, 6, 7, 8, 5, 6], 4, 3), ([5, 6, 7, 8, 5, 6], 4, 1),
    ([5, 6, 7, 8, 5, 6], 2, 10), ([1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 1, 2, 3], 2, 9),
    ([2, 3, 5, 8, 3, 6, 1, 2, 3], 3, 9), ([3, 6, 1, 2, 3], 3, 3), ([7, 1, 2, 4, 1, 2, 5, 1, 2], 1, 9),
    ([4, 9, 9, 9], 3, 9), ([5, 2, 5, 5], 2, 9), ([6, 7, 8, 6, 7, 9, 6, 7], 2, 9), ([9, 9, 9, 9], 3, 9),
    ([6, 7, 7, 7, 7], 4, 9), ([1, 2, 3, 4, 5, 8, 2, 3, 4, 6, 1, 2, 3, 4], 1, 9),
    ([4, 1, 2, 3, 5, 1, 2, 3, 6, 4, 1, 2, 3], 2, 9), ([1, 2, 3, 4], 4, 9),
    ([0, 5, 0, 6, 7, 0], 2, 9),  # an id of 0
    ([7, 0, 0, 3, 0, 0], 3, 9), (ids("300 4000 50256 0 300 4000 50256"), 3, 9), (ids("4000 300 7 300"), 2, 9),
    ([1, 12, 5, 11, 2], 3, 9),  # ids with the same digits, but no match
    ([1, 23, 7, 23, 12, 3], 2, 9), ([31, 11, 7, 11, 8, 1, 11], 3, 9), ([21, 4, 6, 4, 3, 1, 4], 2, 9),
    ([2, 9, 2, 9, 5, 2, 9], 5, 4), ([8], 4, 9),
], lambda random: [(random.choices([1, 2, 3], k=random.randint(12, 18)), 3, random.randint(2, 6))],
   given="tokens {}, at most {} draft tokens, {} tokens remaining")  # fmt: skip

propose.add_misconceptions({
    "finds the last tokens themselves: nothing follows them yet. Look for an earlier place.": "- n - 1, -> - n,",
    "takes the earliest match: the latest one is more likely to continue in the same way.":
        "range(len(token_ids) - n - 1, -1, -1) -> range(len(token_ids) - n)",
    "looks for matches of one length: three tokens that match give a better draft, and one is better than none.":
        [f"(3, 2, 1) -> ({n},)" for n in (3, 2, 1)],
    "ignores a match that overlaps with the last tokens. Such a match is how a repetition is found.": "n - 1 -> 2 * n",
    "drafts `remaining` tokens. If all are accepted, the pass yields one token more, and that one would exceed "
    "max_tokens.": "remaining - 1 -> remaining",
    "compares texts of digits: 1 and 12 look like 11 and 2, or like the end of 31 and 12.":
        [f"token_ids[start : start + n] == token_ids[-n:] -> "
         f"{text}.join(map(str, token_ids[: start + n])).endswith({text}.join(map(str, token_ids[-n:])))"
         for text in ("''", "' '")],
    "looks for more than three tokens first: three are enough, and the latest of their matches is taken.":
        ["(3, 2, 1) -> range(20, 0, -1)", "(3, 2, 1) -> (4, 3, 2, 1)"],
    "overlooks a match that only one token follows: that latest place is the first to look at.": "- n - 1, -> - n - 2,",
})  # fmt: skip


@Exercise.declare(
    "a draft token counts only if all before it are accepted, and the model's own next token comes on top"
)
def verify(drafts, chosen, eos):
    outputs, start = [], 0
    for draft in drafts:
        own = chosen[start : start + len(draft) + 1]
        tokens = own[: len(agreed(draft, own)) + 1]
        outputs.append(up_to_eos(tokens, eos))
        start += len(own)
    return outputs


def _drawn(random):
    drafts = [random.choices([1, 2], k=random.randint(0, 3)) for _ in range(4)]
    return drafts, [random.randint(1, 2) for draft in drafts for _ in range(len(draft) + 1)], 0


verify.table([
    ([[7, 8, 5]], [7, 8, 6, 9], 0), ([[7, 8]], [7, 8, 6], 0), ([[]], [4], 0), ([[7, 8, 5]], [6, 8, 5, 3], 0),
    ([[7, 9, 5, 4]], [7, 8, 5, 4, 3], 0), ([[7, 3, 5]], [7, 3, 0, 6], 0), ([[7, 0, 5]], [7, 0, 5, 6], 0),
    ([[0, 3], [0]], [0, 3, 4, 0, 2], 0),
    ([[7, 0, 5], [0], []], [7, 0, 5, 0, 0, 3, 0], 9),  # tokens of id 0, which are not EOS
    ([[7, 9, 5], [9]], [7, 9, 5, 6, 8, 4], 9),  # another EOS, accepted and rejected
    ([[3, 9], [5]], [3, 4, 9, 9, 5], 9), ([ids("300 4000")], ids("300 4000 50256"), int("50256")),
    ([ids("300 4000 50256"), ids("300")], ids("300 4000 50256 7 300 1000"), int("50256")),
    ([[3, 4], [], [5]], [3, 4, 6, 8, 5, 2], 0), ([[3, 4], [], [5]], [3, 9, 6, 0, 7, 5], 0),
    ([[5, 6], [7]], [8, 5, 6, 7, 7], 0), ([[5, 5, 5], [5, 5]], [5, 5, 6, 5, 5, 5, 5], 0),
], lambda random: [_drawn(random)], given="drafts {}, the model's tokens {}, EOS is {}")  # fmt: skip


def agreed(draft, own):
    return own[: next((n for n, token in enumerate(draft) if token != own[n]), len(draft))]


def up_to_eos(tokens, eos):
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


TOKENS = "own[: len(agreed(draft, own)) + 1]"
verify.add_misconceptions({
    "accepts draft tokens after the first mismatch. The model chose them for a text that contains the rejected one.":
        [f"{TOKENS} -> own", *(f"{TOKENS} -> [token for token, sampled in zip(draft, own) if token == sampled]{last}"
                               for last in ("", " + own[-1:]"))],
    "forgets the bonus token: if the whole draft is accepted, the same pass has also chosen the token that follows.":
        f"{TOKENS} -> {TOKENS}[: len(draft)]",
    "drops the model's token at the first mismatch: it is right, because everything before it is.":
        f"{TOKENS} -> agreed(draft, own) if own[:-1] != draft else own",
    "accepts a draft as a whole or not at all: the tokens before the first mismatch are right.":
        f"{TOKENS} -> own if own[:-1] == draft else own[:1]",
    "gives each request as many of the model's tokens as its draft has. It has one more, and without a draft it "
    "still has one.": "len(draft) + 1] -> len(draft)]",
    "goes on after EOS: it ends the output.": "up_to_eos(tokens, eos) -> tokens",
    "drops EOS: the model generated it, so it is a token of the output.":
        "up_to_eos(tokens, eos) -> [token for token in up_to_eos(tokens, eos) if token != eos]",
    "compares every draft with the start of the row: each request has its own part of it.": "start += len(own) -> pass",
    "begins a request's part of the row after the tokens that the requests before it gained. A part has one token more "
    "than the draft, however many are accepted.": "start += len(own) -> start += len(outputs[-1])",
    "compares a draft token with the model's token for the place after it: the first draft token and the model's first "
    "token have the same place.": f"{TOKENS} -> [*own[1:], None][: len(agreed(draft, [*own[1:], None])) + 1]",
})  # fmt: skip


@Exercise.declare("speculation trades arithmetic for passes, so it pays only where a pass has arithmetic to spare")
def best_k(acceptance, rows, milliseconds):
    speeds = []
    for k in range(len(milliseconds)):
        width = rows * (k + 1)
        if width < len(milliseconds):
            tokens = sum(acceptance**before for before in range(k + 1))
            speeds.append(tokens / milliseconds[width])
    return speeds.index(max(speeds))


FLAT, STEEP = [0, 20, 20, 20, 20, 20, 20, 20, 20], [0, 20, 30, 40, 50, 60, 70, 80, 90]
BENT = [0, 20, 21, 22, 23, 24, 25, 26, 27, 32, 37, 42, 47, 52, 57, 62, 67]
# A kernel computes up to 8, 16, ... tokens in the same time: the best k is at the end of a stair.
STAIRS = [0, *[20] * 2, *[25] * 2, *[29] * 4, *[46] * 8]
best_k.table([
    (0.5, 1, [0, 10, 11, 12, 13]), (0.9, 1, BENT), (0.6, 1, BENT), (0.0, 1, BENT), (0.8, 2, BENT), (0.8, 4, BENT),
    (0.6, 8, BENT), (0.3, 4, BENT), (1.0, 1, FLAT), (0.7, 2, STEEP), (0.3, 2, STEEP), (0.4, 1, FLAT), (0.0, 1, FLAT),
    (0.0, 2, FLAT), (0.85, 1, STAIRS), (0.5, 1, STAIRS), (0.95, 2, STAIRS),
    (0.9, 1, [0, 10, 30, 31, 32, 33, 34, 35, 36, 37, 38]), (1.0, 1, [0, 10, 30, 31, 32, 33, 60, 61, 62]),
], lambda random: [(round(random.uniform(0.35, 0.95), 2), random.choice([1, 2, 3]), BENT)])  # fmt: skip

EXPECTED, BEST = "sum(acceptance**before for before in range(k + 1))", "speeds.index(max(speeds))"
best_k.add_misconceptions({
    "counts every draft token with the same probability. One counts only if all before it are accepted, too.":
        f"{EXPECTED} -> 1 + acceptance * k",
    "forgets the token that the model chooses itself: a pass yields at least one.": "range(k + 1)) -> range(1, k + 1))",
    "treats all draft tokens as accepted.": "acceptance**before -> 1",
    "takes the time of a pass with a single row: all rows compute their drafts in the same pass.":
        ["rows * (k + 1) -> k + 1", "[width] -> [k + 1]"],
    "computes the drafts only: each request also computes its newest token.":
        ["rows * (k + 1) -> rows * max(k, 1)", "[width] -> [rows * max(k, 1)]"],
    "ignores what a pass costs: more tokens take longer.": " / milliseconds[width] -> ",
    "prefers the larger k where two are equally fast: the smaller one computes fewer tokens.":
        f"{BEST} -> max(range(len(speeds)), key=lambda k: (speeds[k], k))",
    "stops at the first k that is slower than the one before: times can rise in stairs, so a larger k may be faster.":
        f"{BEST} -> next((k for k, (now, later) in enumerate(pairwise(speeds)) if later <= now), len(speeds) - 1)",
    "adds the draft of a single row to the pass: every row has one.": ["* (k + 1) -> + k", "[width] -> [rows + k]"],
    "counts a draft as accepted as a whole or not at all: the tokens before the first rejected one count, too.":
        f"{EXPECTED} -> 1 + k * acceptance**k",
})  # fmt: skip
