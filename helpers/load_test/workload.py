"""What a load test sends: when requests arrive, how long they are, and what they say.

In an open loop, requests arrive whether or not the server keeps up. The time between two arrivals is drawn from a gamma
distribution with a given mean and coefficient of variation (cv, the standard deviation divided by the mean):

    cv = 0    equal gaps, like a clock
    cv = 1    exponential gaps, that is, a Poisson process: many independent users
    cv > 1    bursts, with long gaps between them

Lengths of prompts and outputs are in tokens. A short string specifies their distribution:

    fixed:32                 always 32
    uniform:8-128            8, 9, ... or 128 with equal probability
    exponential:64-256       many short and few long ones: mean 64, at most 256
    lognormal:40-160-300     typical of human writing: median 40, 95th percentile 160, at most 300

Values above the maximum are drawn again, which lowers the mean and the median slightly. A mix is a pair of
distributions, for prompts and for outputs. All mixes but Orca's fit the embedded model's context of 512.

Prompts are texts of an approximate length, which suit servers whose tokenizer is unknown, or token ids of an exact one.
Hardly any two have a common prefix, so a prefix cache brings a server almost no advantage.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence

from ..tiny_model.corpus import Writer

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


def arrival_times(count: int, rate: float, cv: float = 1.0, seed: int = 0) -> list[float]:
    """Return the intended send times of `count` requests, in seconds; the first is 0.

    The gaps are scaled so that their mean is exactly 1 / rate. Without scaling, the rate of a hundred requests would be
    off by about ten percent, which would distort comparisons. A Poisson process remains one, conditioned on the
    number of arrivals in that time. With the same seed, another rate gives the same pattern, only faster or slower.

    Raises:
        ValueError: the rate is not positive, the cv is neither 0 nor from 0.001 to 10, or the count is negative.
    """
    import numpy as np  # only here: --help should be quick

    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is a number of requests per second above 0, not {rate}.")
    if not (cv == 0 or 0.001 <= cv <= 10):
        raise ValueError(f"cv is 0 (like a clock), or from 0.001 to 10 (bursts), 1 for Poisson arrivals; not {cv}.")
    if count < 0:
        raise ValueError(f"count is a number of requests of at least 0, not {count}.")
    gaps = np.ones(max(count - 1, 0))
    if cv > 0:
        gaps = np.random.default_rng(seed).gamma(1 / cv**2, size=len(gaps)) + 1e-12  # without it, all may round to 0
    times = np.cumsum(gaps / gaps.mean() / rate) if len(gaps) else gaps
    return [0.0, *times.tolist()][:count]


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


def words(seed: int = 0) -> Iterator[str]:
    """Yield the words of one story after another, without end."""
    writer = Writer(seed)
    while True:
        yield from writer.story().split()


def texts(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Return a text of about each length in tokens, four for three words, from a stream of stories."""
    stream = words(seed)
    return [" ".join(next(stream) for _ in range(max(1, round(3 * length / 4)))) for length in lengths]


def token_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return a list of random token ids of each length. The ids are 100 to 999, which most vocabularies contain."""
    draw = random.Random(seed)
    return [[draw.randint(100, 999) for _ in range(length)] for length in lengths]
