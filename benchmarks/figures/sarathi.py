"""Sarathi-Serve (Agrawal et al., OSDI 2024): what mixed batches and chunked prefills do, alone and together.

Kept: 128 requests with Poisson arrivals, prompts and outputs with the medians of openchat_sharegpt4 (1,730 and 415
tokens), at most 8,192 tokens together, and at most 1,024 tokens per iteration where prompts are computed in chunks.
Scaled down: there is no model. An iteration takes about as long as Yi-34B's on two A100s: 109 us per token (68e9
operations at 624 TFLOPS), 0.06 us per key that a decode reads (246 kB at 4 TB/s), and 30 ms for the weights. A decode
of 32 rows with contexts of 4,096 tokens then takes 41 ms. In the paper it takes 40 ms, a fifth of the strict SLO.
Lengths are log-normal with spreads of our choice. The load, 2.2 requests per second, is our choice, too.
"""

import random
from dataclasses import dataclass

from helpers.engine import EngineConfig, Plan, Sequence
from helpers.metrics import RequestMetrics, percentile

from .replica import NO_LIMIT, Figure, make_sequences, poisson, run

REQUESTS, RATE, LONGEST, BUDGET, ROWS = 128, 2.2, 8192, 1024, 128
SETTINGS = {
    "mixed": EngineConfig(max_batch_size=ROWS, max_tokens_per_step=NO_LIMIT, chunked_prefill=False),
    "chunked": EngineConfig(max_batch_size=ROWS, max_tokens_per_step=BUDGET, mixed_batches=False),
    "both": EngineConfig(max_batch_size=ROWS, max_tokens_per_step=BUDGET),
}
DECODES = 0.041  # seconds of an iteration of 32 decodes with contexts of 4,096 tokens


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


@dataclass(frozen=True)
class Measured:
    """What a run is judged by.

    Attributes:
        ttft: the median TTFT, in seconds.
        itl: the 99th percentile of ITL, in seconds; the paper calls it time between tokens (TBT).
        gap: the largest ITL, in seconds.
        stall: the most tokens computed from one token of a request to its next one.
    """

    ttft: float
    itl: float
    gap: float
    stall: int


def measure(config: EngineConfig) -> Measured:
    """Run the requests with these settings, and return what the run is judged by."""
    sequences, longest, computed = requests(), 0, 0
    latest: dict[Sequence, int] = {}  # the tokens computed when a sequence got its latest token
    for plan in run(sequences, config, seconds):
        computed += plan.tokens
        for chunk in plan.chunks:
            if chunk.samples_token:
                longest = max(longest, computed - latest.get(chunk.sequence, computed))
                latest[chunk.sequence] = computed
    served = [
        RequestMetrics(sequence.request_id, sequence.request.arrival, sequence.token_times) for sequence in sequences
    ]
    gaps = [gap for request in served for gap in request.itl]
    return Measured(percentile([request.ttft for request in served], 50), percentile(gaps, 99), max(gaps), longest)


def figures() -> list[Figure]:
    """Return the ablation and the stalls."""
    mixed, chunked, both = (measure(config) for config in SETTINGS.values())
    return [
        Figure(
            "mixed batches only: median TTFT, P99 ITL",
            "0.53 s, 0.68 s",
            f"{mixed.ttft:.2f} s, {mixed.itl:.2f} s",
            "The paper does not state its load, so we chose ours. Our times come from the hardware's speeds and the "
            "paper's SLO.",
        ),
        Figure(
            "chunked prefills only",
            "1.04 s, 0.17 s",
            f"{chunked.ttft:.2f} s, {chunked.itl:.2f} s",
            "The same. In both, prompts wait during every iteration of decodes.",
        ),
        Figure("both", "0.76 s, 0.14 s", f"{both.ttft:.2f} s, {both.itl:.2f} s", "The same."),
        Figure(
            "longest ITL with mixed batches, in multiples of a decode-only iteration",
            "28.3",
            f"{mixed.gap / DECODES:.1f}; {both.gap / DECODES:.1f} with chunks",
            "Published: the worst of a few chosen batches. Ours: the worst of a run.",
        ),
        Figure(
            "most tokens computed between two consecutive tokens of a request",
            "at most 1,024 with chunks",
            f"{mixed.stall:,}; {both.stall:,} with chunks",
            "With chunks, the token budget is the bound. Without them, several prompts can share an iteration.",
        ),
    ]
