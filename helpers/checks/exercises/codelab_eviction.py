"""The eviction contest: one function, judged four times, by the four rules in the task's text. Any one may be right.

A grade runs traces of the same kind with other texts, lengths and orders.
"""

from collections.abc import Callable

from ..eviction import SIGNATURE, baselines, computed_tokens, distance_closed, standing
from ..exercise import JudgedExercise, Passed

LEAST_CLOSED = 1 / 3  # of the distance from LRU to the bound, on "assistants"
MOST_ABOVE_LRU = 1.08  # on "chats"


def _judge(trace: str, failing: Callable[[int, int], str | None]) -> Callable:
    def judge(evict: Callable, seed: int) -> str | Passed:
        tokens = computed_tokens(evict, trace, seed)
        wrong, stands = failing(tokens, seed), standing(tokens, trace, seed)
        return f"{wrong}. Your function: {stands}." if wrong else Passed(f"Your function: {stands}.")

    return judge


def _at_least_fifo(tokens: int, seed: int) -> str | None:
    """Compare with FIFO."""
    return (
        "computes no fewer prompt tokens than FIFO, which evicts the block that was computed first. Such a block may "
        "be needed by every second request"
        if tokens >= baselines("assistants", seed)["FIFO"]
        else None
    )


def _at_least_lru(tokens: int, seed: int) -> str | None:
    """Compare with LRU."""
    return (
        "computes no fewer prompt tokens than LRU. Look at what LRU keeps: which of these blocks will no request need "
        "again, however recent they are"
        if tokens >= baselines("assistants", seed)["LRU"]
        else None
    )


def _far_from_the_bound(tokens: int, seed: int) -> str | None:
    """Compare with the distance from LRU to Belady's bound."""
    closed = distance_closed(tokens, "assistants", seed)
    return "closes less than a third of the distance from LRU to the bound" if closed < LEAST_CLOSED else None


def _costs_the_chats(tokens: int, seed: int) -> str | None:
    """Compare with LRU where the newest blocks are those that the next request needs."""
    limit = MOST_ABOVE_LRU * baselines("chats", seed)["LRU"]
    return (
        f"computes more than {MOST_ABOVE_LRU - 1:.0%} above LRU on the chats. Their newest blocks have been used once, "
        "and the next turn needs them"
        if tokens > limit
        else None
    )


evict, evict_lru, evict_bound, evict_chats = (
    JudgedExercise(SIGNATURE, idea, _judge(trace, failing), name)
    for name, trace, failing, idea in [
        (
            "evict",
            "assistants",
            _at_least_fifo,
            "every choice is possible, and popular blocks stay longer than with FIFO",
        ),
        ("evict_lru", "assistants", _at_least_lru, "what will be used again tells more than what was used last"),
        ("evict_bound", "assistants", _far_from_the_bound, "one-off questions no longer evict the system prompts"),
        ("evict_chats", "chats", _costs_the_chats, "the conversations keep the blocks of their last turns"),
    ]
)
