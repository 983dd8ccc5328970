"""Synthetic traces: invented requests whose lengths and gaps roughly match the statistics of published traces.

    conversation  Azure's conversations: a median prompt of 1,020 tokens (mean 1,155), a median output of 129 (mean 211)
    code          Azure's code completions: prompts of 1,500 (mean 2,048), outputs of 13 (mean 28)
    bursts        BurstGPT: a mean prompt of 621 tokens, a mean output of 126, and arrivals in bursts

Lengths follow a lognormal distribution, and gaps follow a gamma distribution. Both are simplifications: real lengths
have several peaks, and real rates change with the hour. The lengths of a prompt and of its output are drawn
independently. The figures above are approximate, because they were not computed from the published files. How strongly
arrivals cluster is an assumption. Use a published trace where you have one.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .fleet import TimedRequest

LONGEST = 8192  # tokens of a prompt or of an output


@dataclass(frozen=True)
class Statistics:
    """The medians and the means of both lengths in tokens, and the coefficient of variation of the gaps."""

    prompt_median: float
    prompt_mean: float
    output_median: float
    output_mean: float
    cv: float


TRACES = {
    "conversation": Statistics(1020, 1155, 129, 211, 1.0),
    "code": Statistics(1500, 2048, 13, 28, 1.5),
    "bursts": Statistics(420, 621, 80, 126, 3.0),
}


def synthetic_trace(name: str, count: int, rate: float, seed: int = 0) -> Iterator[TimedRequest]:
    """Yield the requests of a synthetic trace; the same seed gives the same ones.

    Args:
        name: one of TRACES.
        count: how many requests.
        rate: the mean number of requests per second.
        seed: for lengths and gaps.

    Raises:
        ValueError: there is no such trace, or the rate is not positive.
    """
    if name not in TRACES:
        raise ValueError(f"There is no synthetic trace {name!r}: choose one of {', '.join(TRACES)}.")
    if not 0 < rate < float("inf"):
        raise ValueError(f"The rate must be a number of requests per second above 0, not {rate}.")
    return _requests(TRACES[name], count, rate, random.Random(seed))


def _requests(statistics: Statistics, count: int, rate: float, draw: random.Random) -> Iterator[TimedRequest]:
    arrival, shape = 0.0, 1 / statistics.cv**2
    for _ in range(count):
        prompt = _length(draw, statistics.prompt_median, statistics.prompt_mean)
        yield TimedRequest(arrival, prompt, _length(draw, statistics.output_median, statistics.output_mean))
        arrival += draw.gammavariate(shape, 1 / (shape * rate))


def _length(draw: random.Random, median: float, mean: float) -> int:
    """Draw from the lognormal distribution with this median and mean; values out of range are drawn again."""
    deviation = math.sqrt(2 * math.log(mean / median))
    while not 1 <= (length := round(median * math.exp(draw.gauss(0, deviation)))) <= LONGEST:
        pass
    return length
