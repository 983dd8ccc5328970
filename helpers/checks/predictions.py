"""Compare a reader's prediction with what a lesson then counts or measures, in one sentence.

The claim: whatever the guess is, the result is a sentence and never an exception. Without a guess, it says where to
write one, even if the variable still holds the guess at an earlier question.
"""

import re
import sys
from math import isfinite
from numbers import Integral


def compare_guess(guess, answer, unit: str = "") -> str:
    """Return the answer and how far the guess is from it.

    Args:
        guess: what the reader predicted; `...`, as lessons have it, means that there is no guess yet.
        answer: a number, a text, or a list of these. A guessed number is compared by its ratio, a text without regard
            to case.
        unit: of a number, in the plural, such as "forward passes".
    """
    answer = answer.item() if hasattr(answer, "item") else answer  # one number of torch or numpy
    found = f"Answer: {_shown(answer, unit)}."
    kinds = [("a number", int | float), ("text in quotes", str), ("a list", list | tuple)]
    kind, types = next(pair for pair in kinds if isinstance(answer, pair[1]))
    if guess is ... or _is_of_an_earlier_question():
        return f"{found} You have not guessed yet: write {kind} in the cell above."
    number = _number(guess) if kind == "a number" else None
    if number is not None:
        return f"{found} Your guess of {_shown(number)} {_distance(number, answer, unit)}."
    if kind == "a number" or not isinstance(guess, types):
        return f"{found} Your guess cannot be compared: write {kind} in the cell above."
    same = _plain(guess) == _plain(answer)
    return f"{found} Your guess is right." if same else f"{found} You guessed {_shown(guess)}."


def _is_of_an_earlier_question() -> bool:
    """Return whether the reader has skipped the cell of this guess, by Jupyter's list of the cells that ran."""
    cells = getattr(sys.modules["__main__"], "In", None) or [""]
    for cell in reversed(cells):
        if re.search(r"^guess\w* *=", cell, re.MULTILINE):
            return False
        if "compare_guess(" in cell and cell != cells[-1]:
            return True
    return False


def _number(guess) -> float | None:
    """Return a guessed number, also one of torch or numpy; None for anything else, such as text."""
    try:
        number = None if isinstance(guess, str | bytes | bool) else float(guess)
    except Exception:  # whatever the guess is, the reader gets a sentence
        return None
    return number if number is not None and isfinite(number) else None


def _shown(value, unit: str = "") -> str:
    """Return a value as text: numbers with at most three significant digits, counts in full."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    if not isinstance(value, int | float):
        return str(value)
    whole = isinstance(value, Integral) or value.is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" * whole + f"{value:.3g}" * (not whole) + f" {unit}" * bool(unit)


def _distance(guess: float, answer: float, unit: str) -> str:
    if guess == answer:
        return "is exact"
    if guess * answer <= 0:
        return f"is too {'high' if guess > answer else 'low'} by {_shown(abs(guess - answer), unit)}"
    ratio = guess / answer
    return "is within 10%" if abs(ratio - 1) <= 0.1 else f"is {_shown(ratio)} times the answer"


def _plain(value):
    """Return a value in the form in which guesses are compared: case, surrounding spaces and list types don't count."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.strip().casefold() if isinstance(value, str) else value
