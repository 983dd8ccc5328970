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
        guess: what the reader predicted; `...`, as lessons have it, and None mean that there is no guess yet.
        answer: a number, True or False, a text, or a list of these. A guessed number is compared by its ratio, a text
            without regard to case.
        unit: of a number, in the plural, such as "forward passes".
    """
    answer = answer.item() if hasattr(answer, "item") else answer  # one number of torch or numpy
    found = f"Answer: {_shown(answer, unit)}."
    kind = _kind(answer)
    if guess is ... or guess is None or _is_of_an_earlier_question():
        return f"{found} You have not guessed yet: write {kind} in the cell above."
    if _is_number(answer):
        number = _number(guess)
        return f"{found} {_wrong_kind(guess, kind) if number is None else _distance(number, answer, unit)}"
    if not isinstance(guess, type(answer) if isinstance(answer, str | bool) else list | tuple):
        return f"{found} {_wrong_kind(guess, kind)}"
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


def _kind(answer) -> str:
    """Return what a guess should be, in words."""
    if isinstance(answer, bool):
        return "True or False"
    if _is_number(answer):
        return "a number"
    return "text in quotes" if isinstance(answer, str) else "a list"


def _wrong_kind(guess, kind: str) -> str:
    try:
        shown = repr(guess)
    except Exception:  # an int of thousands of digits has none
        shown = f"of the type {type(guess).__name__}"
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    without = " without quotes" if isinstance(guess, str) and "quotes" not in kind else ""
    return f"Your guess {shown} cannot be compared: write {kind}{without} in the cell above."


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(guess) -> float | None:
    """Return a guessed number, also one of torch or numpy; None for anything else, such as text."""
    if isinstance(guess, str | bytes | bool):
        return None
    try:
        number = float(guess)
    except Exception:  # whatever the guess is, the reader gets a sentence
        return None
    return number if isfinite(number) else None


def _shown(value, unit: str = "") -> str:
    """Return a value as text: numbers with at most three significant digits, counts in full."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    if not _is_number(value):
        return str(value)
    whole = isinstance(value, Integral) or value.is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" * whole + f"{value:.3g}" * (not whole) + f" {unit}" * bool(unit)


def _distance(guess: float, answer: float, unit: str) -> str:
    yours = f"Your guess of {_shown(guess)}"
    if guess == answer:
        return f"{yours} is exact."
    if guess * answer <= 0:
        return f"{yours} is too {'high' if guess > answer else 'low'} by {_shown(abs(guess - answer), unit)}."
    ratio = guess / answer
    if abs(ratio - 1) <= 0.1:
        return f"{yours} is within 10%."
    if ratio >= 2:
        return f"{yours} is {_shown(ratio)} times the measured value."
    if ratio <= 0.5:
        return f"{yours} is low: the measured value is {_shown(1 / ratio)} times as large."
    return f"{yours} is {abs(ratio - 1):.0%} too {'high' if ratio > 1 else 'low'}."


def _plain(value):
    """Return a value in the form in which guesses are compared: case, surrounding spaces and list types don't count."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.strip().casefold() if isinstance(value, str) else value
