"""Build the wheel of this checkout without a network."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pip(command, *arguments, python=sys.executable):
    """Run a command of pip offline, for the environment of `python`."""
    options = ["--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, command, *options, *arguments], check=True)


def build_wheel(folder: Path) -> Path:
    """Return the wheel, built in an empty folder: a build leaves files beside its sources, so they are copied there."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "helpers", folder / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder / "dist", folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel
