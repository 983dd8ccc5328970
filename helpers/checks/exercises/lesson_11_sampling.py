"""Lesson 11, sampling: temperature, the tail, and a draw."""

import math
from itertools import accumulate

from ..exercise import Exercise


@Exercise.declare("a temperature changes the differences of logits before the softmax")
def softmax(logits, temperature):
    scores = [logit / temperature for logit in logits]
    return shares([math.exp(score - max(scores)) for score in scores])


softmax.table([
    ([2.0, 1.0, 0.5], 1.0), ([2.0, 1.0, 0.5], 0.5), ([0.0, 3.0, -1.5, 3.5], 2.0), ([-4.0, -2.0], 0.7),
    ([-1.0, -0.5, -3.0], 1.5), ([-2000.0, -2001.0, -1999.5], 1.0), ([-2000.0, -2001.0, -1999.5], 2.0),
    ([0.0, 0.0, 0.0, 0.0], 0.3), ([1000.0, 999.0, 990.0], 1.0), ([800.0, 803.0], 0.8), ([1000.0, 999.0, 990.0], 0.5),
    ([3000.0, 0.0, 1.0], 0.5), ([-1500.0, 1500.0, 1498.0], 4.0),
], lambda random: [([round(random.uniform(-3, 3), 2) for _ in range(6)], 1.5)])  # fmt: skip


def shares(weights):
    return [weight / sum(weights) for weight in weights]


softmax.add_misconceptions({
    "multiplies the logits by the temperature: a high temperature must make tokens more alike.": "/ -> *",
    "divides the probabilities by the temperature, after the softmax: they no longer add up to 1.":
        lambda n, t: [value / t for value in softmax.solution(n, 1.0)],
    "does not divide by the sum: shares add up to 1.": ["shares( -> list(", ("shares( -> list(", "max(scores) -> 0")],
    "computes exponentials of the logits as they are. That of 1,000 is too large for a float: subtract the largest "
    "logit first, which changes no probability.": "max(scores) -> 0",
    "returns the same at any temperature. Dividing all weights by it, or subtracting it from all logits, changes no "
    "probability: divide the logits.": " / temperature -> ",
    "divides the logits by the temperature, but not the largest one that it subtracts. At a low temperature, their "
    "difference can be far above 0, and its exponential too large for a float.": "max(scores) -> max(logits)",
    "subtracts more than the largest logit if all are negative: exponentials of numbers far below 0 are all 0.":
        ["max(scores) -> max(0, *scores)", "max(scores) -> max(map(abs, scores))"],
})  # fmt: skip


@Exercise.declare("the token with which the sum reaches p is the last one that is kept")
def top_p(probabilities, p):
    total, ids = 0.0, []  # no two tokens have the same probability
    for value in sorted(probabilities, reverse=True):
        if total < p:
            ids.append(probabilities.index(value))
            total += value
    return ids


top_p.table([
    ([count / 64 for count in sixty_fourths], p) for sixty_fourths, p in [
        ([4, 32, 16, 12], 0.6), ([4, 32, 16, 12], 0.75), ([4, 32, 16, 12], 0.3), ([4, 32, 16, 12], 0.5),
        ([13, 14, 12, 15, 10], 0.4), ([13, 14, 12, 15, 10], 0.125), ([2, 61, 1], 0.9), ([48, 16], 0.75),
        ([9, 10, 11, 8, 12, 14], 0.5), ([9, 10, 11, 8, 12, 14], 0.96875), ([24, 40], 1.0),
    ]
], lambda random: [(random.sample([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.01953125, 0.01171875], 7), 0.8)])  # fmt: skip


@top_p.ignoring
def any_order(result, arguments):
    return sorted(result) if isinstance(result, list) else result


top_p.add_misconceptions({
    "leaves out the token with which the sum reaches p. The kept tokens must have *at least* p together: after a "
    "certain token, yours would keep none.": "return ids -> return ids if total == p else ids[:-1]",
    "keeps a token more where the sum is exactly p: it has reached p.": "total < p -> total <= p",
    "begins with the worst tokens: the best ones come first.": "reverse=True -> reverse=False",
    "returns probabilities: the task asks for ids.":
        "return ids -> return [probabilities[token_id] for token_id in ids]",
    "keeps a number of tokens that depends on p alone: a certain token needs no other, uncertain ones need many.": [
        f"total < p -> len(ids) < {count}" for count in ("round(p * len(probabilities))", "2", "3")],
    "keeps the tokens whose own probability is at least p: it is their sum that counts.": "total < p -> value >= p",
    "compares each token with the best one: that is min-p.": "total < p -> value >= p * max(probabilities)",
    "adds up in the order of ids: the best tokens come first.": "sorted(probabilities, reverse=True) -> probabilities",
    "returns places in the sorted list: the task asks for ids, which are places in `probabilities`.":
        "return ids -> return list(range(len(ids)))",
})  # fmt: skip


@Exercise.declare("a number falls on a token as often as its share of all weights says")
def draw(weights, number):
    total = sum(weights)
    for token_id, end in enumerate(accumulate(weights)):
        if end > number * total:
            return token_id
    return None


draw.table([
    ([0.5, 0.25, 0.125], 0.5), ([0.5, 0.25, 0.125], 0.9), ([0.25, 0.125, 0.125], 0.6), ([2.0, 4.0, 2.0], 0.5),
    ([2.0, 4.0, 2.0], 0.125), ([1.0, 2.0, 1.0], 0.25), ([1.0, 2.0, 1.0], 0.75), ([0.0, 0.0, 0.25, 0.25], 0.0),
    ([0.0, 1.0, 0.0, 3.0], 0.0), ([3.0, 0.0, 1.0], 0.99), ([0.125, 0.5, 0.25], 0.0), ([0.125, 0.5, 0.25], 0.3),
], lambda random: [([random.randint(1, 9) / 4 for _ in range(5)], random.random())])  # fmt: skip

draw.add_misconceptions({
    "compares the number with sums of weights that do not add up to 1. Divide by their sum first: after top-p, the "
    "weights add up to less, and a number could fall on no token.":
        [("sum(weights) -> 1.0", f"return None -> return {last}")
         for last in ("None", "len(weights) - 1", "len(weights)", "0")],
    "gives a number at which two intervals meet to the first of them. Then 0 draws a token with the weight 0: an "
    "interval contains its lower end, but not its upper one.": "end > number -> end >= number",
    "goes through the tokens from the best one: each has its interval, in the order of the ids.":
        "accumulate(weights) -> accumulate(sorted(weights, reverse=True))",
    "takes the token with the largest weight, whatever the number is.":
        "total = -> return weights.index(max(weights)); total =",
    "computes a softmax of the weights: they are weights already, as after a softmax and top-p.":
        "total = -> weights = list(map(math.exp, weights)); total =",
    "gives all intervals the same width: each is as wide as its token's share of all weights.":
        lambda weights, number: int(number * len(weights)),
    "looks for a single weight above the number: it is the sum of the weights so far that counts.":
        ("accumulate(weights) -> weights", "number * total -> number"),
})  # fmt: skip
