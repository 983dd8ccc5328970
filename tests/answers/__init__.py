"""Answers that students could hand in, one file a lesson: right ones in several styles, and wrong ones.

The misconceptions that the exercises declare are not repeated here. A wrong answer here fails in another way: it
returns something of the wrong type, raises an error, changes its arguments, or breaks an invariant.
"""

from types import SimpleNamespace

from helpers.checks.exercises import EXERCISES

RIGHT: list[tuple] = []  # (task, function)
WRONG: list[tuple] = []  # (task, function, a piece of the message)


def right(task):
    """Note another way to write it."""

    def note(function):
        RIGHT.append((task, function))
        return function

    return note


def wrong(task, message):
    """Note a wrong answer, and a piece of the message meant for it."""

    def note(function):
        WRONG.append((task, function, message))
        return function

    return note


def _longest_first(waiting, running, free_rows):
    return sorted(waiting, key=lambda request: -request.max_tokens)[:free_rows]


solutions = SimpleNamespace(
    schedule=_longest_first, **{name: one.solution for name, one in EXERCISES.items() if hasattr(one, "solution")}
)

from . import (  # noqa: E402, F401
    codelab,
    lesson_1,
    lesson_2,
    lesson_3,
    lesson_4,
    lesson_5,
    lesson_6,
    lesson_7,
    lesson_7_load,
    lesson_7_queue,
)
