"""The design memo: three numbers, judged by what becomes of the requests of a trace. Any numbers may be right.

A grade runs another trace of the same kind. The memo's text is graded by the instructor.
"""

from collections.abc import Callable

from ..capacity import GAP, REQUESTS, TTFT, Counts, in_words, run_design
from ..comparing import kind
from ..exercise import JudgedExercise, Passed, Wrong

SIGNATURE = "design()"
MOST_STALLED = 0.05
LEAST_SERVED, LEAST_IN_TIME = 0.5, 0.7  # in time; a design that refuses nearly everything keeps its gaps easily
MANY_RECOMPUTED = 4000  # tokens, about a fifth of all prompts


def _counts(design: Callable, seed: int) -> Counts:
    numbers = design()
    if not isinstance(numbers, list | tuple) or len(numbers) != 3:
        raise Wrong(f"should return three ints, rows, tokens and max_queue, but returned {kind(numbers)}.")
    return run_design(*numbers, seed)


def keeps_the_gaps(design: Callable, seed: int) -> str | Passed:
    """Judge the requests that stall."""
    counts = _counts(design, seed)
    if counts.in_time < LEAST_SERVED * REQUESTS and counts.stalled <= MOST_STALLED * REQUESTS:
        return _too_few(counts, LEAST_SERVED)
    if counts.stalled <= MOST_STALLED * REQUESTS:
        return Passed(f"On this trace: {in_words(counts)}.")
    return (
        f"lets {counts.stalled} of {REQUESTS} requests stall for more than {GAP} units between two tokens; at most "
        f"{MOST_STALLED:.0%} are allowed. What does an iteration with a full budget cost, and what does a preempted "
        "request wait for?"
    )


def serves_in_time(design: Callable, seed: int) -> str | Passed:
    """Judge the requests that meet both limits."""
    counts = _counts(design, seed)
    if counts.in_time >= LEAST_IN_TIME * REQUESTS:
        return Passed(f"On this trace: {in_words(counts)}.")
    return _too_few(counts, LEAST_IN_TIME)


def _too_few(counts: Counts, least: float) -> str:
    worst = max((counts.late, "late"), (counts.refused, "refused"), (counts.stalled, "stalled"))[1]
    if worst != "refused" and counts.recomputed > MANY_RECOMPUTED:
        worst = "preempted"
    why = {
        "late": f"wait for more than {TTFT} units for their first token: where do they wait, and for how long",
        "refused": "are refused: how many rows does the memory have room for, and how many requests can wait in time",
        "stalled": f"stall for more than {GAP} units between two tokens: what does such an iteration compute",
        "preempted": f"lose time to preemption, which has {counts.recomputed:,} tokens computed again: do so many "
        "rows fit into the memory when several long prompts run at once",
    }
    return (
        f"serves {counts.in_time} of {REQUESTS} requests in time, where {least:.0%} are asked for. Most of the "
        f"others {why[worst]}? On this trace: {in_words(counts)}."
    )


design, design_in_time = (
    JudgedExercise(SIGNATURE, idea, judge, name)
    for name, idea, judge in [
        ("design", "an iteration is short enough for the requests that decode", keeps_the_gaps),
        ("design_in_time", "the rows fit the memory, and no request waits that would be late", serves_in_time),
    ]
)
