"""Orca (Yu et al., OSDI 2022): 36.9 times FasterTransformer's throughput at the same latency, for GPT-3 175B.

Kept: prompts uniform over 32 to 512 tokens, outputs uniform over 1 to 128, Poisson arrivals, at most 32 rows for Orca,
and 1 or 8 for FasterTransformer, whichever is better. The limit is kept, too: the median latency per output token is
twice that of an iteration with one row (190 ms; Orca's iterations take about 95 ms). FasterTransformer computes the
prompts of a batch together up to the length of the shortest, then all rows token by token. It returns all outputs of a
batch when the longest is complete.
Scaled down: 200 requests per rate, and one pipeline stage instead of two. An iteration takes 1 for the weights, and 1
per 200 tokens: an A100 computes about 200 operations in the time in which it reads a byte (312 TFLOPS, 1.6 TB/s).
"""

import random
import statistics

from helpers.engine import Chunk, EngineConfig, Plan, Scheduler

from .replica import NO_LIMIT, Figure, highest_rate, make_sequences, poisson, run

REQUESTS, TOKENS_PER_WEIGHTS, LIMIT = 200, 200, 2.0
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
        """Let all rows compute equally many tokens."""
        super().choose_chunks(plan)
        width = 1
        if all(chunk.start == 0 for chunk in plan.chunks):
            self.batches.append(plan.sequences)
            width = min(chunk.tokens for chunk in plan.chunks)
        plan.chunks = [Chunk(chunk.sequence, width) for chunk in plan.chunks]


def seconds(plan: Plan) -> float:
    """Return the duration of an iteration, in readings of the weights."""
    return 1 + plan.tokens / TOKENS_PER_WEIGHTS


def median_latency(rate: float, rows: int, is_static: bool) -> float:
    """Return the median of the requests' latencies, each divided by the length of its output."""
    draw = random.Random(1)
    prompts = [draw.randint(32, 512) for _ in range(REQUESTS)]
    outputs = [draw.randint(1, 128) for _ in range(REQUESTS)]
    sequences = make_sequences(prompts, outputs, poisson(REQUESTS, rate))
    config = EngineConfig(max_batch_size=rows, max_tokens_per_step=NO_LIMIT, policy="static" if is_static else "fcfs")
    scheduler = FasterTransformer(config) if is_static else Scheduler(config)
    for _ in run(sequences, scheduler, seconds):
        pass
    batches = scheduler.batches if is_static else [[sequence] for sequence in sequences]
    latencies = []
    for batch in batches:
        end = max(sequence.token_times[-1] for sequence in batch)
        latencies += [(end - sequence.arrival) / sequence.generated for sequence in batch]
    return statistics.median(latencies)


def capacity(rows: int, is_static: bool) -> float:
    """Return the requests per second that a server takes within the limit."""
    return highest_rate(lambda rate: median_latency(rate, rows, is_static) <= LIMIT, 0.0005, 0.5)


def figures() -> list[Figure]:
    """Return Orca's throughput in multiples of FasterTransformer's."""
    static = {rows: capacity(rows, True) for rows in STATIC_ROWS}
    times = capacity(ORCA_ROWS, False) / max(static.values())
    best = max(static, key=static.get)
    return [Figure("throughput at twice the idle latency, times FasterTransformer", "36.9", f"{times:.1f}", str((best, static)))]
