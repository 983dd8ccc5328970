"""DistServe (Zhong et al., OSDI 2024): goodput with prefill and decode on the same GPU, and on separate ones.

Kept: the paper's first figure. It has a model of 13B parameters on A100s, prompts of 512 tokens, outputs of 64, and
Poisson arrivals. Goodput is the highest rate with a P90 TTFT of at most 0.4 s and a P90 TPOT of at most 0.04 s.
Scaled down: 150 requests per rate, and no model. An iteration takes 27.8 ms for the weights, 190 us per token, and 0.41
us per key that it reads (819,200 bytes at 2 TB/s). The first two are fitted to two published figures: the goodput of a
GPU that only prefills, and of one that only decodes. The other goodputs follow. Moving the keys and values of a prompt
takes 1.4 ms (419 MB at 300 GB/s).
"""

import math

from helpers.cluster.routing import RoundRobin
from helpers.engine import EngineConfig
from helpers.simulator import CostModel, FleetResult, TimedRequest, simulate_disaggregated, simulate_fleet

from .replica import Figure, highest_rate, poisson

REQUESTS, PROMPT, OUTPUT, ROWS = 150, 512, 64, 256
TTFT, TPOT = 0.4, 0.04
COST = CostModel(iterations=27.8e-3, tokens=190e-6, keys=0.41e-6)
TRANSFER = 1.4e-3 / PROMPT  # seconds per token
# Prefills and decodes take turns, one prompt at a time: 512 tokens occupy the GPU.
CONFIG = EngineConfig(max_batch_size=ROWS, max_tokens_per_step=PROMPT, mixed_batches=False, chunked_prefill=False)


def on_one_replica(arrivals: list[float], output_tokens: int = OUTPUT) -> FleetResult:
    """Return the result of a replica that prefills and decodes; with one output token, it only prefills."""
    requests = [TimedRequest(arrival, PROMPT, output_tokens) for arrival in arrivals]
    return simulate_fleet(requests, CONFIG, COST, 1, RoundRobin())


def on_separate_replicas(arrivals: list[float], prefills: int, seconds_per_token: float = TRANSFER) -> FleetResult:
    """Return the result of replicas that prefill and one that decodes."""
    requests = [TimedRequest(arrival, PROMPT, OUTPUT) for arrival in arrivals]
    routers = RoundRobin(), RoundRobin()
    return simulate_disaggregated(requests, CONFIG, COST, prefills, 1, *routers, seconds_per_token=seconds_per_token)


def is_within(result: FleetResult, ttft: float = TTFT, tpot: float = TPOT) -> bool:
    """Return whether the P90 latencies are within the limits."""
    return result.percentile("ttft", 90) <= ttft and (result.percentile("tpot", 90) or 0) <= tpot


def meets_on_one(rate: float, tpot_limit: float = TPOT) -> bool:
    """Return whether a replica that prefills and decodes meets the limits."""
    return is_within(on_one_replica(poisson(REQUESTS, rate)), tpot=tpot_limit)


def meets_ttft(rate: float) -> bool:
    """Return whether a replica that only prefills meets the limit on TTFT."""
    return is_within(on_one_replica(poisson(REQUESTS, rate), output_tokens=1))


def meets_tpot(rate: float) -> bool:
    """Return whether a replica that only decodes meets the limit on TPOT; no prompt waits for another one."""
    return is_within(on_separate_replicas(poisson(REQUESTS, rate), REQUESTS, 0), ttft=math.inf)


def meets_on_three(rate: float) -> bool:
    """Return whether two replicas that prefill and one that decodes meet both limits."""
    return is_within(on_separate_replicas(poisson(REQUESTS, rate), 2))


def figures() -> list[Figure]:
    """Return goodputs in requests per second."""
    prefills, decodes = highest_rate(meets_ttft, 2, 16), highest_rate(meets_tpot, 4, 32)
    shared, separate = highest_rate(meets_on_one, 0.5, 4), highest_rate(meets_on_three, 4, 32) / 3
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
            f"{shared:.1f}",
            "Our iteration time is a straight line, fitted at about 26 rows. With 3 rows, a GPU may be faster.",
        ),
        Figure("the same without a limit on TPOT", "3", f"{any_tpot:.1f}", "The same."),
        Figure(
            "per GPU, of two that prefill and one that decodes",
            "3.3",
            f"{separate:.1f}",
            "The paper adds up its separate figures; ours is a run of three replicas that moves keys and values.",
        ),
        Figure(
            "separate, relative to both on one", "2.1", f"{separate / shared:.1f}", "It follows from the lines above."
        ),
    ]
