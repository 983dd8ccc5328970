"""Install what requirements.txt asks for and this Python lacks. All else stays as it is, torch above all.

The first cell of a notebook runs this when it has fetched the course (bootstrap.py). On Colab and Kaggle, torch fits
the machine's GPU driver and one from a package index might not: a torch that can be imported is left alone, even if it
is older than asked for. Only the standard library is needed; without `packaging`, whatever is installed counts as new
enough.
"""

import importlib
import re
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    Requirement = None

# They open, run and compare notebooks. Where a cell runs, something does that already, and on Colab they would only
# get into its way.
NEEDED_BY_NO_CELL = {"jupyterlab", "ipykernel", "nbclient", "nbconvert", "nbval"}
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"


class CannotStart(Exception):
    """Packages are missing and cannot be installed. The message says which; a traceback would bury it."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this
        return [f"Cannot start: {self}"]


def name_of(requirement: str) -> str:
    """The package's name: "numpy" of "numpy>=1.26"."""
    return re.match(r"[\w.-]+", requirement)[0].lower()


def is_met(requirement: str) -> bool:
    """Whether this Python has what the line of a requirements file asks for."""
    name = name_of(requirement)
    if name == "torch" and util.find_spec("torch"):
        return True
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return Requirement is None or Requirement(requirement).specifier.contains(version, prereleases=True)


def missing(requirements: str) -> list[str]:
    """Those lines of a requirements file that are not met, without comments and pip's options.

    What opens notebooks is left out."""
    lines = (line.partition("#")[0].strip() for line in requirements.splitlines())
    wanted = (line for line in lines if line and not line.startswith("-") and name_of(line) not in NEEDED_BY_NO_CELL)
    return [line for line in wanted if not is_met(line)]


def install_missing(requirements: Path = REQUIREMENTS) -> None:
    """Let pip install the requirements that are not met, and print one line that says what was done.

    Raises:
        CannotStart: pip failed.
    """
    wanted = missing(requirements.read_text(encoding="utf-8"))
    torch = f" torch {metadata.version('torch')} stays as it is." if util.find_spec("torch") else ""
    if not wanted:
        print(f"Nothing had to be installed.{torch}")
        return
    print(f"Installing {', '.join(wanted)}.{torch}", flush=True)  # before pip: torch, if it is missing, takes minutes
    in_use = [name for name in map(name_of, wanted) if name in sys.modules]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CannotStart(
            f"pip could not install {', '.join(wanted)} ({reason}). Is there a network? Once they are installed, by "
            f"whatever means, run this cell again."
        )
    importlib.invalidate_caches()
    if in_use:
        print(f"{', '.join(in_use)} was in use already: restart the kernel, then run all cells.")
