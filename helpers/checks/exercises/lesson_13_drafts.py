"""Lesson 13, speculative decoding: drafts by lookup, verification, and what is left after a rejection."""

from ..exercise import Exercise

propose = Exercise(
    "propose(token_ids, k, remaining)",
    "a longer match gives a better draft, and no draft exceeds what the output can still take",
)


def new(text):
    """Return ids that are equal without being one object, as those of a tokenizer are: `is` does not compare them."""
    return list(map(int, text.split()))


propose.table(
    [
        ([5, 6, 7, 8, 5, 6], 4, 10), ([5, 6, 7, 8, 5, 6], 4, 3), ([5, 6, 7, 8, 5, 6], 4, 1),
        ([5, 6, 7, 8, 5, 6], 2, 10), ([1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 1, 2, 3], 2, 9),
        ([2, 3, 5, 8, 3, 6, 1, 2, 3], 3, 9), ([3, 6, 1, 2, 3], 3, 3), ([7, 1, 2, 4, 1, 2, 5, 1, 2], 1, 9),
        ([4, 9, 9, 9], 3, 9), ([5, 2, 5, 5], 2, 9), ([6, 7, 8, 6, 7, 9, 6, 7], 2, 9), ([9, 9, 9, 9], 3, 9),
        ([6, 7, 7, 7, 7], 4, 9), ([1, 2, 3, 4, 5, 8, 2, 3, 4, 6, 1, 2, 3, 4], 1, 9),
        ([4, 1, 2, 3, 5, 1, 2, 3, 6, 4, 1, 2, 3], 2, 9), ([1, 2, 3, 4], 4, 9),
        ([0, 5, 0, 6, 7, 0], 2, 9),  # an id of 0
        ([7, 0, 0, 3, 0, 0], 3, 9), (new("300 4000 50256 0 300 4000 50256"), 3, 9), (new("4000 300 7 300"), 2, 9),
        ([1, 12, 5, 11, 2], 3, 9),  # ids with the same digits, but no match
        ([1, 23, 7, 23, 12, 3], 2, 9), ([31, 11, 7, 11, 8, 1, 11], 3, 9), ([21, 4, 6, 4, 3, 1, 4], 2, 9),
        ([2, 9, 2, 9, 5, 2, 9], 5, 4), ([8], 4, 9),
    ],
    lambda random: [(random.choices([1, 2, 3], k=random.randint(12, 18)), 3, random.randint(2, 6))],
    given="tokens {}, at most {} draft tokens, {} tokens remaining",
)  # fmt: skip


@propose.reference
def longest_first(
    ids, k, remaining, sizes=(3, 2, 1), starts=lambda end, n: range(end - 1, -1, -1), first=lambda n: n, most=None
):
    """Draft, with replaceable parts: the sizes of the match, where to look, the first draft token, and how many."""
    most = min(k, remaining - 1) if most is None else most(k, remaining)
    for n in sizes:
        for start in starts(len(ids) - n, n):
            if start >= 0 and ids[start : start + n] == ids[-n:]:
                return ids[start + first(n) :][:most]
    return []


propose.add_misconceptions({
    "finds the last tokens themselves: nothing follows them yet. Look for an earlier place.":
        {"starts": lambda end, n: range(end, -1, -1)},
    "takes the earliest match: the latest one is more likely to continue in the same way.":
        {"starts": lambda end, n: range(end)},
    "looks only for the last three tokens: where they are new, the last two or the last one can still match.":
        {"sizes": (3,)},
    "looks only for the last two tokens: three that match give a better draft, and one is better than none.":
        {"sizes": (2,)},
    "looks first for the last token alone: where two or three tokens match, the draft is better.": {"sizes": (1,)},
    "ignores a match that overlaps with the last tokens. Such a match is how a repetition is found.":
        {"starts": lambda end, n: range(end - n, -1, -1)},
    "overlooks a match that leaves only one token to follow it: that is the latest place, so look there first.":
        {"starts": lambda end, n: range(end - 2, -1, -1)},
    "drafts the matching tokens themselves: the draft is what came after them.": {"first": lambda n: 0},
    "leaves out the token right after the match: it is the first draft token.": {"first": lambda n: n + 1},
    "drafts beyond the end of the output: `remaining` is the most that it can still take.": {"most": lambda k, r: k},
    "drafts `remaining` tokens. If all are accepted, the pass yields one token more, and that one would exceed "
    "max_tokens.": {"most": min},
    "drafts one token less than k: the newest token of the text is not a draft token.":
        {"most": lambda k, r: min(k, r) - 1},
})  # fmt: skip
for _separator in ("", " "):

    @propose.misconception("compares texts of digits: 1 and 12 look like 11 and 2, or like the end of 31 and 12.")
    def as_digits(ids, k, remaining, separator=_separator):
        for n in (3, 2, 1):
            last = separator.join(map(str, ids[-n:]))
            for start in range(len(ids) - 1 - n, -1, -1):
                if len(ids) > n and separator.join(map(str, ids[: start + n])).endswith(last):
                    return ids[start + n :][: min(k, remaining - 1)]
        return []


