"""Install what the course needs and this Python lacks. All other packages stay as they are, torch above all.

A notebook's first cell installs the package `helpers` without its requirements, then loads this module as an extension
of IPython. In a copy of the course nothing is installed: there, requirements.txt is for you. On Colab and Kaggle, torch
fits the machine's GPU driver, and a torch from a package index might not. So a torch that can be imported is kept, even
if it is older than required.
"""

import importlib
import re
import subprocess
import sys
from importlib import metadata, util

PACKAGE = "continuous-batching-course"
NOT_FOR_LESSONS = ("cluster",)  # extras that no lesson needs


class CannotStart(Exception):
    """Packages are missing and cannot be installed. The message says which ones; a traceback would bury it."""

    def _render_traceback_(self) -> list[str]:  # IPython shows this
        return [f"Cannot start: {self}"]


def load_ipython_extension(shell) -> None:
    """Install what is missing: the effect of `%reload_ext helpers.set_up`."""
    install_missing()


def missing() -> list[str]:
    """Return the unmet requirements of the installed package and of the extras that lessons use.

    A copy of the course that is not installed has none.
    """
    from packaging.requirements import Requirement  # a requirement of Jupyter's kernels

    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    lines = [line for line in lines if not re.search(f"extra == .({'|'.join(NOT_FOR_LESSONS)}).$", line)]
    requirements = [Requirement(line.partition(";")[0]) for line in lines]
    return [str(requirement) for requirement in requirements if not _is_met(requirement)]


def _is_met(requirement) -> bool:
    if requirement.name == "torch" and util.find_spec("torch"):
        return True
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def install_missing() -> None:
    """Have pip install the unmet requirements and say what is installed. Without any, print nothing.

    Raises:
        CannotStart: pip failed.
    """
    wanted = missing()
    if not wanted:
        return
    torch = f" torch {metadata.version('torch')} stays as it is." if util.find_spec("torch") else ""
    print(f"Installing {', '.join(wanted)}.{torch}", flush=True)  # before pip: torch, if it is missing, takes minutes
    in_use = sorted({re.match(r"[\w-]+", line)[0].lower() for line in wanted} & set(sys.modules))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    result = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        log = re.sub(r"\x1b\[[\d;]*m", "", result.stderr).strip().splitlines()
        reason = next((line for line in reversed(log) if line.startswith("ERROR")), (log or ["pip gave no reason"])[-1])
        raise CannotStart(
            f"pip could not install {', '.join(wanted)} ({reason}). Is there a network? (On Kaggle, switch it on in "
            f"the notebook's settings.) Then run this cell again."
        )
    importlib.invalidate_caches()
    if in_use:
        print(f"{', '.join(in_use)} was in use already: restart the kernel, then run all cells.")
