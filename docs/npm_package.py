"""Unpack a package of npm: pages need Pyodide (the playground) and reveal.js (the slides), which PyPI lacks."""

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path


def npm_package(name: str, version: str, cache: Path) -> tuple[Path | None, str]:
    """Return the folder of an unpacked package, and why there is none, or "".

    Args:
        name: the package's name on npm.
        version: the exact version, so that every build has the same files.
        cache: the folder that keeps packages between builds.
    """
    folder = cache / f"{name}-{version}"
    if folder.exists():
        return folder, ""
    npm = shutil.which("npm")
    if npm is None:
        return None, "npm is not installed"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        options = ["--json", "--fetch-retries=0", "--pack-destination", temporary]
        try:
            packing = subprocess.run(
                [npm, "pack", f"{name}@{version}", *options], capture_output=True, text=True, timeout=300, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None, f"npm could not fetch {name} {version}"
        packed, unpacked = Path(temporary, json.loads(packing.stdout)[0]["filename"]), Path(temporary, "unpacked")
        with tarfile.open(packed) as archive:
            archive.extractall(unpacked, filter="data")
        (unpacked / "package").replace(folder)
    return folder, ""
