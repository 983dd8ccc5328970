"""The files that the playground needs on the site: the course's own Python files, and Pyodide, which runs them.

Pyodide is a build of Python for browsers. It comes from npm, so without npm or a network the site has no playground.
"""

import io
import zipfile
from pathlib import Path

from npm_package import npm_package

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PYODIDE = "314.0.7"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
MODULES = (
    "*.py",
    "engine/*.py",
    "simulator/*.py",
    "simulator/machines/*.json",
    "cluster/__init__.py",
    "cluster/autoscaling.py",
    "cluster/routing.py",
)  # of helpers; a test imports them without the rest


def course_zip() -> bytes:
    """Return a ZIP file with the page's Python files and what they import, the same bytes for the same files."""
    files = {
        path.relative_to(ROOT).as_posix(): path for pattern in MODULES for path in (ROOT / "helpers").glob(pattern)
    }
    files |= {path.name: path for path in (DOCS / "playground").glob("*.py")}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name].read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def pyodide(cache: Path) -> tuple[dict[str, bytes], str]:
    """Return Pyodide's files, and why there are none, or "".

    Args:
        cache: the folder that keeps them between builds.
    """
    folder, reason = npm_package("pyodide", PYODIDE, cache)
    if folder is None:
        return {}, reason
    return {name: (folder / name).read_bytes() for name in PYODIDE_FILES}, ""


def playground(cache: Path) -> tuple[dict[str, bytes], str]:
    """Return the playground's files below _static/playground/ by name, and why there is no playground, or ""."""
    runtime, reason = pyodide(cache)
    if reason:
        return {}, reason
    pages = {
        path.name: path.read_bytes()
        for path in sorted((DOCS / "playground").iterdir())
        if path.suffix in (".js", ".css")
    }
    return pages | {"course.zip": course_zip()} | {f"pyodide/{name}": data for name, data in runtime.items()}, ""
