"""How many tokens prompts and answers have, drawn from a distribution that a short text names.

    fixed:32                 always 32
    uniform:8-128            8, 9, ... or 128, each as likely
    exponential:64-256       many short and few long ones: mean 64, but none above 256
    lognormal:40-160-300     what people write: median 40, 95th percentile 160, none above 300

What would be above the last number is drawn again, which makes mean and median a little smaller. A mix is a pair of
them, for prompts and for answers; all but Orca's fit the embedded model's context of 512.
"""

import re

import numpy as np

MIXES = {
    "chat": ("lognormal:40-160-250", "lognormal:60-150-200"),
    "write": ("uniform:8-32", "uniform:64-200"),
    "summarize": ("uniform:150-350", "uniform:16-64"),
    "orca": ("uniform:32-512", "uniform:1-128"),  # as in Orca's evaluation; needs a context of 640 tokens
}

_Z95 = 1.6449  # standard deviations from the middle of a normal distribution to its 95th percentile

# The numbers' names, and how to draw some values. The last number is the largest length there is.
_DISTRIBUTIONS = {
    "fixed": ("N", lambda rng, size, n: np.full(size, n)),
    "uniform": ("LOW-HIGH", lambda rng, size, low, high: rng.integers(low, high + 1, size)),
    "exponential": ("MEAN-MOST", lambda rng, size, mean, _: rng.exponential(mean, size)),
    "lognormal": (
        "MEDIAN-P95-MOST",
        lambda rng, size, median, p95, _: median * rng.lognormal(0, np.log(p95 / median) / _Z95, size),
    ),
}


def parse(spec: str) -> tuple[str, list[int]]:
    """The distribution's name and numbers.

    Raises:
        ValueError: no distribution of that name, or not its numbers.
    """
    name, _, given = spec.partition(":")
    if name not in _DISTRIBUTIONS:
        known = ", ".join(f"{name}:{numbers}" for name, (numbers, _) in _DISTRIBUTIONS.items())
        raise ValueError(f"There is no distribution {spec!r}; there are {known}.")
    wanted, _ = _DISTRIBUTIONS[name]
    numbers = [int(number) for number in given.split("-")] if re.fullmatch(r"\d+(-\d+)*", given) else []
    if len(numbers) != len(wanted.split("-")) or numbers != sorted(numbers) or numbers[0] < 1:
        raise ValueError(f"{spec!r} is not {name}:{wanted} in whole numbers of at least 1, smaller ones first.")
    return name, numbers


def lengths(spec: str, count: int, seed: int | list[int] = 0) -> list[int]:
    """`count` lengths from the distribution that `spec` names, the same ones for the same seed.

    Raises:
        ValueError: see `parse`.
    """
    name, numbers = parse(spec)
    rng = np.random.default_rng(seed)
    values = np.empty(0)
    while len(values) < count:
        drawn = np.ceil(_DISTRIBUTIONS[name][1](rng, count, *numbers))
        values = np.append(values, drawn[(drawn >= 1) & (drawn <= numbers[-1])])
    return [int(value) for value in values[:count]]
