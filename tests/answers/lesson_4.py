"""Answers to lesson 4's exercises."""

import math

import numpy as np

from answers import ALMOST, RIGHT, WRONG, right, solutions
from helpers.checks.edits import edited

in_classes = solutions.longest_first

RIGHT["longest_first"]["by_the_rounded_third"] = lambda waiting: sorted(
    waiting, key=lambda one: -math.ceil(3 * one.max_tokens / max(each.max_tokens for each in waiting))
)


@right("longest_first")
def with_a_stable_argsort(waiting):
    limits = np.array([sequence.max_tokens for sequence in waiting], dtype=float)
    return [waiting[place] for place in np.argsort(-np.ceil(3 * limits / max([1, *limits])), kind="stable")]


WRONG["longest_first"] |= {
    "changes the order of arrival": lambda queue: in_classes(sorted(queue, key=lambda one: one.prompt_tokens)),
    "which is in a higher third of 100": edited(
        in_classes,
        "thirds(one.max_tokens, largest) -> ((4 * one.max_tokens > largest) + (4 * one.max_tokens > 3 * largest))",
    ),
    "max() arg is an empty sequence (given": edited(in_classes, ", default=0 -> "),
    "changes the order of arrival within a class: ": lambda queue: in_classes(
        sorted(queue, key=lambda one: one.request_id)
    ),
    "'<' not supported": lambda queue: [one for _, one in sorted((-one.max_tokens // 31, one) for one in queue)],
}
ALMOST["longest_first"] |= {
    "returns the list that it was given": lambda right, queue: queue if right == queue else right,
    "returns a 0 times": lambda right, queue: [one for one in right if one.max_tokens > 15],
    "should be a sequence, but is a str": lambda right, queue: [one.request_id for one in right],
    "changed its argument: `waiting`, place 0": lambda right, queue: queue.sort(key=right.index) or queue,
}


@right("most_urgent")
def one_after_the_other(waiting, aging):
    best = None
    for sequence in waiting:
        urgency = sequence.priority - int(sequence.waited / aging), -sequence.waited
        if best is None or urgency < best[0]:
            best = urgency, sequence
    return best and best[1]


@right("most_urgent")
def sorted_twice(waiting, aging):
    queue = sorted(waiting, key=lambda one: one.waited, reverse=True)
    queue.sort(key=lambda one: one.priority - one.waited // aging)
    return queue[0] if queue else None


def waits_used_up(waiting, aging):
    best = min(waiting, key=lambda one: (one.priority - one.waited // aging, -one.waited), default=None)
    for sequence in waiting:
        sequence.waited %= aging
    return best


def by(key):
    return lambda waiting, aging: min(waiting, key=lambda one: key(one, one.waited // aging), default=None)


WRONG["most_urgent"] |= {
    "picks a, which counts as 2, and b counts as 0": by(lambda one, levels: (one.priority > 2, -one.priority)),
    "Among equally urgent requests": by(lambda one, levels: (one.priority - levels, one.request_id)),
    "min() arg is an empty sequence (given": lambda waiting, aging: min(waiting, key=lambda one: one.priority),
    "changed its argument: a sequence in `waiting`": waits_used_up,
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
