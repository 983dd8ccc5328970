"""Answers to the exercises of lesson 11."""

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
def with_torch(probabilities, p):
    best = torch.tensor(probabilities).sort(descending=True)
    better = best.values.cumsum(0) - best.values
    return best.indices[better < p].tolist()


ALMOST["top_p"] |= {
    "changed its argument: `probabilities`": lambda ids, probabilities, p: probabilities.sort() or ids,
    "should be a list, but is a tensor": lambda ids, *_: torch.tensor(ids),
}


@right("draw")
def with_searchsorted(weights, number):
    ends = torch.tensor(weights, dtype=torch.float64).cumsum(0)
    return torch.searchsorted(ends / ends[-1], number, right=True)


ALMOST["draw"] |= {"should be an int, but is a list": lambda token, *_: [token]}
