"""Lesson 12, structured output: the tokens of a choice, a mask, and the tokens that a pattern allows."""

import math

from ..exercise import Exercise
from .lesson_11_sampling import any_order, shares


@Exercise.declare(
    "a token is allowed if the text can still become a choice with the tokens that are left, and EOS if it is one"
)
def allowed_tokens(text, choices, vocabulary, tokens_left):
    ids = [0] if text in choices else []
    for token_id, piece in enumerate(vocabulary[1:], 1):
        rests = [choice[len(text + piece) :] for choice in choices if choice.startswith(text + piece)]
        if any(fewest(rest, vocabulary[1:]) <= tokens_left - 1 for rest in rests):
            ids.append(token_id)
    return ids


WORDS = ["<eos>", "y", "yes", "no", "n", "o", "es", "e", "s", "none", "ye", "ne"]
CARS = ["<eos>", "c", "ca", "car", "art", "ar", "t", "r", "ts", "carts", "a", "dog"]
ANIMALS = ["<eos>", "u", "un", "uni", "unicor", "corn", "co", "rn", "n", "owl", "ow", "l", "icorn", "i"]
ADVERBS = ["<eos>", "to", "t", "o", "get", "her", "gethe", "toge", "ther"]
allowed_tokens.table([
    ("", ["yes", "no"], WORDS, 9), ("y", ["yes", "no"], WORDS, 9), ("yes", ["yes", "no"], WORDS, 9),
    ("n", ["no", "none"], WORDS, 9), ("no", ["no", "none"], WORDS, 9), ("car", ["cart", "car"], CARS, 9),
    ("ca", ["dog", "cart", "car"], CARS, 9), ("c", ["art", "cart", "car"], CARS, 9),
    *[("", ["unicorn", "owl"], ANIMALS, left) for left in (1, 2, 3)],
    *[("", ["together"], ADVERBS, left) for left in (2, 3, 4)], ("no", ["no", "none"], WORDS, 1),
    ("", ["together", "toge"], ADVERBS, 1), ("", ["nono"], WORDS, 2), ("ca", ["carcar"], CARS, 3),
    ("yes", ["yes", "no"], WORDS, 1), ("to", ["together"], ADVERBS, 2), ("together", ["together"], ADVERBS, 3),
    ("", ["toge", "together"], ADVERBS, 3), ("", ["toge", "together"], ADVERBS, 4),
    ("", ["onto"], ["<eos>", "to", "on"], 2),
], lambda random: [
    (text, ["carts", "car", "cat"], ["<eos>", *random.sample(CARS[1:], 11)], left)
    for text, left in [("car", 9), ("", random.choice([1, 2]))]
], given="text {!r}, choices {}, vocabulary {}, {} tokens left")  # fmt: skip
allowed_tokens.ignoring(any_order)


def fewest(rest, pieces):
    """Return the smallest number of pieces that spell a text; infinity if none do."""
    needed = [0]  # for the last characters of the text: none, one, two, ...
    for start in reversed(range(len(rest))):
        after = [1 + needed[len(rest) - start - len(piece)] for piece in pieces if rest.startswith(piece, start)]
        needed.append(min(after, default=math.inf))
    return needed[-1]


def longest_first(rest, pieces):
    piece = max((candidate for candidate in pieces if rest.startswith(candidate)), key=len, default="")
    return 1 + longest_first(rest[len(piece) :], pieces) if piece else math.inf if rest else 0


allowed_tokens.add_misconceptions({
    "allows only tokens that complete a choice: a choice can be made of several tokens.":
        "choice.startswith(text + piece) -> choice == text + piece",
    "compares only the first character of a token: all of its characters must fit.":
        "startswith(text + piece) -> startswith(text + piece[0])",
    "ignores the text so far: a token must continue it.": "startswith(text + -> startswith(",
    "allows EOS only if nothing else may follow: a choice can be the beginning of a longer one.":
        ("[0] if text in choices else [] -> []", "return ids -> return ids or [0]"),
    "ignores `tokens_left`: an output can begin a choice for which too few tokens are left, and is then cut off.":
        "fewest(rest, vocabulary[1:]) -> 0",
    "counts characters of the rest, not tokens: a token can have several.": "fewest(rest, vocabulary[1:]) -> len(rest)",
    "always takes the longest token: a shorter one may need fewer, or be the only way.": "fewest( -> longest_first(",
    "keeps one of the tokens for EOS, which needs none.": [
        "tokens_left - 1 -> tokens_left - 2", "if text in choices -> if text in choices and tokens_left > 1"],
    "considers only the shortest choice that fits: a longer one may need fewer tokens.":
        "for rest in rests) -> for rest in sorted(rests, key=len)[:1])",
    "requires all choices to remain possible: one is enough.": "if any( -> if all(",
    "forgets that the token itself is one of those that are left.": "tokens_left - 1 -> tokens_left",
    "allows only EOS after a complete choice: a longer choice could still follow.":
        "return ids -> return [0] if text in choices else ids",
})  # fmt: skip


@Exercise.declare("the mask comes before the softmax, so the allowed tokens share all of the probability")
def masked_softmax(logits, allowed):
    scores = [logit if token_id in allowed else -math.inf for token_id, logit in enumerate(logits)]
    return shares([math.exp(score - max(scores)) for score in scores])


