"""Misconceptions as edits of the reference: each shows in one line how a plausible wrong function differs from it.

add_edits(longest, {
    "takes the shortest.": "max( -> min(",
    "returns its length.": "return -> return len",
})
"""

import inspect
import math
import re
import statistics
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np

from .exercise import Exercise

# What edits may use, beside what the reference's own module has.
NAMES = {"math": math, "np": np, "pairwise": pairwise, "statistics": statistics}
Edit = str | tuple[str, ...] | Callable


def add_edits(exercise: Exercise, wrong: Mapping[str, Edit | list[Edit]]) -> None:
    """Add misconceptions to an exercise that has its reference.

    Args:
        wrong: from messages to edits, as `edited` takes them, or to functions. A list has variants that get the same
            message.
    """
    for message, given in wrong.items():
        for edit in given if isinstance(given, list) else [given]:
            exercise.misconception(message, edit if callable(edit) else edited(exercise.solution, edit))


def edited(function: Callable, edits: str | tuple[str, ...]) -> Callable:
    """Return a function, or a class, with other source text.

    Args:
        edits: "old -> new", or several of these, each of which replaces every occurrence.

    Raises:
        ValueError: the source does not contain what is to be replaced.
    """
    source = re.sub(r"\A@.*\n", "", inspect.getsource(function))
    for edit in [edits] if isinstance(edits, str) else edits:
        old, _, new = edit.partition(" -> ")
        if old not in source:
            raise ValueError(f"{function.__name__} contains no {old!r}")
        source = source.replace(old, new)
    names = NAMES | vars(inspect.getmodule(function))
    exec(source, names)
    return names[function.__name__]
