"""What the settings of an engine and of a request have in common: ranges, and the features that they need."""

import math
import sys
from dataclasses import dataclass, fields
from numbers import Integral, Rational, Real
from typing import Any


@dataclass(frozen=True)
class Bound:
    """The range of a parameter.

    Attributes:
        low, high: the smallest and the largest value.
        integer: whether it must be an integer.
        exclusive_low: whether `low` itself is excluded.
    """

    low: float
    high: float = math.inf
    integer: bool = False
    exclusive_low: bool = False

    def check(self, name: str, value) -> None:
        """Raise a ValueError that names the parameter and its range, unless the value is within the range."""
        if type(value) is int and self.low < value < min(self.high, 2**63):  # quickly: lists have many of these
            return
        kind = Integral if self.integer else Real
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or abs(value) == math.inf
            or (isinstance(value, Rational) and abs(value) > sys.float_info.max)  # which a runner could not convert
            or not self.low <= value <= self.high
            or (self.exclusive_low and value == self.low)
        ):
            raise ValueError(f"{name} must be {self}, not {value!r}.")

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        above = "above" if self.exclusive_low else "of at least"
        if math.isinf(self.high):
            return f"{kind} {above} {self.low}"
        return f"{kind} {f'above {self.low} and up to' if self.exclusive_low else f'from {self.low} to'} {self.high}"


def needed(feature: str) -> dict[str, str]:
    """Return the metadata of a field that has an effect only in an engine with a feature (`features/`)."""
    return {"needs": feature}


def note_needs(settings: Any) -> None:
    """Set the attribute `needs` of new settings: the features without which they have no effect.

    For each feature, `needs` has a field whose value is not the default.
    """
    needs = {
        field.metadata["needs"]: field.name
        for field in fields(settings)
        if "needs" in field.metadata and getattr(settings, field.name) != field.default
    }
    object.__setattr__(settings, "needs", needs)  # settings never change
