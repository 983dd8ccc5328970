"""The eviction contest: one function, judged three times, by the three rules in the task's text. Any one may be right.

A grade also runs traces of the same kind with other texts, lengths and orders.
"""

from collections.abc import Callable

from ..eviction import SIGNATURE, baselines, computed_tokens, standing
from ..exercise import JudgedExercise, Passed

LEAST_CLOSED = 1 / 3  # of the distance from LRU to the bound, on "assistants"
MOST_ABOVE_LRU = 1.08  # on "chats"


def _exercise(name: str, trace: str, idea: str, most: Callable[[int, int, int], float], wrong: str) -> JudgedExercise:
    """Return a task that allows as many prompt tokens as a function of FIFO, LRU and the bound says."""

    def judge(evict: Callable, seed: int) -> str | Passed:
        for trace_seed in sorted({0, seed}):  # what fails on the practice trace does not pass on another by luck
            tokens = computed_tokens(evict, trace, trace_seed)
            stands = f"Your function: {standing(tokens, trace, trace_seed)}."
            if tokens > most(*baselines(trace, trace_seed).values()):
                return f"{wrong}. {stands}"
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
         f"computes more than {MOST_ABOVE_LRU - 1:.0%} above LRU on the chats. There, the newest blocks have been used "
         "once, and the next turn needs them; old ones belong to conversations that are over"),
    ]
)  # fmt: skip
