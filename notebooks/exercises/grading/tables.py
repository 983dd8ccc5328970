"""Read and write tables of text, as spreadsheets do. What is read is limited in size, and what is written is plain."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path

from .plain import harmless

MAX_BYTES = 8 * 2**20
MAX_COLUMNS = 50


def read_csv(path: Path, max_lines: int = 100_000) -> list[list[str]]:
    """Return the lines of a table that are not empty; a spreadsheet may have written it with semicolons.

    Raises:
        ValueError: it does not exist, is no text, or is too large.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES / 2**20:g} MB.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        head = text.partition("\n")[0]
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
        lines = [line for line in reader if any(line)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as a table in UTF-8 ({error}).") from None
    if not lines:
        raise ValueError(f"{path} is empty.")
    if len(lines) > max_lines + 1 or any(len(line) > MAX_COLUMNS for line in lines):
        raise ValueError(f"{path} has more than {max_lines:,} lines or {MAX_COLUMNS} columns.")
    return lines


def write_csv(path: Path, lines: Iterable[Iterable]) -> None:
    """Write a table whose texts no spreadsheet computes, at once: an interrupt leaves the old one or the new one."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([[harmless(str(each)) for each in line] for line in lines])
    os.replace(part, path)
