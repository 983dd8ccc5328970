"""The exercises: references, cases and misconceptions. A grader's sandbox does not contain this folder.

The name of a file begins with its lesson: the tasks of lesson 7 and its codelab are declared in `lesson_7_*.py`.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..exercise import Exercise, JudgedExercise

EXERCISES: dict[str, Exercise | JudgedExercise] = {
    exercise.name: exercise
    for file in iter_modules(__path__)
    for exercise in vars(import_module(f".{file.name}", __name__)).values()
    if isinstance(exercise, Exercise | JudgedExercise)
}
