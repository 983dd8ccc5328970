"""When requests come in an open loop: users who do not know of each other, nor whether the server keeps up.

The time between two arrivals is drawn from a gamma distribution with a given mean and coefficient of variation (cv,
the standard deviation divided by the mean):

    cv = 0    like a clock
    cv = 1    exponential gaps, that is a Poisson process: many independent users
    cv > 1    bursts, and silence between them
"""

import numpy as np


def arrival_times(count: int, rate: float, cv: float = 1.0, seed: int = 0) -> list[float]:
    """The intended send times of `count` requests, in seconds; the first comes at 0.

    The drawn gaps are scaled so that their mean is exactly 1 / rate: a hundred requests would otherwise come at a rate
    that is off by ten percent, and be compared with another rate. A Poisson process stays one under the condition that
    so many arrive in that time. For the same seed another rate gives the same pattern, only faster or slower.

    Raises:
        ValueError: a rate that is not above 0, a cv that is neither 0 nor from 0.001 to 10, a negative count.
    """
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is a number of requests a second above 0, not {rate}.")
    if not (cv == 0 or 0.001 <= cv <= 10):
        raise ValueError(f"cv is 0 (like a clock), or from 0.001 to 10 (bursts), 1 for Poisson arrivals; not {cv}.")
    if count < 0:
        raise ValueError(f"count is a number of requests, not {count}.")
    gaps = np.ones(max(count - 1, 0))
    if cv > 0:
        gaps = np.random.default_rng(seed).gamma(1 / cv**2, size=len(gaps)) + 1e-12  # all of them may round to 0
    times = np.cumsum(gaps / gaps.mean() / rate) if len(gaps) else gaps
    return [0.0, *times.tolist()][:count]
