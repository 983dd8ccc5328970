"""Orca (Yu et al., OSDI 2022): 36.9 times FasterTransformer's throughput at the same latency, for GPT-3 175B.

Kept: prompts uniform over 32 to 512 tokens, outputs uniform over 1 to 128, Poisson arrivals, at most 32 rows for Orca,
and 1 or 8 for FasterTransformer, whichever is better. The latency is the median over the requests of the time per
output token; its limit is about twice the time of an iteration (published: 190 ms and 95 ms). FasterTransformer
computes the prompts of a batch together up to the end of the shortest, then all rows token by token. It returns all
outputs of a batch when the longest is complete.
Scaled down: 150 requests per rate, and one pipeline stage instead of two. The unit of time is one
reading of the weights. An iteration takes 1 for the weights, and 1 per 200 tokens: an A100 computes about 200
operations in the time in which it reads a byte (312 TFLOPS, 1.6 TB/s).
"""

import random
import statistics

from helpers.engine import Chunk, EngineConfig, Plan, Scheduler, Sequence

from .replica import NO_LIMIT, Figure, highest_rate, make_sequences, poisson, serve

REQUESTS, TOKENS_PER_WEIGHTS, LATENCY = 150, 200, 2.0
ORCA_ROWS, STATIC_ROWS = 32, (1, 8)


class FasterTransformer(Scheduler):
    """Plans static batches, whose prompts are computed together up to the end of the shortest, then token by token.

    Attributes:
        batches: the sequences of each batch so far.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.batches = []

    def choose_chunks(self, plan: Plan) -> None:
        """Choose the same number of tokens for every row."""
        super().choose_chunks(plan)
        width = 1
        if all(chunk.start == 0 for chunk in plan.chunks):
            self.batches.append(plan.sequences)
            width = min(chunk.tokens for chunk in plan.chunks)
        plan.chunks = [Chunk(chunk.sequence, width) for chunk in plan.chunks]


def seconds(plan: Plan) -> float:
    """Return the duration of an iteration; 1 is the time of reading the weights once."""
    return 1 + plan.tokens / TOKENS_PER_WEIGHTS


def latencies(sequences: list[Sequence], rows: int, is_static: bool) -> list[float]:
    """Return each request's latency, divided by the length of its output."""
    config = EngineConfig(max_batch_size=rows, max_tokens_per_step=NO_LIMIT, policy="static" if is_static else "fcfs")
    scheduler = FasterTransformer(config) if is_static else Scheduler(config)
    serve(sequences, scheduler, seconds)
    returned_together = scheduler.batches if is_static else [[sequence] for sequence in sequences]
    found = []
    for batch in returned_together:
        end = max(sequence.token_times[-1] for sequence in batch)
        found += [(end - sequence.request.arrival) / sequence.generated for sequence in batch]
    return found


def median_latency(rate: float, rows: int, is_static: bool) -> float:
    """Return the median latency per output token at a rate."""
    draw = random.Random(1)
    prompts = [draw.randint(32, 512) for _ in range(REQUESTS)]
    outputs = [draw.randint(1, 128) for _ in range(REQUESTS)]
    sequences = make_sequences(prompts, outputs, poisson(REQUESTS, rate))
    return statistics.median(latencies(sequences, rows, is_static))


def capacity(rows: int, is_static: bool, low: float, high: float) -> float:
    """Return the highest rate between `low` and `high` at which a server meets the limit on latency."""
    return highest_rate(lambda rate: median_latency(rate, rows, is_static) <= LATENCY, low, high, halvings=5)


def figures() -> list[Figure]:
    """Return Orca's throughput in multiples of FasterTransformer's."""
    static = {rows: capacity(rows, True, 0.005, 0.02) for rows in STATIC_ROWS}
    times = capacity(ORCA_ROWS, False, 0.15, 0.6) / max(static.values())
    return [
        Figure(
            "throughput at equal latency, in multiples of FasterTransformer's",
            "36.9",
            f"{times:.1f}",
            "In our runs, iterations of equal size take equally long. With equal batches, the paper's engine is up "
            f"to 47% faster than FasterTransformer, and 1.47 × {times:.1f} = {1.47 * times:.0f}. "
            "Pipelining is left out.",
        ),
        Figure(
            "FasterTransformer's throughput with 8 rows, in multiples of that with 1 row",
            "no gain",
            f"{static[8] / static[1]:.1f}",
            "As in the paper: a batch waits for its longest prompt and its longest output.",
        ),
    ]
