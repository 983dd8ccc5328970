"""Answers to the exercises of lesson 11."""

import math

import numpy as np
import torch

from answers import ALMOST, RIGHT, WRONG, right

RIGHT["softmax"] |= {
    "with_torch": lambda logits, temperature: (torch.tensor(logits) / temperature).softmax(dim=0).tolist(),
    "with_numpy_s_numbers": lambda logits, temperature: list(
        (weights := np.exp((np.array(logits) - max(logits)) / temperature)) / weights.sum()
    ),
}
ALMOST["softmax"] |= {
    "should be a list, but is a tensor": lambda result, *_: torch.tensor(result),
    "but is [0.6285317192117624, 0.23122389762214907]": lambda result, *_: result[:2],
}
WRONG["softmax"] |= {
    "changed its argument: `logits`": lambda logits, temperature: (
        logits.sort() or (torch.tensor(logits) / temperature).softmax(dim=0).tolist()
    ),
}


@right("top_p")
def with_a_loop(probabilities, p):
    ids = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    for count in range(1, len(ids) + 1):
        if sum(probabilities[token] for token in ids[:count]) >= p:
            return ids[:count]


@right("top_p")
def with_torch(probabilities, p):
    best = torch.tensor(probabilities).sort(descending=True)
    better = best.values.cumsum(0) - best.values
    return best.indices[better < p].tolist()


ALMOST["top_p"] |= {
    "changed its argument: `probabilities`": lambda ids, probabilities, p: probabilities.sort() or ids,
    "should be a list, but is a tensor": lambda ids, *_: torch.tensor(ids),
}


@right("draw")
def subtract_until_nothing_is_left(weights, number):
    left = number * sum(weights)
    for token, weight in enumerate(weights):
        if left < weight:
            return token
        left -= weight


@right("draw")
def with_searchsorted(weights, number):
    ends = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    return torch.searchsorted(ends / ends[-1], number, right=True)


ALMOST["draw"] |= {"should be an int, but is a list": lambda token, *_: [token]}


@right("allowed_tokens")
def by_trying_all_ways(text, choices, vocabulary, tokens_left):
    def can_become_a_choice(longer, left):
        if longer in choices:
            return True
        if left == 0 or not any(choice.startswith(longer) for choice in choices):
            return False
        return any(can_become_a_choice(longer + piece, left - 1) for piece in vocabulary[1:])

    allowed = [
        token for token in range(1, len(vocabulary)) if can_become_a_choice(text + vocabulary[token], tokens_left - 1)
    ]
    return [*allowed, 0] if text in choices else allowed


@right("allowed_tokens")
def backwards_from_the_ends(text, choices, vocabulary, tokens_left):
    """Grow the set of texts that can still become a choice, by one token at a time."""
    good = set(choices)
    for _ in range(tokens_left - 1):
        good |= {one.removesuffix(piece) for one in good for piece in vocabulary[1:] if one.endswith(piece)}
    return [
        token for token, piece in enumerate(vocabulary) if (text in choices if token == 0 else text + piece in good)
    ]


WRONG["allowed_tokens"] |= {
    "stopped with": lambda text, choices, vocabulary, _: [vocabulary.index(choice[len(text)]) for choice in choices],
}
ALMOST["allowed_tokens"] |= {"changed its argument: `choices`": lambda ids, text, choices, *_: choices.reverse() or ids}


@right("masked_softmax")
def with_infinities(logits, allowed):
    mask = torch.full((len(logits),), float("-inf"))
    mask[allowed] = 0.0
    return (torch.tensor(logits) + mask).softmax(dim=0).tolist()


@right("masked_softmax")
def only_the_allowed_ones(logits, allowed):
    largest = max(logits[token] for token in allowed)
    weights = {token: math.exp(logits[token] - largest) for token in allowed}
    return [weights.get(token, 0.0) / sum(weights.values()) for token in range(len(logits))]


ALMOST["masked_softmax"] |= {
    "changed its argument: `allowed`": lambda result, logits, allowed: allowed.clear() or result,
    "should be a list, but is a dict": lambda result, *_: dict(enumerate(result)),
}
