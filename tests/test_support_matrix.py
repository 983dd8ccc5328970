"""SUPPORT.md agrees with families.py and with the text of its generator; otherwise, run `make support-matrix`."""

import re
from pathlib import Path

import pytest

from tests.tools.support_matrix import MEASURED, PADDED, PAGE, RAGGED, page

ROOT = Path(__file__).parent.parent
OUTDATED = "run `make support-matrix`"


@pytest.fixture(scope="module")
def text():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def table(text):
    families = text.partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in families.splitlines() if line.startswith("|")]
    return rows[0], rows[2:]


def pinned(file: str) -> str:
    return re.search(r"^transformers==(.+)$", (ROOT / file).read_text(), re.MULTILINE).group(1)


def test_the_page_was_measured_on_the_pinned_versions(table):
    newest, oldest = pinned("constraints.txt"), pinned("requirements-oldest.txt")
    assert table[0][3:9] == [f"{name}, {version}" for name in MEASURED for version in (newest, oldest)], OUTDATED


def test_the_generator_writes_the_same_page_from_the_same_measurements(text, table):
    header, rows = table
    torch, python = re.search(r"torch (\S+) and Python (\S+),", text).groups()
    runs = []
    for column in (3, 4):  # of the newest and the oldest transformers
        measured = {row[0].strip("`"): dict(zip(MEASURED, row[column:9:2], strict=True)) for row in rows}
        runs.append({"transformers": header[column].split(", ")[1], "torch": torch, "python": python, "rows": measured})
    for row in rows:
        runs[0]["rows"][row[0].strip("`")]["generate_batch"] = row[9]
    assert page(*runs) == text, OUTDATED


def test_every_family_on_the_page_is_exact_on_every_version_that_has_it_and_where_it_runs_ragged(table):
    for row in table[1]:
        assert row[3] != "not in this version", row
        for exact, ragged in zip(row[3:5], row[7:9], strict=True):
            if exact == "not in this version":
                assert ragged == "–", row
                continue
            equal = [re.fullmatch(r"exact: (\d+) of \1", exact), re.fullmatch(rf"{RAGGED}: (\d+) of \1", ragged)]
            assert equal[0] and (equal[1] or ragged == PADDED), row
    assert sum(row[7].startswith(RAGGED) for row in table[1]) > 30


def test_the_readme_links_the_page():
    assert f"]({PAGE.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
