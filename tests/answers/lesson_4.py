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
    return lambda waiting, aging: min(
        waiting, key=lambda sequence: key(sequence, sequence.waited // aging), default=None
    )


WRONG["most_urgent"] |= {
    "picks a, which counts as 2, and b counts as 0": by(
        lambda sequence, levels: (sequence.priority > 2, -sequence.priority)
    ),
    "Among equally urgent requests": by(lambda sequence, levels: (sequence.priority - levels, sequence.request_id)),
}
ALMOST["most_urgent"] |= {
    "changed its argument: `waiting` is": lambda best, waiting, _: best and (waiting.remove(best) or best)
}


@right("admitted")
def by_the_first_that_does_not_fit(running, waiting, rows, tokens):
    needed = np.cumsum([sequence.num_uncomputed_tokens for sequence in waiting], dtype=int) + len(running)
    count = min(rows - len(running), int(np.searchsorted(needed, tokens, side="right")))
    return [sequence.request_id for sequence in waiting[:count]]


ALMOST["admitted"] |= {
    "but is a Sequence": lambda names, running, waiting, *_: waiting[: len(names)],
    "should be a list, but is a set": lambda names, *_: set(names),
}
