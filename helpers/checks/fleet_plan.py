"""The plan of a fleet, two numbers, tried on a simulated trace: how many requests meet both limits, and at what price.

Every replica is the course's own scheduler. Its iterations take what a cost model says, so the counts are the same on
every machine.
"""

from functools import lru_cache
from numbers import Integral
from random import Random
from typing import NamedTuple

from ..cluster.routing import LeastOutstandingTokens
from ..engine import EngineConfig
from ..simulator import CostModel, TimedRequest, simulate_fleet, synthetic_trace
from ..simulator.cost_model import MACHINES
from ..simulator.trace_files import at_rate
from .comparing import kind
from .exercise import Wrong

REQUESTS, RATE = 600, 45  # requests, and how many arrive per second
ROWS = 64
PAGE = 6000  # tokens of one prompt in ten
TTFT, TPOT = 0.5, 0.015  # the limits, in seconds
MOST_REPLICAS, MOST_TOKENS = 16, 8192
FAILS_AT, START = 4.0, 20.0  # when a replica fails, and how long its replacement takes to start, in seconds


class Served(NamedTuple):
    """What became of the requests of a trace."""

    in_time: int  # requests that meet both limits
    late: int  # requests whose TTFT exceeds its limit
    slow: int  # requests whose TPOT exceeds its limit; they may be late, too
    replica_seconds: float  # what is paid for

    @property
    def share(self) -> float:
        return self.in_time / REQUESTS

    def __str__(self) -> str:
        return (
            f"{self.in_time} of {REQUESTS} in time ({self.share:.1%}); {self.late} late, {self.slow} slow; "
            f"{self.replica_seconds:.0f} replica-seconds"
        )


@lru_cache(8)
def trace(seed: int = 0) -> tuple[TimedRequest, ...]:
    """Return the requests of a trace: synthetic conversations, in which one prompt in ten is a page of text.

    Gaps are scaled, so that every trace has the same rate.
    """
    pages = [number < REQUESTS // 10 for number in range(REQUESTS)]
    Random(f"plan {seed}").shuffle(pages)
    requests = at_rate(list(synthetic_trace("conversation", REQUESTS, RATE, seed)), RATE)
    return tuple(
        request._replace(prompt=PAGE) if page else request for request, page in zip(requests, pages, strict=True)
    )


@lru_cache(1)
def cost_model() -> CostModel:
    """Return the costs of the committed estimate for an H100, which notebooks show."""
    return CostModel.load(MACHINES["h100_llama_8b"])


def run_plan(replicas: int, tokens: int, seed: int = 0, failure: bool = False) -> Served:
    """Run a trace on a simulated fleet.

    Args:
        replicas: how many there are.
        tokens: the most tokens that an iteration of a replica computes.
        seed: of the trace.
        failure: whether the first replica fails at FAILS_AT. Its replacement takes requests after START.

    Raises:
        Wrong: a number is not possible.
    """
    for name, value, least, most in [("replicas", replicas, 1, MOST_REPLICAS), ("tokens", tokens, ROWS, MOST_TOKENS)]:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise Wrong(f"should return two ints, but {name} is {kind(value)}.")
        if not least <= value <= most:
            raise Wrong(f"returns {value} for {name}, which should be between {least} and {most}.")
    return _run(int(replicas), int(tokens), seed, failure)


@lru_cache(64)
def _run(replicas: int, tokens: int, seed: int, failure: bool) -> Served:
    config = EngineConfig(max_batch_size=ROWS, max_tokens_per_step=tokens, prefix_caching=False)
    failures = {"failures": [(FAILS_AT, 0)], "start_seconds": START} if failure else {}
    result = simulate_fleet(trace(seed), config, cost_model(), replicas, LeastOutstandingTokens(), **failures)
    return Served(
        in_time=round(result.within(ttft=TTFT, tpot=TPOT) * REQUESTS),
        late=sum(request.ttft > TTFT for request in result.requests),
        slow=sum((request.tpot or 0) > TPOT for request in result.requests),
        replica_seconds=result.replica_seconds,
    )


def try_fleet(replicas: int, tokens: int, failure: bool = False) -> Served | None:
    """Run the practice trace and print what became of its requests; print what is wrong with impossible numbers.

    Args:
        replicas, tokens, failure: as in `run_plan`.
    """
    try:
        served = run_plan(replicas, tokens, failure=failure)
    except Wrong as wrong:
        print(f"This plan {wrong}")
        return None
    print(f"{replicas:2d} replicas, {tokens:4d} tokens{', one fails' * failure}: {served}")
    return served
