"""Lesson 11, sampling: temperature, the tail, and a draw."""

import math
from itertools import accumulate

from ..exercise import Exercise

softmax = Exercise("softmax(logits, temperature)", "a temperature changes the differences of logits before the softmax")


softmax.table(
    [
        ([2.0, 1.0, 0.5], 1.0), ([2.0, 1.0, 0.5], 0.5), ([0.0, 3.0, -1.5, 3.5], 2.0), ([-4.0, -2.0], 0.7),
        ([-1.0, -0.5, -3.0], 1.5), ([-2000.0, -2001.0, -1999.5], 1.0), ([-2000.0, -2001.0, -1999.5], 2.0),
        ([0.0, 0.0, 0.0, 0.0], 0.3), ([1000.0, 999.0, 990.0], 1.0), ([800.0, 803.0], 0.8),
        ([1000.0, 999.0, 990.0], 0.5), ([3000.0, 0.0, 1.0], 0.5), ([-1500.0, 1500.0], 4.0),
    ],
    lambda random: [([round(random.uniform(-3, 3), 2) for _ in range(6)], 1.5)],
)  # fmt: skip


def shares(weights):
    return [weight / sum(weights) for weight in weights]


@softmax.reference
def of_differences(logits, temperature, score=lambda x, t: x / t, largest=max, finish=shares):
    """Compute a softmax, with replaceable parts: the score of a logit, what is subtracted, and the last step."""
    scores = [score(logit, temperature) for logit in logits]
    return finish([math.exp(one - largest(scores)) for one in scores])


def after(change):
    return lambda logits, temperature: change(of_differences(logits, 1.0), temperature)


def log_softmax(logits, temperature):
    weights = of_differences(logits, temperature, finish=list)
    return [(logit - max(logits)) / temperature - math.log(sum(weights)) for logit in logits]


softmax.add_misconceptions({
    "multiplies the logits by the temperature: a high temperature must make tokens more alike.":
        lambda n, t: of_differences(n, t, score=lambda x, t: x * t),
    "divides the probabilities by the temperature, after the softmax: they no longer add up to 1.":
        after(lambda values, t: [value / t for value in values]),
    "does not divide by the sum: probabilities add up to 1.": lambda n, t: of_differences(n, t, finish=list),
    "gives the best token the probability 1: that is temperature 0.":
        lambda n, t: [float(logit == max(n)) for logit in n],
    "divides the logits by their sum: without an exponential, a negative logit gets a negative share.":
        lambda n, t: shares([logit / t for logit in n]),
    "computes exponentials of the logits as they are. That of 1,000 is too large for a float: subtract the largest "
    "logit first, which changes no probability.": lambda n, t: of_differences(n, t, largest=lambda scores: 0),
    "raises 2 instead of e to the power of each logit.":
        lambda n, t: of_differences([logit * math.log(2) for logit in n], t),
})  # fmt: skip
for _logarithms in (lambda n, t: [math.log(value) for value in of_differences(n, t)], log_softmax):
    softmax.misconception("returns logarithms of probabilities: the task asks for the probabilities.", _logarithms)
softmax.misconception(
    "returns the same at any temperature. Dividing all weights by it, or subtracting it from all logits, changes no "
    "probability: divide the logits.",
    after(lambda values, t: values),
)
softmax.misconception(
    "divides the logits by the temperature, but not the largest one that it subtracts. At a low temperature, their "
    "difference can be far above 0, and its exponential too large for a float.",
    lambda n, t: of_differences(n, t, largest=lambda scores: max(n)),
)
for _limited in (lambda scores: max(0, *scores), lambda scores: max(map(abs, scores))):
    softmax.misconception(
        "subtracts more than the largest logit if all are negative: exponentials of numbers far below 0 are all 0.",
        lambda n, t, limited=_limited: of_differences(n, t, largest=limited),
    )
softmax.misconception(
    "does not divide by the sum: probabilities add up to 1.",
    lambda n, t: of_differences(n, t, largest=lambda scores: 0, finish=list),
)

top_p = Exercise("top_p(probabilities, p)", "the token with which the sum reaches p is the last one that is kept")


@top_p.cases
def _(random):
    parts = random.sample([32, 16, 8, 4, 2, 1.25, 0.75], 7)
    for sixty_fourths, p in [
        ([4, 32, 16, 12], 0.6), ([4, 32, 16, 12], 0.75), ([4, 32, 16, 12], 0.3), ([4, 32, 16, 12], 0.5),
        ([13, 14, 12, 15, 10], 0.4), ([13, 14, 12, 15, 10], 0.125), ([2, 61, 1], 0.9), ([9, 10, 11, 8, 12, 14], 0.5),
        ([9, 10, 11, 8, 12, 14], 0.96875), ([48, 16], 0.75), ([24, 40], 1.0), (parts, 0.8),
    ]:  # fmt: skip
        probabilities = [one / 64 for one in sixty_fourths]
        yield (probabilities, p), f"probabilities {probabilities}, p {p}"


@top_p.ignoring
def order(result, arguments):
    return sorted(result) if isinstance(result, list) else result


@top_p.reference
def until_the_sum_reaches(probabilities, p, in_order=lambda values: sorted(values, reverse=True)):
    """Keep tokens, in a replaceable order. (No two tokens have the same probability.)"""
    total, ids = 0.0, []
    for value in in_order(probabilities):
        if total < p:
            ids.append(probabilities.index(value))
            total += value
    return ids


