"""What this machine can do, measured: how fast it reads memory and how fast it multiplies.

Both are ceilings: a forward pass can be no faster than the slower of the two allows (Williams et al., Roofline,
CACM 2009). Figures differ from run to run and from machine to machine; none is ever asserted.
"""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Median wall-clock seconds of `function()` after one warm-up call, the work on a GPU included."""
    function()
    times = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        function()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_bandwidth(device: str = "cpu", megabytes: int = 512) -> float:
    """Bytes a second that can be read: a sum over a tensor far larger than any cache."""
    data = torch.ones(megabytes * 250_000, device=device)
    return data.nbytes / seconds(lambda: data.sum())


def matmul_rate(device: str = "cpu", size: int = 1536) -> float:
    """Floating-point operations a second in a float32 product of two square matrices (2 * size**3 operations)."""
    matrix = torch.ones(size, size, device=device)
    return 2 * size**3 / seconds(lambda: matrix @ matrix)
