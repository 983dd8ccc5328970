"""Compile the kernels for this machine's processor and load them.

Python passes addresses to the library through ctypes, so compiling needs no headers of Python or PyTorch. The library
is kept in the user's cache folder. It is recompiled when the sources, the flags, the compiler or the processor change.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...hardware import cpuinfo

SOURCES = Path(__file__).resolve().parent
FLAGS = ["-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-exceptions", "-fPIC"]
if cpuinfo().get("vendor_id") == "AuthenticAMD":
    FLAGS.append("-DAMD")  # see prefetch.h
# OpenMP is not linked: its functions come from the library that PyTorch has loaded. A second OpenMP would start threads
# of its own. PyTorch's threads wait for work in a busy loop, so both would compete for the cores.
LINK_FLAGS = ["-shared", "-nostdlib"]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def unavailable(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> str | None:
    """Return why no kernel can run on tensors of this dtype on this device, or None if one can."""
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


def cache_folder() -> Path:
    """Return the folder of the compiled libraries: COURSE_KERNEL_CACHE if it is set, else one in the user's cache."""
    return Path(os.environ.get("COURSE_KERNEL_CACHE") or "~/.cache/continuous-batching/kernels").expanduser()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels, compiling them if necessary.

    Raises:
        RuntimeError: the platform is not supported, there is no compiler, or the compiler failed.
        OSError: the cache folder is not writable, or the library cannot be loaded.
        subprocess.TimeoutExpired: the compiler took too long.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"they are for Linux, not for {sys.platform}")
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (on Debian and Ubuntu: apt install g++)")
    folder = cache_folder()
    path = folder / f"kernels-{_fingerprint(compiler)}.so"
    if path.exists():
        return ctypes.CDLL(str(path))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # another process may be compiling at the same time
        objects = {str(source): f"{temporary}/{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        with ThreadPoolExecutor() as pool:  # a compiler for each source, side by side
            list(pool.map(lambda source: _run(compiler, *FLAGS, "-c", source, "-o", objects[source]), objects))
        linked = Path(temporary, "kernels.so")
        _run(compiler, *LINK_FLAGS, *objects.values(), "-lm", "-o", str(linked))
        linked.replace(path)
    return ctypes.CDLL(str(path))


@functools.cache
def function(name: str, dtype: torch.dtype, arguments: tuple) -> Callable[..., None]:
    """Return a kernel's function for tensors of a dtype.

    Args:
        name: of the kernel.
        dtype: a key of `DTYPES`.
        arguments: the ctypes of its arguments.
    """
    found = getattr(library(), f"{name}_{DTYPES[dtype]}")
    found.argtypes, found.restype = arguments, None
    return found


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where the numbers of a tensor begin. A kernel gets None as a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    if result.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{result.stderr[-2000:]}")


def _fingerprint(compiler: str) -> str:
    """Return a name that changes with the sources, the flags, the compiler and the processor's instruction set."""
    macros = subprocess.run(  # the compiler's version and the instructions that -march=native enables here
        [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, timeout=60
    ).stdout
    sources = [path.read_bytes() for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
    return hashlib.sha256(b"\0".join([macros, " ".join(FLAGS + LINK_FLAGS).encode(), *sources])).hexdigest()[:16]
