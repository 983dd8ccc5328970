"""Sarathi-Serve (Agrawal et al., OSDI 2024): what mixed batches and chunked prefills do, alone and together.

Kept: 128 requests with Poisson arrivals, prompts and outputs with the medians of openchat_sharegpt4 (1,730 and 415
tokens), at most 8,192 tokens together, and at most 1,024 tokens per iteration where prompts are computed in chunks.
Scaled down: there is no model. An iteration takes as long as Yi-34B's on two A100s might: 30 ms for the weights, and
109 us per token (2 x 34e9 operations at 624 TFLOPS) and 0.06 us per key that a decode reads (246 kB at 4 TB/s). With
32 rows and contexts of 4,096 tokens, that makes 41 ms; the paper's strict limit of 200 ms is 5 times such an iteration.
Lengths are log-normal, as only some of their statistics are published. The load of the ablation is not published:
1.2 requests per second gives the published median TTFT of mixed batches alone.
"""

import random
from collections.abc import Callable

from helpers.engine import EngineConfig, Plan, Sequence
from helpers.metrics import percentile

from .replica import NO_LIMIT, Figure, make_sequences, metrics, poisson, run

REQUESTS, RATE, LONGEST, BUDGET, ROWS = 128, 1.2, 8192, 1024, 128
PUBLISHED = {"mixed": (0.53, 0.68), "chunked": (1.04, 0.17), "both": (0.76, 0.14)}
SETTINGS = {
    "mixed": EngineConfig(max_batch_size=ROWS, max_tokens_per_step=NO_LIMIT, chunked_prefill=False),
    "chunked": EngineConfig(max_batch_size=ROWS, max_tokens_per_step=BUDGET, mixed_batches=False),
    "both": EngineConfig(max_batch_size=ROWS, max_tokens_per_step=BUDGET),
    "neither": EngineConfig(
        max_batch_size=ROWS, max_tokens_per_step=NO_LIMIT, mixed_batches=False, chunked_prefill=False
    ),
}


def seconds(plan: Plan) -> float:
    """Return the duration of an iteration."""
    return 0.030 + 109e-6 * plan.tokens + 0.06e-6 * sum(chunk.end for chunk in plan.chunks if chunk.is_decode)


def requests() -> list[Sequence]:
    """Draw requests; those that are too long are drawn again."""
    draw, prompts, outputs = random.Random(4), [], []
    while len(prompts) < REQUESTS:
        prompt, output = int(1730 * draw.lognormvariate(0, 0.93)), int(415 * draw.lognormvariate(0, 0.55))
        if prompt and output and prompt + output <= LONGEST:
            prompts.append(prompt)
            outputs.append(output)
    return make_sequences(prompts, outputs, poisson(REQUESTS, RATE))


def measure(config: EngineConfig) -> tuple[float, float, int]:
    """Return the median TTFT and the 99th percentile of ITL, in seconds, and the longest stall, in tokens.

    The stall is the largest number of tokens that are computed between two tokens of a request, the second included.
    """
    sequences, longest, computed = requests(), 0, 0
    latest: dict[Sequence, int] = {}  # the tokens computed when a sequence got its latest token
    for plan in run(sequences, config, seconds):
        computed += plan.tokens
        for chunk in plan.chunks:
            if chunk.samples_token:
                longest = max(longest, computed - latest.get(chunk.sequence, computed))
                latest[chunk.sequence] = computed
    served = metrics(sequences)
    gaps = [gap for one in served for gap in one.itl]
    return percentile([one.ttft for one in served], 50), percentile(gaps, 99), longest


def figures() -> list[Figure]:
    """Return the ablation and the stalls."""
    return [Figure(name, str(PUBLISHED.get(name)), "%.2f %.2f %d" % measure(SETTINGS[name]), "") for name in SETTINGS]
