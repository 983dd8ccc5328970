"""What this machine has, and a limit that is measured: how fast it reads memory.

A forward pass cannot be faster than this limit allows (Williams et al., Roofline, CACM 2009). The measurements differ
from run to run and from machine to machine, so no test asserts their values.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the median wall-clock seconds of `function()` after one warm-up call, its work on a GPU included."""
    function()
    times = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        function()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cpuinfo() -> dict[str, str]:
    """Return what Linux says about the first core (/proc/cpuinfo), by field; an empty dict on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def memory_bytes() -> int:
    """Return the bytes of this machine's memory; 0 if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return 0


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_bandwidth(device: str = "cpu", megabytes: int = 512) -> float:
    """Return the bytes per second that the device reads, measured by summing a tensor larger than most caches."""
    data = torch.ones(megabytes * 250_000, device=device)
    return data.nbytes / seconds(lambda: data.sum())
