"""Lengths of prompts and outputs in tokens, drawn from a distribution that a short string specifies.

    fixed:32                 always 32
    uniform:8-128            8, 9, ... or 128 with equal probability
    exponential:64-256       many short and few long ones: mean 64, at most 256
    lognormal:40-160-300     typical of human writing: median 40, 95th percentile 160, at most 300

Values above the maximum are drawn again, which lowers the mean and the median slightly. A mix is a pair of
distributions, for prompts and for outputs. All mixes but Orca's fit the embedded model's context of 512.
"""

import math
import re

MIXES = {
    "chat": ("lognormal:40-160-250", "lognormal:60-150-200"),
    "write": ("uniform:8-32", "uniform:64-200"),
    "summarize": ("uniform:150-350", "uniform:16-64"),
    "orca": ("uniform:32-512", "uniform:1-128"),  # as in Orca's evaluation; needs a context of 640 tokens
}

_Z95 = 1.6449  # standard deviations from the mean of a normal distribution to its 95th percentile

# The names of a distribution's numbers, and a function that draws values from it. The last number is the maximum.
_DISTRIBUTIONS = {
    "fixed": ("N", lambda rng, size, n: [n] * size),
    "uniform": ("LOW-HIGH", lambda rng, size, low, high: rng.integers(low, high + 1, size)),
    "exponential": ("MEAN-MAX", lambda rng, size, mean, _: rng.exponential(mean, size)),
    "lognormal": (
        "MEDIAN-P95-MAX",
        lambda rng, size, median, p95, _: median * rng.lognormal(0, math.log(p95 / median) / _Z95, size),
    ),
}


def parse(spec: str) -> tuple[str, list[int]]:
    """Return the name and the numbers of a distribution.

    Raises:
        ValueError: there is no such distribution, or its numbers are missing, out of order or below 1.
    """
    name, _, given = spec.partition(":")
    if name not in _DISTRIBUTIONS:
        known = ", ".join(f"{name}:{numbers}" for name, (numbers, _) in _DISTRIBUTIONS.items())
        raise ValueError(f"There is no distribution {spec!r}; there are {known}.")
    expected, _ = _DISTRIBUTIONS[name]
    numbers = [int(number) for number in given.split("-")] if re.fullmatch(r"\d+(-\d+)*", given) else []
    if len(numbers) != len(expected.split("-")) or numbers != sorted(numbers) or numbers[0] < 1:
        raise ValueError(f"{spec!r} is not {name}:{expected} in ascending whole numbers of at least 1.")
    return name, numbers


def lengths(spec: str, count: int, seed: int | list[int] = 0) -> list[int]:
    """Draw `count` lengths from the distribution that `spec` names; the same seed gives the same lengths.

    Raises:
        ValueError: see `parse`.
    """
    import numpy as np  # only here: --help should be quick

    name, numbers = parse(spec)
    rng = np.random.default_rng(seed)
    values = np.empty(0)
    while len(values) < count:
        drawn = np.ceil(_DISTRIBUTIONS[name][1](rng, count, *numbers))
        values = np.append(values, drawn[(drawn >= 1) & (drawn <= numbers[-1])])
    return [int(value) for value in values[:count]]
