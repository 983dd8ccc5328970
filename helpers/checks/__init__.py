"""Instant feedback for the exercises: `check("left_pad", my_left_pad)` passes, or says what is wrong with the idea.

The claim: a right answer passes however it is written, the message for a wrong one names the idea that it misses, and
no message gives the answer away.

`exercises` declares each task: a reference, cases and misconceptions. `examining` compares a student's function with
them: `calling` calls it safely, and `comparing` compares its results by value. Where a plain call is not enough, the
other files observe the function: with the model, in the engine, on a stream, as a queue.
"""

from collections.abc import Callable

from .calling import answer
from .comparing import Grids, in_notebook
from .examining import examine
from .queue_simulation import simulate_queue
from .reader import Reader
from .scheduling import ServerRequest, first_come, run_schedule, score_schedule
from .student_block_manager import engine_with
from .student_scheduler import planned_by

__all__ = [
    "Reader",
    "ServerRequest",
    "check",
    "engine_with",
    "first_come",
    "planned_by",
    "run_schedule",
    "score_schedule",
    "simulate_queue",
]


def check(task: str, attempt: Callable, show: bool = True) -> bool:
    """Try a student's function on small cases and print one message: passed, or what is wrong and why it matters.

    Args:
        task: the exercise's name.
        attempt: the student's function.
        show: also draw the expected mask or cache beside the actual one: a picture in a notebook, text elsewhere.

    Returns:
        Whether the function does what the exercise asks. No exception of the function is passed on.

    Raises:
        ValueError: the task does not exist.
    """
    from .exercises import EXERCISES  # here, because a grader's sandbox has this package without the exercises

    if task not in EXERCISES:
        raise ValueError(f"There is no exercise {task!r}. There are: {', '.join(EXERCISES)}.")
    verdict = examine(EXERCISES[task], lambda question: answer(question, attempt))
    print(f"{task}: {verdict.message}")
    if show and verdict.grids:
        _draw(verdict.grids)
    return verdict.passed


def _draw(grids: Grids) -> None:
    if in_notebook():
        from IPython.display import display

        display(grids.picture())
    else:
        print(grids)