def before_it_exceeds(probabilities, p):
    kept = until_the_sum_reaches(probabilities, p)
    return kept if sum(probabilities[one] for one in kept) == p else kept[:-1]


def and_one_more(probabilities, p, always=True):
    kept = until_the_sum_reaches(probabilities, p)
    others = sorted(set(range(len(probabilities))) - set(kept), key=probabilities.__getitem__)
    return kept + others[-1:] * (always or sum(probabilities[one] for one in kept) == p)


top_p.add_misconceptions({
    "leaves out the token with which the sum reaches p. The kept tokens must have *at least* p together: after a "
    "certain token, yours would keep none.": before_it_exceeds,
    "always leaves out the last token that belongs to the set: the kept tokens must have at least p together.":
        lambda values, p: until_the_sum_reaches(values, p)[:-1],
    "keeps a token too many: the set is complete as soon as the sum is at least p.": and_one_more,
    "keeps a token too many where the sum is exactly p: at least p is enough.":
        lambda values, p: and_one_more(values, p, always=False),
    "keeps the tokens whose own probability is at least p: it is their sum that counts.":
        lambda values, p: [one for one, value in enumerate(values) if value >= p],
    "compares each token with the best one: that is min-p.":
        lambda values, p: [one for one, value in enumerate(values) if value >= p * max(values)],
    "adds up in the order of ids: the best tokens come first.":
        lambda values, p: until_the_sum_reaches(values, p, in_order=list),
    "adds up from the worst token: the best ones come first.":
        lambda values, p: until_the_sum_reaches(values, p, in_order=sorted),
    "returns the removed tokens: the task asks for those that are kept.":
        lambda values, p: sorted(set(range(len(values))) - set(until_the_sum_reaches(values, p))),
    "returns places in the sorted list: the task asks for ids, which are places in `probabilities`.":
        lambda values, p: list(range(len(until_the_sum_reaches(values, p)))),
    "returns probabilities: the task asks for ids.":
        lambda values, p: [values[one] for one in until_the_sum_reaches(values, p)],
    "returns how many tokens are kept: the task asks which.": lambda values, p: len(until_the_sum_reaches(values, p)),
    "keeps only the best token, whatever p is.": lambda values, p: [values.index(max(values))],
    "keeps all tokens, whatever p is.": lambda values, p: list(range(len(values))),
})  # fmt: skip

draw = Exercise("draw(weights, number)", "a number falls on a token as often as its share of all weights says")


draw.table(
    [
        ([0.5, 0.25, 0.125], 0.5), ([0.5, 0.25, 0.125], 0.9), ([0.25, 0.125, 0.125], 0.6), ([2.0, 4.0, 2.0], 0.5),
        ([2.0, 4.0, 2.0], 0.125), ([1.0, 2.0, 1.0], 0.25), ([1.0, 2.0, 1.0], 0.75), ([0.0, 0.0, 0.25, 0.25], 0.0),
        ([0.0, 1.0, 0.0, 3.0], 0.0), ([3.0, 0.0, 1.0], 0.99), ([0.125, 0.5, 0.25], 0.0), ([0.125, 0.5, 0.25], 0.3),
    ],
    lambda random: [([random.randint(1, 9) / 4 for _ in range(5)], random.random())],
)  # fmt: skip


@draw.reference
def place_of(weights, number, total=sum, passed=lambda end, mark: end <= mark, otherwise=lambda weights: None):
    """Draw, with replaceable parts: the whole, which ends the number has passed, and what if it passes all."""
    for place, end in enumerate(accumulate(weights)):
        if not passed(end, number * total(weights)):
            return place
    return otherwise(weights)


for _otherwise in (lambda w: None, lambda w: len(w) - 1, len, lambda w: 0):
    draw.misconception(
        "compares the number with sums of weights that do not add up to 1. Divide by their sum first: after top-p, the "
        "weights add up to less, and a number could fall on no token.",
        lambda w, u, otherwise=_otherwise: place_of(w, u, total=lambda w: 1.0, otherwise=otherwise),
    )
draw.add_misconceptions({
    "gives a number at which two intervals meet to the first of them. Then 0 draws a token with the weight 0: an "
    "interval contains its lower end, but not its upper one.":
        lambda w, u: place_of(w, u, passed=lambda end, mark: end < mark),
    "computes a softmax of the weights: they are weights already, as after a softmax and top-p.":
        lambda w, u: place_of([math.exp(weight) for weight in w], u),
    "takes the largest weight: a draw gives the others their share, too.": lambda w, u: w.index(max(w)),
    "gives all intervals the same width: it is the token's share of all weights.": lambda w, u: int(u * len(w)),
    "looks for a single weight above the number: it is the weights so far that are added up.":
        lambda w, u: next((place for place, weight in enumerate(w) if weight > u), None),
    "lays the tokens side by side from the last one: the order is that of the ids, so that a number always draws the "
    "same token.": lambda w, u: len(w) - 1 - place_of(w[::-1], u),
    "sorts the weights and returns a place in the sorted list: the task asks for an id.":
        lambda w, u: place_of(sorted(w, reverse=True), u),
    "returns a weight: the task asks for the token's id.": lambda w, u: w[place_of(w, u)],
    "counts tokens from 1: the first id is 0.": lambda w, u: place_of(w, u) + 1,
})  # fmt: skip
