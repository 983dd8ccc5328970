"""Write the student notebooks from their sources, with nbgrader (Jupyter Development Team, JOSE 2019).

nbgrader removes the solutions and locks the check cells. Grading needs its metadata only, which a course that uses
nbgrader for everything can import, too.
"""

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbgrader.apps import NbGraderAPI
from traitlets.config import Config, PyFileConfigLoader

from .submissions import ASSIGNMENTS, EXERCISES

BUILD = EXERCISES.parents[1] / "build"


def release(folder: Path = EXERCISES / "release") -> list[Path]:
    """Write the student version of every assignment to folder/<assignment>/<assignment>.ipynb; return the paths.

    Raises:
        RuntimeError: nbgrader could not do it.
    """
    BUILD.mkdir(exist_ok=True)
    with _environment(), tempfile.TemporaryDirectory(dir=BUILD, prefix="release-") as course:
        shutil.copytree(EXERCISES / "source", Path(course, "source"), ignore=shutil.ignore_patterns(".*"))
        config = Config(PyFileConfigLoader("nbgrader_config.py", str(EXERCISES)).load_config())
        config.CourseDirectory.root = course
        api = NbGraderAPI(config=config)
        api.log.setLevel(logging.CRITICAL)  # it is captured and shown when a step fails
        written = []
        for assignment in ASSIGNMENTS:
            result = api.generate_assignment(assignment)
            if not result["success"]:
                raise RuntimeError(
                    f"generating {assignment} failed\n{result.get('log', '')}\n{result.get('error', '')}"
                )
            target = folder / assignment / f"{assignment}.ipynb"
            target.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(nbformat.read(Path(course, "release", assignment, target.name), as_version=4), target)
            written.append(target)
    return written


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Let nbgrader find alembic, which it calls by its name, and leave no traces outside of the checkout."""
    before = dict(os.environ)
    os.environ["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), before.get("PATH")]))
    for name in ("CONFIG", "DATA", "RUNTIME"):
        os.environ.setdefault(f"JUPYTER_{name}_DIR", str(BUILD / "cache" / "jupyter" / name.lower()))
    os.environ.setdefault("IPYTHONDIR", str(BUILD / "cache" / "ipython"))
    try:
        with warnings.catch_warnings(action="ignore"):  # nbgrader's own, about its database and old formats
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