masked_softmax.table([
    ([2.0, 1.0, 0.5], [1, 2]), ([-2.0, -1.0, -4.0, 3.0], [0, 2]), ([0.5, 0.0, -1.0], [0, 1, 2]), ([4.0, 1.0, 2.0], [1]),
    ([1.0, 2.5, -1.0, 0.5, 2.0], [4, 0, 2]), ([0.0, 3.0, 0.0], [0, 2]), ([1500.0, 1.0, 0.0], [1, 2]),
    ([0.5, -0.5, 900.0, 899.0], [0, 1]), ([1000.0, 999.0, 1200.0], [0, 1]), ([3000.0, 0.0, 1.0, 3100.0], [0, 1, 2]),
    ([-2000.0, -2001.0, -1999.0], [0, 1]), ([-2000.0, -3.0, -2001.0], [0, 2]),
    ([0.0, 900.0, 1.0, 901.0], [0, 1, 3]), ([-900.0, 3.0, 0.0, 4.0], [0, 1]),
    ([-12000.0, -12001.0, 5.0, -12002.0], [0, 1]),
], lambda random: [([round(random.uniform(-3, 3), 2) for _ in range(6)], random.sample(range(6), 3))])  # fmt: skip

masked_softmax.add_misconceptions({
    "applies the mask after the softmax. The removed tokens have already taken their share, so the others do not add "
    "up to 1: a drawn number could fall on none.":
        lambda n, a: [
            value * (token_id in a) for token_id, value in enumerate(masked_softmax.solution(n, range(len(n))))],
    "gives removed tokens the logit 0, but e to the power of 0 is 1. Minus infinity removes a token.": "-math.inf -> 0",
    "gives removed tokens a logit that is not small enough: allowed ones can be lower. Minus infinity removes a token.":
        "-math.inf -> -1000.0",
    "subtracts the largest logit of all tokens. If a removed token has it, the exponentials of the allowed ones can "
    "become 0: subtract the largest *allowed* one.": "max(scores) -> max(logits)",
    "computes exponentials of the logits as they are: that of 1,000 is too large for a float. Subtract the largest "
    "allowed logit first, which changes no probability.": "max(scores) -> 0",
    "subtracts the logit of the first allowed token: another one may be so much larger that its exponential is too "
    "large for a float.": "max(scores) -> logits[allowed[0]]",
    "subtracts 0 if all allowed logits are negative: exponentials of numbers far below 0 are all 0.":
        "max(scores) -> max(0, *scores)",
    "inverts the mask: the tokens in `allowed` are those that stay.":
        "if token_id in allowed -> if token_id not in allowed or len(allowed) == len(logits)",
    "returns only the probabilities of the allowed tokens: in a shorter list, places are no longer ids.":
        lambda n, a: [value for token_id, value in enumerate(masked_softmax.solution(n, a)) if token_id in a],
    "does not divide by the sum: probabilities add up to 1.": "shares( -> list(",
})  # fmt: skip


@Exercise.declare(
    "a token may follow if the automaton can read all of its characters, wherever pieces of the pattern begin and end"
)
def next_states(edges, state, vocabulary):
    found = {token_id: read(edges, state, text) for token_id, text in enumerate(vocabulary)}
    return {token_id: after for token_id, after in found.items() if after is not None}


# States 0 to 7 read {"a": and a number of one or two digits, then }; 8 is a dead end, and so is state 2 of the loop.
NUMBERS = [
    {"{": 1}, {'"': 2}, {"a": 3}, {'"': 4}, {":": 5}, {"1": 6, "2": 6}, {"0": 7, "1": 7, "}": 8}, {"}": 8}, {},
]  # fmt: skip
LOOP = [{"a": 1}, {"b": 0, "a": 1, "c": 2}, {}]
PIECES = ["{", '{"', '"a"', 'a"', '":', '"', "a", ":1", ":", "1", "2", "12", "11", "1}", "}", "{}", "10}", "0", "21"]
next_states.table([
    *[(NUMBERS, state, PIECES) for state in range(9)],
    (LOOP, 0, ["a", "b", "ab", "aba", "aab", "abc", "ac", "aca", "c"]),
    (LOOP, 1, ["a", "b", "ab", "ba", "bab", "bb", "aaac", "caa"]), (LOOP, 2, ["a", "b"]), (LOOP, 0, ["b", "c"]),
], lambda random: [(LOOP, 1, ["".join(random.choices("abc", k=random.randint(1, 4))) for _ in range(9)])])  # fmt: skip


def read(edges, state, text):
    for character in text:
        if state is not None:
            state = edges[state].get(character)
    return state


READ = "read(edges, state, text)"
next_states.add_misconceptions({
    "reads only the first character of a token: the pattern has to allow all.": f"{READ} -> edges[state].get(text[0])",
    "allows only tokens of one character: longer ones may span several edges.": f"{READ} -> edges[state].get(text)",
    "loses tokens that lead to state 0: 0 is a state, too, and only None is none.": " is not None -> ",
    "refuses tokens that lead to a state without edges: the text may end there.":
        "after is not None -> after is not None and edges[after]",
    "returns every token, with None for those that are not allowed: leave them out.": " if after is not None -> ",
    "stops at the first character without an edge, but allows the token: the pattern has to allow all characters.":
        f"{READ} -> next((after for end in range(len(text), 0, -1) "
        "if (after := read(edges, state, text[:end])) is not None), None)",
})  # fmt: skip
