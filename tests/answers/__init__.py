"""Answers that students could hand in, one file a lesson: right ones in other styles, and wrong ones.

The misconceptions that the exercises declare are not repeated here. A wrong answer here fails in another way: it
returns something of the wrong type, raises an error, changes its arguments, or breaks an invariant.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

from helpers.checks.exercises import EXERCISES

Answers = dict[str, dict[str, Callable]]

RIGHT: Answers = defaultdict(dict)  # of a task: its functions by their names
WRONG: Answers = defaultdict(dict)  # of a task: functions by a piece of the message meant for each
ALMOST: Answers = defaultdict(dict)  # the same, but for a change: a function of the right result and of the arguments


def right(*tasks):
    """Note another way to write it."""

    def note(function):
        for task in tasks:
            RIGHT[task][function.__name__] = function
        return function

    return note


def _longest_first(waiting, running, free_rows):
    return sorted(waiting, key=lambda request: -request.max_tokens)[:free_rows]


solutions = SimpleNamespace(
    schedule=_longest_first,
    **{name: exercise.solution for name, exercise in EXERCISES.items() if hasattr(exercise, "solution")},
)

from . import (  # noqa: E402, F401
    capstone,
    codelab,
    lesson_1,
    lesson_2,
    lesson_3,
    lesson_4,
    lesson_5,
    lesson_6,
    lesson_7,
    lesson_8,
    lesson_9,
    lesson_10_load,
    lesson_10_queue,
    lesson_11,
    lesson_12,
    lesson_13,
    lesson_14,
    lesson_15,
    lesson_16,
    lesson_17,
    lesson_18,
    sly,
)

for _task, _changes in ALMOST.items():
    for _message, _change in _changes.items():
        WRONG[_task][_message] = lambda *arguments, _change=_change, _right=EXERCISES[_task].solution: _change(
            _right(*arguments), *arguments
        )
