"""Misconceptions as edits of the reference: each shows in one line how a plausible wrong function differs from it.

longest.add_misconceptions({
    "takes the shortest.": "max( -> min(",
    "returns its length.": "return -> return len",
})
"""

import inspect
import math
import re
import statistics
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

# What edits may use, beside what the reference's own module has.
NAMES = {"math": math, "np": np, "pairwise": pairwise, "statistics": statistics, "torch": torch}
Edit = str | tuple[str, ...]  # "old -> new", or several of these, each of which replaces every occurrence


def edited(function: Callable, edits: Edit) -> Callable:
    """Return a function, or a class, with other source text.

    Args:
        edits: "old -> new", or several of these, each of which replaces every occurrence.

    Raises:
        ValueError: the source does not contain what is to be replaced.
    """
    source = re.sub(r"\A@.*?^(?=def |class )", "", inspect.getsource(function), flags=re.DOTALL | re.MULTILINE)
    for edit in [edits] if isinstance(edits, str) else edits:
        old, _, new = edit.partition(" -> ")
        if old not in source:
            raise ValueError(f"{function.__name__} contains no {old!r}")
        source = source.replace(old, new)
    names = NAMES | vars(inspect.getmodule(function))
    exec(source, names)
    return names[function.__name__]
