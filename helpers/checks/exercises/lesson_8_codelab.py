"""The eviction contest: one function, judged three times, by the three rules in the task's text. Any one may be right.

A grade also runs traces of the same kind with other texts, lengths and orders.
"""

from collections.abc import Callable
from statistics import mean

from ..eviction import SIGNATURE, baselines, computed_tokens, least_recent, standing
from ..exercise import JudgedExercise, Passed

LEAST_CLOSED = 1 / 3  # of the distance from LRU to the bound, on "assistants"
MOST_ABOVE_LRU = 1.08  # on "chats"


def too_new_or_too_old(evict: Callable, trace: str, seed: int) -> str:
    """Say which blocks a function loses, compared with LRU."""

    def age(function: Callable) -> float:
        ages = []

        def noting(blocks: list, now: int):
            chosen = function(blocks, now)
            ages.append(now - chosen.last_used)
            return chosen

        computed_tokens(noting, trace, seed)
        return mean(ages)

    mine, lru = age(evict), age(least_recent)
    told = f"It evicts blocks {mine:.0f} requests after their last use, on average, and LRU waits for {lru:.0f}"
    if mine < 0.9 * lru:
        return f"{told}: the newest blocks have been used once, and the next turn needs them"
    return f"{told}: what has not been used for long belongs to conversations that are over, and yours keeps it"


def _exercise(name: str, trace: str, idea: str, most: Callable[[int, int, int], float], wrong: str) -> JudgedExercise:
    """Return a task that allows as many prompt tokens as a function of FIFO, LRU and the bound says."""

    def judge(evict: Callable, seed: int) -> str | Passed:
        for one in sorted({0, seed}):  # what fails on the practice trace does not pass on another by luck
            tokens = computed_tokens(evict, trace, one)
            stands = f"Your function: {standing(tokens, trace, one)}."
            if tokens > most(*baselines(trace, one).values()):
                return f"{wrong}{too_new_or_too_old(evict, trace, one) if trace == 'chats' else ''}. {stands}"
        return Passed(stands)

    return JudgedExercise(SIGNATURE, idea, judge, name)


evict, evict_bound, evict_chats = (
    _exercise(*task)
    for task in [
        ("evict", "assistants", "every choice is possible, and popular blocks stay longer than with FIFO",
         lambda fifo, lru, bound: fifo - 1,
         "computes no fewer prompt tokens than FIFO, which evicts the block that was computed first. Such a block may "
         "be needed by every second request"),
        ("evict_bound", "assistants", "what will be used again tells more than what was used last",
         lambda fifo, lru, bound: lru - LEAST_CLOSED * (lru - bound),
         "closes less than a third of the distance from LRU to the bound. Look at what LRU keeps: which of these "
         "blocks will no request need again, however recent they are"),
        ("evict_chats", "chats", "the conversations keep the blocks of their last turns",
         lambda fifo, lru, bound: MOST_ABOVE_LRU * lru,
         f"computes more than {MOST_ABOVE_LRU - 1:.0%} above LRU on the chats. "),
    ]
)  # fmt: skip
