"""Choose by measurement for how many rows one call computes all blocks faster than many calls do.

Both ways decode on a small pool of their own, in turns. Each makes two passes, of which the second one counts: in an
engine, too, the pass before has read the same copy of the weights. A call saves most with one row and less with each
further one, so the first number of rows for which it loses ends the measurement.

The times are kept beside those of the linear layers (`linear_choice.py`), on which they depend.
"""

import itertools
import math
import time
from collections.abc import Callable

import torch

from ..models.quantization import QuantizedLinear
from ..runners.attention import AttentionMetadata, QuerySegment
from ..runners.kv_pool import KVPool
from .attention import attend_with_kernel
from .executor import Executor
from .fused_executor import FusedExecutor, can_be_read
from .linear import MIN_MODEL_BYTES
from .linear_backends import bytes_of, kind_of
from .linear_choice import BUDGET, MIN_SAVING, ROUNDS, ROWS, Times, kept_or_measured, shape_of

MANY, ONE = "pytorch", "compiled blocks"  # the names under which times are kept
BLOCK_SIZE, PAST = 4, 3  # of each row: a short sequence in a block of its own


def measure_one_call(executor: Executor) -> None:
    """Choose the most rows of a call if the layers of the blocks are large and are multiplied by several backends.

    If the one call needs copies of weights that no layer has yet, it must save `MIN_SAVING` of the time for some number
    of rows: otherwise they are not worth their memory. Quantized weights are read where they are.
    """
    linears = [layer for block in executor.decoder.blocks for layer in block.linears]
    layers = [getattr(layer, "layer", layer) for layer in linears]
    if not executor.plain.compiled or not all(map(can_be_read, linears)):
        return
    if sum(map(bytes_of, layers)) < MIN_MODEL_BYTES:
        return
    backends = [getattr(layer, "backends", ["pytorch"]) for layer in linears]
    if all(set(one) == {"compiled"} for one in backends):
        return
    trial = _Trial(executor)
    if not trial.fused.max_rows:
        return
    shapes = dict.fromkeys(f"{shape_of(layer)} {' '.join(of)}" for layer, of in zip(layers, backends, strict=True))
    name = f"{len(executor.decoder.blocks)} blocks: {'; '.join(shapes)}"
    times = kept_or_measured(kind_of(layers[0])[0], [name], [MANY, ONE], lambda: {name: trial.measure()})[name]
    no_copies = all(
        "compiled" in of or isinstance(layer, QuantizedLinear) for layer, of in zip(layers, backends, strict=True)
    )
    trial.fused.limit(most_rows(times, 0 if no_copies else MIN_SAVING))
    executor.fused = trial.fused


def most_rows(times: Times, min_saving: float) -> float:
    """Return the most rows for which one call is faster; 0 if it nowhere saves this share of the time."""
    pairs = list(zip(times.seconds[MANY], times.seconds[ONE], strict=True))
    pairs = list(itertools.takewhile(lambda pair: pair[1] <= pair[0], pairs))
    if not any(one <= (1 - min_saving) * many for many, one in pairs):
        return 0
    if len(pairs) == len(ROWS):
        return math.inf
    return math.isqrt(ROWS[len(pairs) - 1] * ROWS[len(pairs)])  # other numbers take the choice for the nearest one


class _Trial:
    """Decodes on a pool of its own."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.pool = KVPool(max(ROWS), BLOCK_SIZE)
        self._run(executor.plain, 1)  # this allocates the pool's tensors
        self.fused = FusedExecutor(executor.decoder, executor.settings, self.pool, math.inf)

    def measure(self) -> Times:
        """Time both ways for each number of rows, until one call loses or the budget is spent."""
        deadline = time.perf_counter() + BUDGET
        ways = {MANY: self.executor.plain, ONE: self.fused}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for rows in ROWS:
            rounds = []
            while len(rounds) < ROUNDS and (not rounds or time.perf_counter() < deadline):
                rounds.append([self._second_of_two(blocks, rows) for blocks in ways.values()])
            for name, taken in zip(ways, zip(*rounds, strict=True), strict=True):
                seconds[name].append(min(taken))
            if seconds[ONE][-1] > seconds[MANY][-1] or time.perf_counter() > deadline:
                break
        return Times(seconds)

    def _second_of_two(self, blocks: Callable, rows: int) -> float:
        self._run(blocks, rows)
        return self._run(blocks, rows)

    @torch.inference_mode()
    def _run(self, blocks: Callable, rows: int) -> float:
        """Compute a decode of this many rows; return its seconds."""
        norm = self.executor.decoder.final_norm.weight
        hidden = torch.ones(rows, len(norm), dtype=norm.dtype, device=norm.device)
        positions = torch.full((rows,), PAST, device=norm.device)
        rotary = self.executor.cos_and_sin(hidden, positions) if self.executor.decoder.rotary is not None else None
        segments = [QuerySegment(row, 1, PAST, [row]) for row in range(rows)]
        row = AttentionMetadata(self.pool, segments, positions + BLOCK_SIZE * torch.arange(rows), attend_with_kernel)
        start = time.perf_counter()
        blocks(hidden, rotary, row)
        return time.perf_counter() - start
