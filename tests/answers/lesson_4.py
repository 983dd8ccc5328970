"""Answers to lesson 4's exercises."""

import numpy as np

from answers import ALMOST, WRONG, right


@right("most_urgent")
def one_after_the_other(waiting, aging):
    best = None
    for sequence in waiting:
        urgency = sequence.priority - int(sequence.waited / aging), -sequence.waited
        if best is None or urgency < best[0]:
            best = urgency, sequence
    return best and best[1]


def by(key):
    return lambda waiting, aging: min(waiting, key=lambda one: key(one, one.waited // aging), default=None)


WRONG["most_urgent"] |= {
    "picks a, which counts as 2, and b counts as 0": by(lambda one, levels: (one.priority > 2, -one.priority)),
    "Among equally urgent requests": by(lambda one, levels: (one.priority - levels, one.request_id)),
}
ALMOST["most_urgent"] |= {
    "changed its argument: `waiting` is": lambda best, waiting, _: best and (waiting.remove(best) or best)
}


@right("admitted")
def by_the_first_that_does_not_fit(running, waiting, rows, tokens):
    needed = np.cumsum([one.num_uncomputed_tokens for one in waiting], dtype=int) + len(running)
    count = min(rows - len(running), int(np.searchsorted(needed, tokens, side="right")))
    return [one.request_id for one in waiting[:count]]


ALMOST["admitted"] |= {
    "but is a Sequence": lambda names, running, waiting, *_: waiting[: len(names)],
    "should be a list, but is a set": lambda names, *_: set(names),
}
