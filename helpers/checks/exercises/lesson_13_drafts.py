"""Lesson 13, speculative decoding: drafts by lookup, verification, and what is left after a rejection."""

from functools import partial

from ..edits import add_edits
from ..exercise import Exercise
from .lesson_1_next_token import ids

propose = Exercise(
    "propose(token_ids, k, remaining)",
    "a longer match gives a better draft, and no draft exceeds what the output can still take",
)
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


@propose.reference
def longest_first(ids, k, remaining):
    for n in (3, 2, 1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n :][: min(k, remaining - 1)]
    return []


def as_digits(separator, ids, k, remaining):
    for n in (3, 2, 1):
        last = separator.join(map(str, ids[-n:]))
        for start in range(len(ids) - 1 - n, -1, -1):
            if len(ids) > n and separator.join(map(str, ids[: start + n])).endswith(last):
                return ids[start + n :][: min(k, remaining - 1)]
    return []


add_edits(propose, {
    "finds the last tokens themselves: nothing follows them yet. Look for an earlier place.": "- n - 1, -> - n,",
    "takes the earliest match: the latest one is more likely to continue in the same way.":
        "range(len(ids) - n - 1, -1, -1) -> range(len(ids) - n)",
    "looks only for the last three tokens: where they are new, the last two or the last one can still match.":
        "(3, 2, 1) -> (3,)",
    "looks only for the last two tokens: three that match give a better draft, and one is better than none.":
        "(3, 2, 1) -> (2,)",
    "looks first for the last token alone: where two or three tokens match, the draft is better.": "(3, 2, 1) -> (1,)",
    "ignores a match that overlaps with the last tokens. Such a match is how a repetition is found.": "n - 1 -> 2 * n",
    "overlooks a match that leaves only one token to follow it: that is the latest place, so look there first.":
        "- n - 1, -> - n - 2,",
    "drafts `remaining` tokens. If all are accepted, the pass yields one token more, and that one would exceed "
    "max_tokens.": "remaining - 1 -> remaining",
    "compares texts of digits: 1 and 12 look like 11 and 2, or like the end of 31 and 12.":
        [partial(as_digits, separator) for separator in ("", " ")],
    "looks for more than three tokens first: three are enough, and the latest of their matches is taken.":
        ["(3, 2, 1) -> range(20, 0, -1)", "(3, 2, 1) -> (4, 3, 2, 1)"],
})  # fmt: skip

verify = Exercise(
    "verify(drafts, chosen, eos)",
    "a draft token counts only if all before it are accepted, and the model's own next token comes on top",
)


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


@verify.reference
def by_request(drafts, chosen, eos):
    outputs, start = [], 0
    for draft in drafts:
        own = chosen[start : start + len(draft) + 1]
        tokens = own[: len(agreed(draft, own)) + 1]
        outputs.append(up_to_eos(tokens, eos))
        start += len(own)
    return outputs


TOKENS = "own[: len(agreed(draft, own)) + 1]"
CONTEXT = "The model chose the later tokens for a text that contains the rejected one."
add_edits(verify, {
    f"accepts draft tokens after the first mismatch. {CONTEXT}":
        f"{TOKENS} -> [one for token, one in zip(draft, own) if token == one] + own[-1:]",
    f"takes all of the model's tokens, also those after a mismatch. {CONTEXT}": f"{TOKENS} -> own",
    f"skips a rejected token and goes on. {CONTEXT}":
        f"{TOKENS} -> [one for token, one in zip(draft, own) if token == one]",
    "forgets the bonus token: if the whole draft is accepted, the same pass has also chosen the token that follows.":
        f"{TOKENS} -> {TOKENS}[: len(draft)]",
    "drops the model's token at the first mismatch: it is right, because everything before it is.":
        f"{TOKENS} -> agreed(draft, own) if own[:-1] != draft else own",
    "accepts a draft as a whole or not at all: the tokens before the first mismatch are right.":
        f"{TOKENS} -> own if own[:-1] == draft else own[:1]",
    "compares a draft token with the model's token for the place after it: the first draft token and the model's first "
    "token have the same place.": f"{TOKENS} -> [*own[1:], None][: len(agreed(draft, [*own[1:], None])) + 1]",
    "cuts the drafts at EOS and adds the model's next token behind it: an accepted EOS ends the output.":
        ("agreed(draft -> agreed(up_to_eos(draft, eos)", "up_to_eos(tokens, eos) -> tokens"),
    "gives each request as many of the model's tokens as its draft has. It has one more, and without a draft it "
    "still has one.": "len(draft) + 1] -> len(draft)]",
    "compares every draft with the start of the row: each request has its own part of it.": "start += len(own) -> pass",
    "begins a request's part of the row after the tokens that the requests before it gained. A part has one token more "
    "than the draft, however many are accepted.": "start += len(own) -> start += len(outputs[-1])",
})  # fmt: skip

settle = Exercise(
    "settle(computed, drafted, accepted, table, block_size)",
    "a rejection sets one number back, and the blocks follow from it",
    names=("the computed tokens", "the table"),
)


def _case(computed, drafted, accepted, size, blocks=(7, 0, 31, 4, 12, 300, 5, 18, 2)):
    return computed, drafted, accepted, list(blocks[: -(-(computed + 1 + drafted) // size)]), size


settle.table([
    _case(*numbers)
    for numbers in [(6, 4, 1, 4), (6, 4, 4, 4), (6, 4, 0, 4), (7, 4, 0, 4), (3, 4, 3, 4), (4, 3, 2, 4),
                    (5, 0, 0, 4), (9, 6, 1, 2), (30, 5, 2, 16), (2, 3, 1, 1), (3, 6, 0, 2), (15, 1, 0, 16)]
], lambda random: [_case(random.randint(1, 20), 5, random.randint(0, 4), 3, random.sample(range(40), 9))])  # fmt: skip


@settle.reference
def set_back(computed, drafted, accepted, table, size):
    now = computed + 1 + accepted
    return now, table[: -(-now // size)]


ATTEND = "Their keys belong to another text, and every later token would attend to them."
add_edits(settle, {
    f"keeps the keys of rejected tokens. {ATTEND}": "1 + accepted -> 1 + drafted",
    "counts the token that the pass has chosen. It has no keys yet: the next pass computes it.": "1 + -> 2 +",
    "keeps no accepted token if one is rejected: those before it are right, and so are their keys.":
        "1 + accepted -> 1 + drafted * (accepted == drafted)",
    f"sets back by the accepted tokens instead of the rejected ones. {ATTEND}": "+ accepted -> + drafted - accepted",
    "keeps the blocks of rejected tokens: other requests may need them.": "-now // -> -(computed + 1 + drafted) //",
    "keeps an empty block if the last one is exactly full: round up the number of blocks instead of adding one.":
        "-(-now // size) -> now // size + 1",
})  # fmt: skip
