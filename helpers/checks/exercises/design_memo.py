"""The design memo: three numbers, judged by what becomes of the requests of a trace. Any numbers may be right.

A grade runs another trace of the same kind. The memo's text is graded by the instructor.
"""

from collections.abc import Callable

from ..capacity import GAP, REQUESTS, TTFT, Counts, in_words, run_design
from ..comparing import kind
from ..exercise import JudgedExercise, Passed, Wrong

SIGNATURE = "design()"
MOST_STALLED = 0.05
LEAST_IN_TIME = 0.7


def _counts(design: Callable, seed: int) -> Counts:
    numbers = design()
    if not isinstance(numbers, list | tuple) or len(numbers) != 3:
        raise Wrong(f"should return three ints, rows, tokens and max_queue, but returned {kind(numbers)}.")
    return run_design(*numbers, seed)


def keeps_the_gaps(design: Callable, seed: int) -> str | Passed:
    """Judge the requests that stall."""
    counts = _counts(design, seed)
    if counts.stalled <= MOST_STALLED * REQUESTS:
        return Passed(f"On this trace: {in_words(counts)}.")
    return (
        f"lets {counts.stalled} of {REQUESTS} requests stall for more than {GAP} units between two tokens; at most "
        f"{MOST_STALLED:.0%} are allowed. What does an iteration with a full budget cost, and what does a preempted "
        "request wait for?"
    )


def serves_in_time(design: Callable, seed: int) -> str | Passed:
    """Judge the requests that meet both limits, and name what most of the others suffer from."""
    counts = _counts(design, seed)
    if counts.in_time >= LEAST_IN_TIME * REQUESTS:
        return Passed(f"On this trace: {in_words(counts)}.")
    worst = max((counts.late, "late"), (counts.refused, "refused"), (counts.stalled, "stalled"))[1]
    why = {
        "late": f"wait for more than {TTFT} units for their first token: where do they wait, and for how long",
        "refused": "are refused: how many rows does the memory have room for, and how many requests can wait in time",
        "stalled": f"stall for more than {GAP} units between two tokens: what does such an iteration compute",
    }
    return (
        f"serves {counts.in_time} of {REQUESTS} requests in time, where {LEAST_IN_TIME:.0%} are asked for. Most of the "
        f"others {why[worst]}? On this trace: {in_words(counts)}."
    )


design, design_in_time = (
    JudgedExercise(SIGNATURE, idea, judge, name)
    for name, idea, judge in [
        ("design", "an iteration is short enough for the requests that decode", keeps_the_gaps),
        ("design_in_time", "the rows fit the memory, and no request waits that would be late", serves_in_time),
    ]
)