for _sizes in (range(20, 0, -1), (4, 3, 2, 1)):
    propose.misconception(
        "looks for more than three tokens first: three are enough, and the latest of their matches is taken.",
        lambda *case, sizes=_sizes: longest_first(*case, sizes=sizes),
    )

verify = Exercise(
    "verify(drafts, chosen, eos)",
    "a draft token counts only if all before it are accepted, and the model's own next token comes on top",
)


verify.table(
    [
        ([[7, 8, 5]], [7, 8, 6, 9], 0), ([[7, 8]], [7, 8, 6], 0), ([[]], [4], 0), ([[7, 8, 5]], [6, 8, 5, 3], 0),
        ([[7, 9, 5, 4]], [7, 8, 5, 4, 3], 0), ([[7, 3, 5]], [7, 3, 0, 6], 0), ([[7, 0, 5]], [7, 0, 5, 6], 0),
        ([[0, 3], [0]], [0, 3, 4, 0, 2], 0),
        ([[7, 0, 5], [0], []], [7, 0, 5, 0, 0, 3, 0], 9),  # tokens of id 0, which are not EOS
        ([[7, 9, 5], [9]], [7, 9, 5, 6, 8, 4], 9),  # another EOS, accepted and rejected
        ([[3, 9], [5]], [3, 4, 9, 9, 5], 9), ([new("300 4000")], new("300 4000 50256"), int("50256")),
        ([new("300 4000 50256"), new("300")], new("300 4000 50256 7 300 1000"), int("50256")),
        ([[3, 4], [], [5]], [3, 4, 6, 8, 5, 2], 0), ([[3, 4], [], [5]], [3, 9, 6, 0, 7, 5], 0),
        ([[5, 6], [7]], [8, 5, 6, 7, 7], 0), ([[5, 5, 5], [5, 5]], [5, 5, 6, 5, 5, 5, 5], 0),
    ],
    lambda random: [_drawn(random)],
    given="drafts {}, the model's tokens {}, EOS is {}",
)  # fmt: skip


def _drawn(random):
    drafts = [random.choices([1, 2], k=random.randint(0, 3)) for _ in range(4)]
    return drafts, [random.randint(1, 2) for draft in drafts for _ in range(len(draft) + 1)], 0


def until_the_first_mismatch(draft, chosen):
    right = 0
    while right < len(draft) and draft[right] == chosen[right]:
        right += 1
    return chosen[: right + 1]


def up_to_eos(tokens, eos):
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


@verify.reference
def by_request(drafts, chosen, eos, accept=until_the_first_mismatch, end=up_to_eos, rows=lambda draft: len(draft) + 1):
    """Verify, with replaceable parts: the tokens that a draft yields, how they end, a request's share of `chosen`."""
    tokens, start = [], 0
    for draft in drafts:
        tokens.append(end(accept(draft, chosen[start : start + rows(draft)]), eos))
        start += rows(draft)
    return tokens


def agreed(draft, chosen):
    return until_the_first_mismatch(draft, chosen)[:-1]


def as_drafted(draft, chosen):
    right = len(agreed(draft, chosen))
    return draft[: right + 1] + (chosen[-1:] if right == len(draft) else [])


CONTEXT = "The model chose the later tokens for a text that contains the rejected one."
verify.add_misconceptions({
    f"accepts draft tokens after the first mismatch. {CONTEXT}":
        {"accept": lambda d, c: [one for token, one in zip(d, c, strict=False) if token == one] + c[-1:]},
    f"takes all of the model's tokens, also those after a mismatch. {CONTEXT}": {"accept": lambda d, c: c},
    f"skips a rejected token and goes on. {CONTEXT}":
        {"accept": lambda d, c: [one for token, one in zip(d, c, strict=False) if token == one]},
    "forgets the bonus token: if the whole draft is accepted, the same pass has also chosen the token that follows.":
        {"accept": lambda d, c: until_the_first_mismatch(d, c)[: len(d)]},
    "drops the model's token at the first mismatch: it is right, because everything before it is.":
        {"accept": lambda d, c: agreed(d, c) if len(agreed(d, c)) < len(d) else c},
    "returns the accepted tokens only: the pass has also chosen the token that follows them.": {"accept": agreed},
    "keeps the rejected token: in its place, the output gets the token that the model chose.": {"accept": as_drafted},
    "accepts a draft as a whole or not at all: the tokens before the first mismatch are right.":
        {"accept": lambda d, c: c if c[:-1] == d else c[:1]},
    "compares a draft token with the model's token for the place after it: the first draft token and the model's first "
    "token have the same place.": {"accept": lambda d, c: until_the_first_mismatch(d, [*c[1:], None])},
    "returns the drafts: the model decides which of them are right.": {"accept": lambda d, c: d},
    "takes only the first token of each request: accepted ones are tokens, too.": {"accept": lambda d, c: c[:1]},
    "cuts the drafts at EOS and adds the model's next token behind it: an accepted EOS ends the output.":
        lambda drafts, chosen, eos: by_request(drafts, chosen, eos, lambda d, c: (
            until_the_first_mismatch(up_to_eos(d, eos), c)), lambda tokens, eos: tokens),
    "continues after EOS: an accepted EOS ends the output, as any other EOS does.": {"end": lambda tokens, eos: tokens},
    "leaves out EOS: it is a token of the output, its last one.":
        {"end": lambda tokens, eos: tokens[: tokens.index(eos)] if eos in tokens else tokens},
    "gives each request as many of the model's tokens as its draft has. It has one more, and without a draft it "
    "still has one.": {"rows": len},
})  # fmt: skip


