"""The design of a server, three numbers, tried on a simulated hour: which requests are served in time, and why not.

The course's own scheduler and block manager run in the simulator. An iteration costs what it costs in lesson 5: 1 unit
for the forward pass, and 1 for every 50 tokens. So the counts are the same on every machine.
"""

from functools import lru_cache
from itertools import accumulate
from math import log
from numbers import Integral
from random import Random
from typing import NamedTuple

from .. import metrics
from ..engine import EngineConfig, Plan, SamplingParams
from ..simulator import Simulator
from .comparing import kind
from .exercise import Wrong

REQUESTS, RATE = 240, 0.16  # requests, and how many arrive per unit of time
BLOCKS, BLOCK_SIZE = 192, 16
TTFT, GAP = 40, 4  # the limits, in units of time
LARGEST = 1024  # of each number


class Counts(NamedTuple):
    """What became of the requests of a trace."""

    in_time: int  # requests that meet both limits
    refused: int  # requests that found no row and no place in the queue
    late: int  # requests whose TTFT exceeds its limit
    stalled: int  # requests with a gap between two tokens that exceeds its limit; they may be late, too
    recomputed: int  # tokens computed again after preemptions

    def __str__(self) -> str:
        return (
            f"{self.in_time:3d} of {REQUESTS} in time; {self.refused} refused, {self.late} late, "
            f"{self.stalled} stalled; {self.recomputed:,} tokens recomputed"
        )


@lru_cache(8)
def trace(seed: int = 0) -> tuple[tuple[float, int, int], ...]:
    """Return (arrival, prompt tokens, output tokens) for each request.

    Every trace has the same lengths, in another order and at other times: Poisson arrivals over the same duration. One
    prompt in five is a page. Outputs are distributed exponentially with a mean of about 60 tokens, and at most 200.
    """
    draw = Random(f"design {seed}")
    gaps = [draw.expovariate(1) for _ in range(REQUESTS)]
    scale = REQUESTS / RATE / sum(gaps)
    arrivals = accumulate((gap * scale for gap in gaps[:-1]), initial=0.0)
    shares = [(index + 0.5) / REQUESTS for index in range(REQUESTS)]
    outputs = [min(200, 1 + round(-60 * log(1 - share))) for share in shares]
    prompts = [round(200 + 1000 * share) if share < 0.2 else round(10 + 62 * (share - 0.2)) for share in shares]
    draw.shuffle(outputs)
    draw.shuffle(prompts)
    return tuple(zip(arrivals, prompts, outputs, strict=True))


def run_design(rows: int, tokens: int, max_queue: int, seed: int = 0) -> Counts:
    """Run a trace on a simulated server.

    Args:
        rows: the most requests that run at once.
        tokens: the most tokens that an iteration computes.
        max_queue: the most requests that may wait; a request that finds neither a row nor a place is refused.
        seed: of the trace.

    Raises:
        Wrong: a number is not possible.
    """
    for name, value, least in [("rows", rows, 1), ("tokens", tokens, 1), ("max_queue", max_queue, 0)]:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise Wrong(f"should return three ints, but {name} is {kind(value)}.")
        if not least <= value <= LARGEST:
            raise Wrong(f"returns {value} for {name}, which should be between {least} and {LARGEST}.")
    if tokens < rows:
        raise Wrong(f"allows {tokens} tokens per iteration for {rows} rows: if all of them decode, each needs a token.")
    return _run(int(rows), int(tokens), int(max_queue), seed)


@lru_cache(64)
def _run(rows: int, tokens: int, max_queue: int, seed: int) -> Counts:
    limits = {"max_batch_size": rows, "max_tokens_per_step": tokens, "num_blocks": BLOCKS, "block_size": BLOCK_SIZE}
    engine = Simulator(EngineConfig(**limits, prefix_caching=False), seconds=_cost)
    arrivals, prompt_tokens = {}, 0
    for number, (arrival, prompt, output) in enumerate(trace(seed)):
        engine.run_until(arrival)
        if len(engine.scheduler.unfinished) < rows + max_queue:
            arrivals[number], prompt_tokens = arrival, prompt_tokens + prompt
            engine.add_request([0] * prompt, SamplingParams(output, ignore_eos=True), number)
    engine.run_until()
    served = metrics.request_metrics(engine.trace, arrivals)
    late = {request.request_id for request in served if request.ttft > TTFT}
    stalled = {request.request_id for request in served if max(request.itl, default=0) > GAP + 1e-9}
    return Counts(
        in_time=len(served) - len(late | stalled),
        refused=REQUESTS - len(served),
        late=len(late),
        stalled=len(stalled),
        recomputed=engine.trace.prompt_tokens - prompt_tokens,
    )


def try_design(rows: int, tokens: int, max_queue: int) -> Counts | None:
    """Run the practice trace and print what became of its requests; print what is wrong with impossible numbers.

    Args:
        rows, tokens, max_queue: as in `run_design`.
    """
    try:
        counts = run_design(rows, tokens, max_queue)
    except Wrong as wrong:
        print(f"This design {wrong}")
        return None
    print(f"{rows:4d} rows, {tokens:4d} tokens, {max_queue:4d} places: {counts}")
    return counts


def _cost(plan: Plan) -> float:
    return 1 + sum(chunk.tokens for chunk in plan.chunks) / 50
