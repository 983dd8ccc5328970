"""Instant feedback for the exercises: `check("left_pad", my_left_pad)` says pass, or what is wrong with the idea.

The claim: a right answer passes however it is written, a wrong one is told which idea it misses, and no message
gives the answer away. tests/test_checks.py holds right and wrong answers to every exercise.

Each file below holds the exercises on one idea. `attempt` calls the student's function safely, and `differences`
compares and explains. Where an exercise changes the engine or the model, `reader`, `student_block_manager` and
`student_scheduler` run the student's functions in it.
"""

from collections.abc import Callable

from . import (
    block_allocation,
    block_layout,
    bounded_queue,
    chunking,
    event_stream,
    goodput,
    joining,
    leaving,
    looping,
    one_request,
    open_loop,
    packing,
    planning,
    prefix_hashing,
    queueing,
    ragged_attention,
    scheduling,
    static_batch,
    stepping,
    waiting,
)
from .attempt import Attempt
from .bounded_queue import simulate_queue
from .differences import Grids, Wrong, first_line, in_notebook
from .reader import Reader
from .scheduling import ServerRequest, first_come, run_schedule, score_schedule
from .student_block_manager import engine_with
from .student_scheduler import planned_by

__all__ = [
    "TASKS",
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

EXERCISES = (
    one_request,
    static_batch,
    stepping,
    joining,
    leaving,
    looping,
    chunking,
    planning,
    queueing,
    waiting,
    packing,
    ragged_attention,
    block_layout,
    block_allocation,
    prefix_hashing,
    event_stream,
    bounded_queue,
    open_loop,
    goodput,
    scheduling,
)
SIGNATURES = {signature: run for file in EXERCISES for signature, run in file.TASKS.items()}
TASKS = {signature.partition("(")[0]: signature for signature in SIGNATURES}


def check(task: str, attempt: Callable, show: bool = True) -> bool:
    """Try a student's function on small cases and print one message: passed, or what is wrong and why it matters.

    Args:
        task: the exercise's name, a key of TASKS.
        attempt: the student's function.
        show: also draw what was expected beside what came, where there is a mask or a cache to be seen: a picture
            in a notebook, text elsewhere.

    Returns:
        Whether the function does what the exercise asks. Nothing that it does raises here.

    Raises:
        ValueError: there is no such task.
    """
    if task not in TASKS:
        raise ValueError(f"There is no exercise {task!r}. There are: {', '.join(TASKS)}.")
    signature = TASKS[task]
    run, idea = SIGNATURES[signature]
    try:
        run(Attempt(attempt, signature))
    except Wrong as wrong:
        print(f"{task}: {wrong.message}")
        if show and wrong.grids:
            _draw(wrong.grids)
        return False
    except Exception as error:  # what came back is so unlike the right thing that no check foresaw it
        print(f"{task}: returns something that cannot be compared ({type(error).__name__}: {first_line(str(error))}).")
        return False
    print(f"{task}: passed. {idea[0].upper()}{idea[1:]}.")
    return True


def _draw(grids: Grids) -> None:
    if in_notebook():
        from IPython.display import display

        display(grids.picture())
    else:
        print(grids)