@verify.misconception("compares every draft with the start of the row: each request has its own part of it.")
def with_the_first_request_s(drafts, chosen, eos):
    return [up_to_eos(until_the_first_mismatch(draft, chosen[: len(draft) + 1]), eos) for draft in drafts]


@verify.misconception(
    "begins a request's part of the row after the tokens that the requests before it gained. A part has one token more "
    "than the draft, however many are accepted."
)
def by_what_was_gained(drafts, chosen, eos):
    outputs, start = [], 0
    for draft in drafts:
        outputs.append(up_to_eos(until_the_first_mismatch(draft, chosen[start : start + len(draft) + 1]), eos))
        start += len(outputs[-1])
    return outputs


@verify.misconception("returns one list for all requests: each has tokens of its own.")
def joined(*case):
    return [token for tokens in by_request(*case) for token in tokens]


settle = Exercise(
    "settle(computed, drafted, accepted, table, block_size)",
    "a rejection sets one number back, and the blocks follow from it",
    names=("the computed tokens", "the table"),
)


def _case(computed, drafted, accepted, size, blocks):
    return computed, drafted, accepted, blocks[: -(-(computed + 1 + drafted) // size)], size


_BLOCKS = [7, 0, 31, 4, 12, 300, 5, 18, 2]
settle.table(
    [
        _case(*numbers, _BLOCKS)
        for numbers in [(6, 4, 1, 4), (6, 4, 4, 4), (6, 4, 0, 4), (7, 4, 0, 4), (3, 4, 3, 4), (4, 3, 2, 4),
                        (5, 0, 0, 4), (9, 6, 1, 2), (30, 5, 2, 16), (2, 3, 1, 1), (3, 6, 0, 2), (15, 1, 0, 16)]
    ],
    lambda random: [_case(random.randint(1, 20), 5, random.randint(0, 4), 3, random.sample(range(40), 9))],
)  # fmt: skip


@settle.reference
def set_back(c, d, a, table, b, now=lambda c, d, a: c + 1 + a, keep=lambda n, b, c, d: -(-n // b)):
    """Set a sequence back, with replaceable parts: tokens computed now, blocks to keep."""
    tokens = now(c, d, a)
    return tokens, table[: keep(tokens, b, c, d)]


ATTEND = "Their keys belong to another text, and every later token would attend to them."
for _part, _wrongs in {
    "now": {
        f"keeps the keys of rejected tokens. {ATTEND}": lambda c, d, a: c + 1 + d,
        "does not count the newest token: no earlier pass has computed it, and this one has.": lambda c, d, a: c + a,
        "counts the token that the pass has chosen. It has no keys yet: the next pass computes it.":
            lambda c, d, a: c + 2 + a,
        "keeps no accepted token if one is rejected: those before it are right, and so are their keys.":
            lambda c, d, a: c + 1 + d * (a == d),
        "changes nothing: the newest token and the accepted ones are computed now.": lambda c, d, a: c,
        f"sets back by the accepted tokens instead of the rejected ones. {ATTEND}": lambda c, d, a: c + 1 + d - a,
    },
    "keep": {
        "keeps the blocks of rejected tokens: other requests may need them.":
            lambda n, b, c, d: -(-(c + 1 + d) // b),
        "frees the last block although it is partly filled: its tokens would be overwritten.":
            lambda n, b, c, d: n // b,
        "keeps a block more than the computed tokens need.": lambda n, b, c, d: -(-n // b) + 1,
        "keeps an empty block if the last one is exactly full: round up the number of blocks instead of adding one.":
            lambda n, b, c, d: n // b + 1,
    },
}.items():  # fmt: skip
    settle.add_misconceptions(_wrongs, part=_part)
settle.misconception(
    "returns the blocks to free: the task asks for those that the sequence keeps.",
    lambda c, d, a, table, b: (c + 1 + a, table[-(-(c + 1 + a) // b) :]),
)
