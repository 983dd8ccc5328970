"""Instant feedback for the exercises: `check("left_pad", my_left_pad)` says pass, or what is wrong with the idea.

The claim: a right answer passes however it is written, a wrong one is told which idea it misses, and no message
gives the answer away.

`exercises` declares each task: a reference, cases and misconceptions. `examining` compares a student's function with
them, which `calling` calls safely and `comparing` compares by value. Where a plain call is not enough, the other files
observe a function: under the model, in the engine, on a stream, as a queue.
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
        show: also draw what was expected beside what came, where there is a mask or a cache to be seen: a picture
            in a notebook, text elsewhere.

    Returns:
        Whether the function does what the exercise asks. Nothing that it does raises here.

    Raises:
        ValueError: there is no such task.
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
