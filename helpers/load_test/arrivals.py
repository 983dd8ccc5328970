"""Arrival times of an open loop, in which requests arrive whether or not the server keeps up.

The time between two arrivals is drawn from a gamma distribution with a given mean and coefficient of variation (cv,
the standard deviation divided by the mean):

    cv = 0    equal gaps, like a clock
    cv = 1    exponential gaps, that is, a Poisson process: many independent users
    cv > 1    bursts, with long gaps between them
"""


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
