"""Lesson 12, structured output: the tokens of a choice, a mask, and the tokens that a pattern allows."""

import math

from ..exercise import Exercise
from .lesson_11_sampling import shares

allowed_tokens = Exercise(
    "allowed_tokens(text, choices, vocabulary, tokens_left)",
    "a token is allowed if the text can still become a choice with the tokens that are left, and EOS if it is one",
)


@allowed_tokens.cases
def _(random):
    words = ["<eos>", "y", "yes", "no", "n", "o", "es", "e", "s", "none", "ye", "ne"]
    cars = ["<eos>", "c", "ca", "car", "art", "ar", "t", "r", "ts", "carts", "a", "dog"]
    mixed = [cars[0], *random.sample(cars[1:], 11)]
    animals = ["<eos>", "u", "un", "uni", "unicor", "corn", "co", "rn", "n", "owl", "ow", "l", "icorn", "i"]
    adverbs = ["<eos>", "to", "t", "o", "get", "her", "gethe", "toge", "ther"]
    for text, choices, vocabulary, left in [
        ("", ["yes", "no"], words, 9), ("y", ["yes", "no"], words, 9), ("yes", ["yes", "no"], words, 9),
        ("n", ["no", "none"], words, 9), ("no", ["no", "none"], words, 9), ("car", ["cart", "car"], cars, 9),
        ("ca", ["dog", "cart", "car"], cars, 9), ("c", ["art", "cart", "car"], cars, 9),
        ("car", ["carts", "car", "cat"], mixed, 9), ("", ["unicorn", "owl"], animals, 1),
        ("", ["unicorn", "owl"], animals, 2), ("", ["unicorn", "owl"], animals, 3), ("", ["together"], adverbs, 2),
        ("", ["together"], adverbs, 3), ("", ["together"], adverbs, 4), ("no", ["no", "none"], words, 1),
        ("", ["together", "toge"], adverbs, 1), ("to", ["together"], adverbs, 2),
        ("", ["carts", "car", "cat"], mixed, random.choice([1, 2])),
    ]:  # fmt: skip
        given = f"text {text!r}, choices {choices}, vocabulary {vocabulary}, {left} tokens left"
        yield (text, choices, vocabulary, left), given


@allowed_tokens.ignoring
def any_order(result, arguments):
    return sorted(result) if isinstance(result, list) else result


def fewest(rest, pieces):
    """Return the smallest number of pieces that spell a text; infinity if none do."""
    needed = [0]  # for the last characters of the text: none, one, two, ...
    for start in reversed(range(len(rest))):
        after = [1 + needed[len(rest) - start - len(one)] for one in pieces if rest.startswith(one, start)]
        needed.append(min(after, default=math.inf))
    return needed[-1]


@allowed_tokens.reference
def still_beginnings(
    text,
    choices,
    vocabulary,
    tokens_left,
    fits=lambda c, t, piece: c.startswith(t + piece),
    ends=lambda t, c, more: t in c,
    needs=fewest,
    after=lambda tokens_left: tokens_left - 1,
):
    """List the allowed ids, with replaceable parts: which tokens fit, when EOS does, what a rest needs and may take."""

    def is_allowed(piece):
        rests = [choice[len(text + piece) :] for choice in choices if fits(choice, text, piece)]
        return any(needs(rest, vocabulary[1:]) <= after(tokens_left) for rest in rests)

    ids = [token_id for token_id, piece in enumerate(vocabulary) if token_id and is_allowed(piece)]
    return [0] * ends(text, choices, ids) + ids


def longest_first(rest, pieces):
    count = 0
    while rest:
        piece = max((one for one in pieces if rest.startswith(one)), key=len, default="")
        if not piece:
            return math.inf
        rest, count = rest[len(piece) :], count + 1
    return count


for _part, _wrongs in {
    "fits": {
        "allows only tokens that complete a choice: a choice can be made of several tokens.":
            lambda c, t, piece: t + piece == c,
        "ignores the text so far: a token must continue it.": lambda c, t, piece: c.startswith(piece),
        "allows tokens from anywhere in a choice: a token must continue the text where it ends.":
            lambda c, t, piece: piece in c,
        "compares only the first character of a token: all of its characters must fit.":
            lambda c, t, piece: c.startswith(t + piece[0]),
        "allows a token with which the text becomes longer than the choice.":
            lambda c, t, piece: c.startswith(t + piece) or (t + piece).startswith(c),
        "continues a choice that the text does not begin: compare the text, too, not only its length.":
            lambda c, t, piece: c[len(t) :].startswith(piece),
        "allows only tokens of one character: longer ones fit, too, if all of their characters do.":
            lambda c, t, piece: len(piece) == 1 and c.startswith(t + piece),
    },
    "ends": {
        "never allows EOS: then no output ends.": lambda t, c, more: False,
        "always allows EOS: the output could end before it is a choice.": lambda t, c, more: True,
        "allows EOS only if nothing else may follow: a choice can be the beginning of a longer one.":
            lambda t, c, more: not more,
        "allows EOS as soon as there is a text: it must be a complete choice.": lambda t, c, more: bool(t),
    },
    "needs": {
        "ignores `tokens_left`: an output can begin a choice for which too few tokens are left, and is then cut off.":
            lambda rest, pieces: 0,
        "counts the characters of the rest instead of its tokens: a token can have several.":
            lambda rest, pieces: len(rest),
        "counts one token for the rest of a choice, whatever it is: the vocabulary may have no such token.":
            lambda rest, pieces: bool(rest),
        "always takes the longest token of the rest. A shorter one may need fewer tokens, or be the only way.":
            longest_first,
    },
    "after": {
        "forgets that the token itself is one of those that are left.": lambda tokens_left: tokens_left,
        "keeps a token for EOS: a complete choice can also end because no token is left.":
            lambda tokens_left: tokens_left - 2,
    },
}.items():  # fmt: skip
    allowed_tokens.add_misconceptions(_wrongs, part=_part)
