"""What the figures were measured on: processor, matrix units, versions."""

import datetime
import importlib.metadata
import os
import platform

import torch

from helpers.hardware import cpuinfo

# Instructions that multiply matrices or bfloat16 numbers, as Linux names them: x86's, then ARM's.
MATRIX_UNITS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni", "sme", "i8mm", "bf16", "sve")


def describe() -> dict:
    """Return what a reader needs to know of the machine to judge a figure."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "matrix units": matrix_units(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        **{name: os.environ.get(name, "not set") for name in ("OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE")},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
    }


def processor() -> str:
    """Return the processor's name."""
    return cpuinfo().get("model name") or platform.processor() or platform.machine()


def matrix_units() -> list[str]:
    """Return the processor's instructions for matrices and bfloat16; an empty list where Linux does not tell."""
    fields = cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return [unit for unit in MATRIX_UNITS if unit in flags]
