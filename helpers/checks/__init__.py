"""Instant feedback for the exercises: `check("left_pad", my_left_pad)` passes, or says what is wrong with the idea.

The claim: a right answer passes however it is written, the message for a wrong one names the idea that it misses, and
no message gives the answer away.

`exercises` declares each task in a file that begins with its lesson's number: a reference, cases and misconceptions.
`examining` compares a student's function with them: `calling` calls it safely, and `comparing` compares its results by
value. Where a plain call is not enough, the other files observe the function: with the model, in the engine, on a
stream, as a queue.

`predictions` compares a reader's guess with what a lesson measures.
"""

import importlib
from collections.abc import Callable

# Imported when first used: a lesson that only compares a guess needs none of the others.
_HOME = {
    "CachedBlock": "eviction",
    "Row": "engine_calls",
    "ServerRequest": "scheduling",
    "compare_guess": "predictions",
    "engine_with": "student_block_manager",
    "first_come": "scheduling",
    "planned_by": "student_scheduler",
    "run_schedule": "scheduling",
    "score_eviction": "eviction",
    "score_schedule": "scheduling",
    "simulate_queue": "queue_simulation",
    "try_design": "capacity",
    "try_engine": "capstone",
    "try_fleet": "fleet_plan",
}

__all__ = ["check", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def check(task: str, attempt: Callable) -> bool:
    """Try a student's function on small cases and print one message: passed, or what is wrong and why it matters.

    In a notebook, it also draws the expected mask or cache beside the actual one.

    Args:
        task: the exercise's name.
        attempt: the student's function.

    Returns:
        Whether the function does what the exercise asks. No exception of the function is passed on.

    Raises:
        ValueError: the task does not exist.
    """
    from .calling import answer
    from .comparing import show_in_notebook
    from .examining import examine
    from .exercises import EXERCISES  # a grader's sandbox has this package without the exercises

    if task not in EXERCISES:
        raise ValueError(f"There is no exercise {task!r}. There are: {', '.join(sorted(EXERCISES, key=str.lower))}.")
    verdict = examine(EXERCISES[task], lambda question: answer(question, attempt))
    print(f"{task}: {verdict.message}")
    if verdict.grids:
        show_in_notebook(lambda plots: verdict.grids.picture())
    return verdict.passed