allowed_tokens.add_misconceptions({
    "allows only EOS after a complete choice: a longer choice could still follow.":
        lambda text, *case: [0] if text in case[0] else still_beginnings(text, *case),
    "looks only at the first choice: any of them may be meant.":
        lambda text, choices, *case: still_beginnings(text, choices[:1], *case),
    "returns the tokens' texts: the task asks for their ids.":
        lambda *case: [case[2][place] for place in still_beginnings(*case)],
    "returns the tokens that are not allowed.":
        lambda *case: sorted(set(range(len(case[2]))) - set(still_beginnings(*case))),
    "returns True and False: the task asks for ids.":
        lambda *case: [place in still_beginnings(*case) for place in range(len(case[2]))],
})  # fmt: skip

masked_softmax = Exercise(
    "masked_softmax(logits, allowed)",
    "the mask comes before the softmax, so the allowed tokens share all of the probability",
)


masked_softmax.table(
    [
        ([2.0, 1.0, 0.5], [1, 2]), ([-2.0, -1.0, -4.0, 3.0], [0, 2]), ([0.5, 0.0, -1.0], [0, 1, 2]),
        ([4.0, 1.0, 2.0], [1]), ([1.0, 2.5, -1.0, 0.5, 2.0], [4, 0, 2]), ([0.0, 3.0, 0.0], [0, 2]),
        ([1500.0, 1.0, 0.0], [1, 2]), ([0.5, -0.5, 900.0, 899.0], [0, 1]), ([1000.0, 999.0, 1200.0], [0, 1]),
        ([3000.0, 0.0, 1.0, 3100.0], [0, 1, 2]), ([-2000.0, -2001.0, -1999.0], [0, 1]),
        ([-2000.0, -3.0, -2001.0], [0, 2]), ([-12000.0, -12001.0, 5.0, -12002.0], [0, 1]),
    ],
    lambda random: [([round(random.uniform(-3, 3), 2) for _ in range(6)], random.sample(range(6), 3))],
)  # fmt: skip


@masked_softmax.reference
def of_allowed(logits, allowed, weight=lambda x, fits: x if fits else -math.inf, largest=max, last=shares):
    """Compute a masked softmax, with replaceable parts: the masked logit, what is subtracted, and the last step."""
    scores = [weight(logit, place in allowed) for place, logit in enumerate(logits)]
    return last([math.exp(score - largest(scores)) for score in scores])


def unmasked(logits):
    return of_allowed(logits, range(len(logits)))


masked_softmax.add_misconceptions({
    "applies the mask after the softmax. The removed tokens have already taken their share, so the others do not add "
    "up to 1: a drawn number could fall on none.":
        lambda n, a: [value * (place in a) for place, value in enumerate(unmasked(n))],
    "gives removed tokens the logit 0: e to the power of 0 is 1, so they keep a share. Minus infinity removes them.":
        lambda n, a: of_allowed(n, a, weight=lambda x, fits: x * fits),
    "gives removed tokens a logit that is not small enough: allowed ones can be lower. Minus infinity removes a token.":
        lambda n, a: of_allowed(n, a, weight=lambda x, fits: x if fits else -1000.0),
    "subtracts 1,000 from removed logits: allowed ones can be lower still. Minus infinity removes a token.":
        lambda n, a: of_allowed(n, a, weight=lambda x, fits: x if fits else x - 1000.0),
    "subtracts 0 if all allowed logits are negative: exponentials of numbers far below 0 are all 0.":
        lambda n, a: of_allowed(n, a, largest=lambda scores: max(0, *scores)),
    "adds a mask of 1 and 0 to the logits: a 0 removes nothing.":
        lambda n, a: of_allowed(n, a, weight=lambda x, fits: x + fits),
    "inverts the mask: the tokens in `allowed` are those that stay.":
        lambda n, a: of_allowed(n, a, weight=lambda x, fits: -math.inf if fits and len(a) < len(n) else x),
    "ignores the mask.": lambda n, a: unmasked(n),
    "returns only the probabilities of the allowed tokens: with a shorter list, places are no longer ids.":
        lambda n, a: [value for place, value in enumerate(of_allowed(n, a)) if place in a],
    "gives all allowed tokens the same probability: their logits still count.":
        lambda n, a: [(place in a) / len(a) for place in range(len(n))],
    "gives the best allowed token the probability 1: that is greedy.":
        lambda n, a: [float(place == max(a, key=n.__getitem__)) for place in range(len(n))],
    "does not divide by the sum: probabilities add up to 1.": lambda n, a: of_allowed(n, a, last=list),
    "subtracts the largest logit of all tokens. If a removed token has it, the exponentials of the allowed ones can "
    "become 0: subtract the largest *allowed* one.": lambda n, a: of_allowed(n, a, largest=lambda scores: max(n)),
    "computes exponentials of the logits as they are: that of 1,000 is too large for a float. Subtract the largest "
    "allowed logit first, which changes no probability.": lambda n, a: of_allowed(n, a, largest=lambda scores: 0),
    "removes the allowed tokens' logits from the list of probabilities: it returns masked logits.":
        lambda n, a: [logit if place in a else -math.inf for place, logit in enumerate(n)],
})  # fmt: skip

