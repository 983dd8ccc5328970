"""DistServe (Zhong et al., OSDI 2024): goodput with prefill and decode on one GPU, and on separate ones.

Kept: the paper's first figure. A model of 13B parameters, prompts of 512 tokens, outputs of 64, Poisson arrivals, and a
goodput that counts rates for which P90 TTFT is at most 0.4 s and P90 TPOT at most 0.04 s.
Scaled down: 300 requests per rate, no model. An iteration takes A for the weights, B per token, and 0.41 us per key
that a decode reads (819,200 bytes at 2 TB/s). A and B are fitted to two of the published figures, the goodput of a GPU
that only prefills and of one that only decodes; the others follow. A prompt's keys and values take 1.4 ms to move
(419 MB at 300 GB/s).
"""

from helpers.engine import EngineConfig, Plan, Sequence
from helpers.metrics import percentile

from .replica import Figure, highest_rate, make_sequences, metrics, poisson, run

REQUESTS, PROMPT, OUTPUT, ROWS = 300, 512, 64, 256
TTFT, TPOT = 0.4, 0.04
A, B, PER_KEY, TRANSFER = 0.0285, 160e-6, 0.41e-6, 0.0014
TOGETHER = EngineConfig(max_batch_size=ROWS, max_tokens_per_step=PROMPT, mixed_batches=False, chunked_prefill=False)
DECODES_ONLY = EngineConfig(max_batch_size=ROWS, max_tokens_per_step=10**9)


def seconds(plan: Plan) -> float:
    """Return the duration of an iteration."""
    return A + B * plan.tokens + PER_KEY * sum(chunk.end for chunk in plan.chunks if chunk.is_decode)


def seconds_of_decodes(plan: Plan) -> float:
    """Return the duration of an iteration for which the keys and values of all prompts have been received."""
    return A + B * len(plan.chunks) + PER_KEY * sum(chunk.end for chunk in plan.chunks)


def prefill(arrivals: list[float], replicas: int) -> list[float]:
    """Return when each request's first token is available, from replicas that take turns."""
    sequences = make_sequences([PROMPT] * len(arrivals), [1] * len(arrivals), arrivals)
    for replica in range(replicas):
        for _ in run(sequences[replica::replicas], TOGETHER, seconds):
            pass
    return [sequence.token_times[0] for sequence in sequences]


def decode(arrivals: list[float]) -> list[float]:
    """Return when the last token of each request is available; it arrives with its prompt and its first token."""
    sequences = make_sequences([PROMPT + 1] * len(arrivals), [OUTPUT - 1] * len(arrivals), arrivals)
    for _ in run(sequences, DECODES_ONLY, seconds_of_decodes):
        pass
    return [sequence.token_times[-1] for sequence in sequences]


def percentiles(arrivals, first: list[float], last: list[float]) -> tuple[float, float]:
    """Return P90 TTFT and P90 TPOT, given when each request's first and last token were available."""
    ttft = [one - arrival for one, arrival in zip(first, arrivals, strict=True)]
    tpot = [(end - one) / (OUTPUT - 1) for one, end in zip(first, last, strict=True)]
    return percentile(ttft, 90), percentile(tpot, 90)


def together(rate: float) -> tuple[float, float]:
    """Return P90 TTFT and P90 TPOT of a replica that computes prompts and outputs."""
    arrivals = poisson(REQUESTS, rate)
    sequences = make_sequences([PROMPT] * REQUESTS, [OUTPUT] * REQUESTS, arrivals)
    for _ in run(sequences, TOGETHER, seconds):
        pass
    served = metrics(sequences)
    return percentiles(arrivals, [one.token_times[0] for one in served], [one.token_times[-1] for one in served])


def separate(rate: float, prefill_replicas: int) -> tuple[float, float]:
    """Return P90 TTFT and P90 TPOT of a fleet in which one replica decodes and the others prefill."""
    arrivals = poisson(REQUESTS, rate)
    first = prefill(arrivals, prefill_replicas)
    moved = sorted(time + TRANSFER for time in first)
    return percentiles(arrivals, sorted(first), decode(moved))


def goodputs() -> dict[str, float]:
    """Return the highest rates within the limits, per second."""

    def is_prefilled(rate: float) -> bool:
        arrivals = poisson(REQUESTS, rate)
        first = prefill(arrivals, 1)
        return percentiles(arrivals, first, first)[0] <= TTFT

    def is_decoded(rate: float) -> bool:
        arrivals = poisson(REQUESTS, rate)
        return percentiles(arrivals, arrivals, decode(arrivals))[1] <= TPOT

    def is_met(latencies: tuple[float, float]) -> bool:
        return latencies[0] <= TTFT and latencies[1] <= TPOT

    return {
        "prefill": highest_rate(is_prefilled, 1, 16),
        "decode": highest_rate(is_decoded, 1, 16),
        "together, TTFT alone": highest_rate(lambda rate: together(rate)[0] <= TTFT, 0.1, 16),
        "together": highest_rate(lambda rate: is_met(together(rate)), 0.1, 16),
        "separate": highest_rate(lambda rate: is_met(separate(rate, 2)), 1, 16),
    }


def figures():
    return [goodputs()]
