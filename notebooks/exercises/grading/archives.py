"""The notebooks in a folder or an archive, and in the archives that students put there.

An archive is data of a stranger: its sizes, counts and depth are limited, whatever it says of itself. No name in it
becomes a name on this machine, so no path leads out of the folder, and a link is a file like any other.
"""

import os
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from .submissions import MAX_BYTES

MAX_FILES = 20_000  # listed in an archive
MAX_LISTING = 8 * 2**20  # bytes of that list
MAX_ARCHIVE = 100 * 2**20  # of an archive in another one
MAX_UNPACKED = 200 * 2**20  # from an archive that a student handed in, with those in it
MAX_DEPTH = 3  # archives in archives: a platform's, a student's, and one that the student did not notice
NOTEBOOK = re.compile(r"\.ipynb(\.(txt|json))?$", re.IGNORECASE)  # browsers append the rest
OTHER_ARCHIVE = re.compile(r"\.(7z|rar|tar|tgz|gz|bz2|xz)$", re.IGNORECASE)
SKIPPED = {"__MACOSX", "node_modules", "venv"}  # and what begins with a dot


@dataclass(frozen=True)
class File:
    """A file that may be a submission.

    Attributes:
        parts: the folders above it and its name, archives included.
        path: where it can be read, unless there is a problem.
        modified: when, in seconds.
        problem: why it cannot be read, or "".
    """

    parts: tuple[str, ...]
    path: Path = Path()
    modified: float = 0
    problem: str = ""


class _TooMuchError(Exception):
    """An archive exceeds a limit; the text says which."""


def notebooks_in(place: Path, scratch: Path) -> Iterator[File]:
    """Yield the notebooks in a folder or a .zip, and what is in it instead.

    Args:
        place: the folder or archive.
        scratch: an empty folder for what is unpacked. It has to stay as long as the files are read.
    """
    paths = (scratch / str(number) for number in count())
    if place.is_file():
        yield from _Archive(paths).files(place, ())
        return
    for folder, folders, names in os.walk(place):
        folders[:] = sorted(each for each in folders if not _is_skipped(each))
        for name in sorted(names):
            path = Path(folder, name)
            parts = path.relative_to(place).parts
            if not _is_skipped(name) and _is_of_use(name):
                if not (path.is_file() and path.resolve().is_relative_to(place.resolve())):
                    yield File(parts, problem="is a link out of the folder")
                elif name.lower().endswith(".zip"):
                    yield from _Archive(paths, MAX_UNPACKED).files(path, parts)
                else:
                    yield _file(parts, path, path.stat().st_mtime)


class _Archive:
    """A .zip, with what may still be unpacked from it and from those in it."""

    def __init__(self, paths: Iterator[Path], left: float = float("inf")):
        self.paths, self.left, self.depth = paths, left, 0

    def files(self, path: Path, parts: tuple[str, ...]) -> Iterator[File]:
        """Yield the notebooks of an archive. What is wrong with it becomes a problem of the archive."""
        self.depth += 1
        try:
            yield from self._files(path, parts)
        except _TooMuchError as error:
            yield File(parts or (path.name,), problem=str(error))
        except Exception as error:  # what a broken archive raises is not documented
            yield File(parts or (path.name,), problem=f"cannot be unpacked ({type(error).__name__})")
        self.depth -= 1

    def _files(self, path: Path, above: tuple[str, ...]) -> Iterator[File]:
        if self.depth > MAX_DEPTH:
            raise _TooMuchError(f"is more than {MAX_DEPTH} archives deep: unpack it")
        with open(path, "rb") as file:
            if _listing(file) > MAX_LISTING:
                raise _TooMuchError(f"lists more than {MAX_FILES:,} files")
            archive = zipfile.ZipFile(file)
            entries = archive.infolist()
            if len(entries) > MAX_FILES:
                raise _TooMuchError(f"lists more than {MAX_FILES:,} files")
            for entry in entries:
                names = [name for name in entry.filename.replace("\\", "/").split("/") if name not in ("", ".", "..")]
                if names and not entry.is_dir() and _is_of_use(names[-1]) and not any(map(_is_skipped, names)):
                    yield from self._unpack(archive, entry, (*above, *names))

    def _unpack(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, parts: tuple[str, ...]) -> Iterator[File]:
        if OTHER_ARCHIVE.search(parts[-1]):
            yield _file(parts, Path(), 0)
            return
        if entry.flag_bits & 1:
            yield File(parts, problem="is encrypted")
            return
        is_archive = parts[-1].lower().endswith(".zip")
        limit = MAX_ARCHIVE if is_archive else MAX_BYTES
        if self.left > 0:
            with archive.open(entry) as packed:
                data = packed.read(limit + 1)  # it may unpack to more than it says
            self.left -= len(data)
        if self.left <= 0:
            raise _TooMuchError(f"unpacks to more than {MAX_UNPACKED / 2**20:g} MB")
        if len(data) > limit:
            yield File(parts, problem=f"is larger than {limit / 2**20:g} MB")
            return
        path = next(self.paths)
        path.write_bytes(data)
        if is_archive:  # in a platform's archive, those of each student have a limit of their own
            inner = _Archive(self.paths, MAX_UNPACKED) if self.left == float("inf") else self
            yield from inner.files(path, parts)
        else:
            yield _file(parts, path, time.mktime((*entry.date_time, 0, 0, -1)))


def _file(parts: tuple[str, ...], path: Path, modified: float) -> File:
    if OTHER_ARCHIVE.search(parts[-1]):
        return File(parts, problem="is an archive, but not a .zip: unpack it")
    return File(parts, path, modified)


def _is_of_use(name: str) -> bool:
    return bool(NOTEBOOK.search(name) or OTHER_ARCHIVE.search(name)) or name.lower().endswith(".zip")


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in SKIPPED


def _listing(file) -> int:
    """Return how many bytes the list of an archive's files has by its last record; reading them takes memory."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16 - 22))
    tail = file.read()
    record = tail.rfind(b"PK\5\6")
    return int.from_bytes(tail[record + 12 : record + 16], "little") if record >= 0 else 0