next_states = Exercise(
    "next_states(edges, state, vocabulary)",
    "a token may follow if the automaton can read all of its characters, wherever pieces of the pattern begin and end",
)
# States 0 to 7 read {"a": and a number of one or two digits, then }; from 8 on, a loop of a and b, and a dead end.
NUMBERS = [
    {"{": 1}, {'"': 2}, {"a": 3}, {'"': 4}, {":": 5}, {"1": 6, "2": 6}, {"0": 7, "1": 7, "}": 8}, {"}": 8}, {},
]  # fmt: skip
LOOP = [{"a": 1}, {"b": 0, "a": 1, "c": 2}, {}]
PIECES = ["{", '{"', '"a"', 'a"', '":', '"', "a", ":1", ":", "1", "2", "12", "11", "1}", "}", "{}", "10}", "0", "21"]


next_states.table(
    [
        (NUMBERS, 0, PIECES), (NUMBERS, 1, PIECES), (NUMBERS, 2, PIECES), (NUMBERS, 3, PIECES), (NUMBERS, 4, PIECES),
        (NUMBERS, 5, PIECES), (NUMBERS, 6, PIECES), (NUMBERS, 7, PIECES), (NUMBERS, 8, PIECES),
        (LOOP, 0, ["a", "b", "ab", "aba", "aab", "abc", "ac", "aca", "c"]),
        (LOOP, 1, ["a", "b", "ab", "ba", "bab", "bb", "aaac", "caa"]), (LOOP, 2, ["a", "b"]), (LOOP, 0, ["b", "c"]),
    ],
    lambda random: [(LOOP, 1, ["".join(random.choices("abc", k=random.randint(1, 4))) for _ in range(9)])],
)  # fmt: skip


def read(edges, state, text):
    for character in text:
        state = edges[state].get(character)
        if state is None:
            return None
    return state


@next_states.reference
def by_reading(edges, state, vocabulary, after=read):
    """List the tokens that can be read, with a replaceable part: the state after a text, None if there is none."""
    found = {token_id: after(edges, state, text) for token_id, text in enumerate(vocabulary)}
    return {token_id: following for token_id, following in found.items() if following is not None}


def skipping(edges, state, text):
    read_some = False
    for character in text:
        if character in edges[state]:
            state, read_some = edges[state][character], True
    return state if read_some else None


for _message, _after in {
    "reads only the first character of a token: the pattern has to allow all of them.":
        lambda edges, state, text: edges[state].get(text[0]),
    "allows only tokens of one character: longer ones may span several edges.":
        lambda edges, state, text: edges[state].get(text),
    "skips characters that have no edge: then a token that the pattern refuses is allowed.": skipping,
    "stops at the first character without an edge, but allows the token.":
        lambda edges, state, text: None if text[0] not in edges[state] else next(
            found for end in range(len(text), 0, -1) if (found := read(edges, state, text[:end])) is not None
        ),
    "starts in state 0 instead of `state`.": lambda edges, state, text: read(edges, 0, text),
    "reads all characters from the same state: each one leads to the next state.":
        lambda edges, state, text: edges[state][text[-1]] if all(one in edges[state] for one in text) else None,
    "loses tokens that lead to state 0: 0 is a state, too, and only None is none.":
        lambda edges, state, text: read(edges, state, text) or None,
    "refuses tokens that lead to a state without edges: the text may end there.":
        lambda edges, state, text: found if (found := read(edges, state, text)) is not None and edges[found] else None,
}.items():  # fmt: skip
    next_states.add_misconceptions({_message: lambda *case, _after=_after: by_reading(*case, after=_after)})
next_states.add_misconceptions({
    "returns the ids alone: the state after each token is needed for the next mask.":
        lambda *case: list(by_reading(*case)),
    "returns texts as keys: a token's id is its position in the vocabulary.":
        lambda edges, state, words: {words[place]: found for place, found in by_reading(edges, state, words).items()},
    "returns every token, with None for those that are not allowed: leave them out.":
        lambda edges, state, words: {place: read(edges, state, text) for place, text in enumerate(words)},
})  # fmt: skip
