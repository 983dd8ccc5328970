"""The files that the playground needs on the site: the course's own Python files, and Pyodide, which runs them.

Pyodide is a build of Python for browsers. It comes from npm, so without npm or a network the site has no playground.
"""

import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

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
    """Return Pyodide's files, and why there are none, or "". The folder `cache` keeps them between builds."""
    folder, npm = cache / f"pyodide-{PYODIDE}", shutil.which("npm")
    if not folder.exists() and npm is None:
        return {}, "npm is not installed"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            command = [npm, "pack", f"pyodide@{PYODIDE}", "--json", "--fetch-retries=0"]
            options = {"capture_output": True, "text": True, "timeout": 300, "check": True}
            try:
                packing = subprocess.run([*command, "--pack-destination", temporary], **options)
            except (OSError, subprocess.SubprocessError):
                return {}, f"npm could not fetch pyodide {PYODIDE}"
            packed, unpacked = Path(temporary, json.loads(packing.stdout)[0]["filename"]), Path(temporary, "unpacked")
            with tarfile.open(packed) as archive:
                archive.extractall(unpacked, filter="data")
            (unpacked / "package").replace(folder)
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
