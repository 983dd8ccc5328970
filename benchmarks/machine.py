"""What the figures were measured on: processor, versions, and how fast memory can be read."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from helpers.hardware import memory_bandwidth


def describe() -> dict:
    """Return what a reader needs to know of the machine to judge a figure. Bandwidth is in bytes per second."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "load average": list(os.getloadavg()),  # above 0.5 or so, other programs were running
        **{name: os.environ.get(name, "not set") for name in ("OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")},
        "memory bandwidth": memory_bandwidth(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
    }


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
