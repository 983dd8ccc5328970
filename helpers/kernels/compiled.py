"""Compile the kernels for this machine's processor and load them; once, as long as nothing changes.

They are handed addresses, through ctypes, so that compiling takes no headers of Python's or PyTorch's. The library is
kept in build/kernels/, which `make clean` removes.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "kernels"
FLAGS = ["-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-exceptions", "-fPIC"]
# OpenMP is not linked: its functions are found in the library that PyTorch has loaded. Another one would bring threads
# of its own, and PyTorch's, which wait for work in a busy loop, would keep the cores from them.
LINK = ["-shared", "-nostdlib"]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def unavailable(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> str | None:
    """Why there are no kernels for tensors of this dtype on this device; None if there are."""
    if torch.device(device).type != "cpu":
        return f"they are for the CPU, not for {device}"
    if dtype not in DTYPES:
        return f"they are for float32 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
    return _problem()


@functools.cache
def _problem() -> str | None:
    try:
        library()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error) or repr(error)
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        RuntimeError: no compiler, or it failed.
        OSError: the folder cannot be written to, or what was compiled cannot be loaded.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"they are made for Linux, not for {sys.platform}")
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (on Debian and Ubuntu: apt install g++)")
    path = BUILD / f"kernels-{_fingerprint(compiler)}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:  # another process may be at it, too
            for source in HERE.glob("*.cpp"):
                _run(compiler, *FLAGS, "-c", str(source), "-o", f"{folder}/{source.stem}.o")
            objects = [str(file) for file in Path(folder).glob("*.o")]
            _run(compiler, *LINK, *objects, "-lm", "-o", f"{folder}/{path.name}")
            Path(folder, path.name).replace(path)
    return ctypes.CDLL(str(path))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def _fingerprint(compiler: str) -> str:
    """A name that changes with the sources, the flags, the compiler and the processor's instructions."""
    macros = [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    machine = subprocess.run(macros, capture_output=True, timeout=60).stdout
    sources = [path.read_bytes() for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])]
    return hashlib.sha256(b"\0".join([machine, " ".join(FLAGS + LINK).encode(), *sources])).hexdigest()[:16]
