"""The design memo: three numbers, judged by what becomes of the requests of a trace. Any numbers may be right.

A grade runs another trace of the same kind, too. The memo's text is graded by the instructor.
"""

from collections.abc import Callable
from functools import partial

from ..capacity import GAP, REQUESTS, TTFT, Counts, run_design
from ..comparing import kind
from ..exercise import JudgedExercise, Passed, Wrong

SIGNATURE = "design()"
MOST_STALLED = 0.05
LEAST_SERVED, LEAST_IN_TIME = 0.5, 0.7  # in time; a design that refuses nearly everything keeps its gaps easily
MANY_RECOMPUTED = 4000  # tokens, about a fifth of all prompts


def _judge(design: Callable, seed: int, least: float, most_stalled: float) -> Passed:
    """Pass a design with enough requests that meet both limits, and few that stall."""
    numbers = design()
    if not isinstance(numbers, list | tuple) or len(numbers) != 3:
        raise Wrong(f"should return three ints, rows, tokens and max_queue, but returned {kind(numbers)}.")
    for trace_seed in sorted({0, seed}):  # what fails on the practice trace does not pass on another by luck
        counts = run_design(*numbers, trace_seed)
        if counts.in_time < least * REQUESTS:
            raise Wrong(
                f"serves {counts.in_time} of {REQUESTS} requests in time, where {least:.0%} are asked for. Most of the "
                f"others {_why(counts)}? On this trace: {counts}."
            )
        if counts.stalled > most_stalled * REQUESTS:
            raise Wrong(
                f"lets {counts.stalled} of {REQUESTS} requests stall for more than {GAP} units between two tokens; at "
                f"most {most_stalled:.0%} are allowed. What does an iteration with a full budget cost, and what does a "
                "preempted request wait for?"
            )
    return Passed(f"On this trace: {counts}.")


def _why(counts: Counts) -> str:
    worst = max((counts.late, "late"), (counts.refused, "refused"), (counts.stalled, "stalled"))[1]
    if worst != "refused" and counts.recomputed > MANY_RECOMPUTED:
        worst = "preempted"
    return {
        "late": f"wait for more than {TTFT} units for their first token: where do they wait, and for how long",
        "refused": "are refused: how many rows does the memory have room for, and how many requests can wait in time",
        "stalled": f"stall for more than {GAP} units between two tokens: what does such an iteration compute",
        "preempted": f"lose time to preemption, which has {counts.recomputed:,} tokens computed again: do so many "
        "rows fit into the memory when several long prompts run at once",
    }[worst]


design, design_in_time = (
    JudgedExercise(SIGNATURE, idea, partial(_judge, least=least, most_stalled=most_stalled), name)
    for name, idea, least, most_stalled in [
        ("design", "an iteration is short enough for the requests that decode", LEAST_SERVED, MOST_STALLED),
        ("design_in_time", "the rows fit the memory, and no request waits that would be late", LEAST_IN_TIME, 1),
    ]
)
