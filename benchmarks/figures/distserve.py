"""DistServe (Zhong et al., OSDI 2024): goodput with prefill and decode on the same GPU, and on separate ones.

Kept: the paper's first figure. It has a model of 13B parameters on A100s, prompts of 512 tokens, outputs of 64, and
Poisson arrivals. Goodput is the highest rate with a P90 TTFT of at most 0.4 s and a P90 TPOT of at most 0.04 s.
Scaled down: 150 requests per rate, and no model. An iteration takes 27.8 ms for the weights, 190 us per token, and 0.41
us per key that a decode reads (819,200 bytes at 2 TB/s). The first two are fitted to two published figures: the goodput
of a GPU that only prefills, and of one that only decodes. The other goodputs follow. Moving the keys and values of a
prompt takes 1.4 ms (419 MB at 300 GB/s).
"""

import math

from helpers.engine import EngineConfig, Plan
from helpers.metrics import percentile

from .replica import NO_LIMIT, Figure, highest_rate, make_sequences, poisson, serve

REQUESTS, PROMPT, OUTPUT, ROWS = 150, 512, 64, 256
TTFT, TPOT = 0.4, 0.04
WEIGHTS, PER_TOKEN, PER_KEY, TRANSFER = 27.8e-3, 190e-6, 0.41e-6, 1.4e-3
# Prefills and decodes take turns, one prompt at a time: 512 tokens occupy the GPU.
CONFIG = EngineConfig(max_batch_size=ROWS, max_tokens_per_step=PROMPT, mixed_batches=False, chunked_prefill=False)
DECODES = EngineConfig(max_batch_size=ROWS, max_tokens_per_step=NO_LIMIT)


def seconds(plan: Plan) -> float:
    """Return the duration of an iteration."""
    keys = sum(chunk.end for chunk in plan.chunks if chunk.is_decode)
    return WEIGHTS + PER_TOKEN * plan.tokens + PER_KEY * keys


def seconds_of_decodes(plan: Plan) -> float:
    """Return the duration of an iteration if the keys and values of all prompts were received."""
    return WEIGHTS + PER_TOKEN * len(plan.chunks) + PER_KEY * sum(chunk.end for chunk in plan.chunks)


def prefill(arrivals: list[float], replicas: int) -> list[float]:
    """Return when the first token of each request is available, from replicas that take turns."""
    sequences = make_sequences([PROMPT] * len(arrivals), [1] * len(arrivals), arrivals)
    for replica in range(replicas):
        serve(sequences[replica::replicas], CONFIG, seconds)
    return [sequence.token_times[0] for sequence in sequences]


def decode(arrivals: list[float]) -> list[float]:
    """Return when the last token of each request is available, given when its prompt and first token arrive."""
    order = sorted(range(len(arrivals)), key=arrivals.__getitem__)
    prompts, outputs = [PROMPT + 1] * len(arrivals), [OUTPUT - 1] * len(arrivals)
    served = serve(make_sequences(prompts, outputs, sorted(arrivals)), DECODES, seconds_of_decodes)
    last = {place: one.token_times[-1] for place, one in zip(order, served, strict=True)}
    return [last[place] for place in range(len(arrivals))]


def p90_tpot(first: list[float], last: list[float]) -> float:
    """Return P90 TPOT, given when the first and the last token of each request were available."""
    return percentile([(end - start) / (OUTPUT - 1) for start, end in zip(first, last, strict=True)], 90)


def p90_ttft(arrivals: list[float], first: list[float]) -> float:
    """Return P90 TTFT."""
    return percentile([one - arrival for arrival, one in zip(arrivals, first, strict=True)], 90)


def meets_on_one(rate: float, tpot_limit: float = TPOT) -> bool:
    """Return whether a replica that prefills and decodes meets the limits."""
    sequences = make_sequences([PROMPT] * REQUESTS, [OUTPUT] * REQUESTS, poisson(REQUESTS, rate))
    served = serve(sequences, CONFIG, seconds)
    ttft, tpot = percentile([one.ttft for one in served], 90), percentile([one.tpot for one in served], 90)
    return ttft <= TTFT and tpot <= tpot_limit


def meets_ttft(rate: float, replicas: int = 1) -> bool:
    """Return whether replicas that only prefill meet the limit on TTFT."""
    arrivals = poisson(REQUESTS, rate)
    return p90_ttft(arrivals, prefill(arrivals, replicas)) <= TTFT


def meets_tpot(rate: float) -> bool:
    """Return whether a replica that only decodes meets the limit on TPOT."""
    arrivals = poisson(REQUESTS, rate)
    return p90_tpot(arrivals, decode(arrivals)) <= TPOT


def meets_on_three(rate: float) -> bool:
    """Return whether two replicas that prefill and one that decodes meet both limits."""
    arrivals = poisson(REQUESTS, rate)
    first = prefill(arrivals, 2)
    last = decode([time + TRANSFER for time in first])
    return p90_ttft(arrivals, first) <= TTFT and p90_tpot(first, last) <= TPOT


def figures() -> list[Figure]:
    """Return goodputs in requests per second."""
    prefills, decodes = highest_rate(meets_ttft, 2, 16), highest_rate(meets_tpot, 4, 32)
    one, three = highest_rate(meets_on_one, 0.5, 4), highest_rate(meets_on_three, 4, 32) / 3
    any_tpot = highest_rate(lambda rate: meets_on_one(rate, math.inf), 1, 8)
    fitted = "Fitted: this figure determines our iteration's {}."
    return [
        Figure(
            "goodput of a GPU that only prefills, per second", "5.6", f"{prefills:.1f}", fitted.format("time per token")
        ),
        Figure("of a GPU that only decodes", "10", f"{decodes:.1f}", fitted.format("constant part")),
        Figure(
            "of a GPU that does both",
            "1.6",
            f"{one:.1f}",
            "Our iteration time is a straight line, fitted at about 26 rows. With 3 rows, a GPU may be faster.",
        ),
        Figure("the same without a limit on TPOT", "3", f"{any_tpot:.1f}", "The same."),
        Figure(
            "per GPU, of two that prefill and one that decodes",
            "3.3",
            f"{three:.1f}",
            "The paper adds up its separate figures; ours is a run of three replicas that moves keys and values.",
        ),
        Figure("separate, relative to both on one", "2.1", f"{three / one:.1f}", "It follows from the lines above."),
    ]
