"""SUPPORT.md agrees with families.py and with the text of its generator; otherwise, run `make support-matrix`."""

import re
from pathlib import Path

import pytest

from tests.families import FAMILIES
from tests.support_matrix import MEASURED, PADDED, PAGE, RAGGED, page, remote_lines, static_cells

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


def test_the_page_lists_the_families_in_the_order_of_the_matrix(table):
    assert [row[:3] for row in table[1]] == [static_cells(family) for family in FAMILIES], OUTDATED


def test_the_page_lists_the_models_that_exist_only_as_remote_code(text):
    assert all(line in text for line in remote_lines()), OUTDATED


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


def test_every_family_on_the_page_is_exact_on_every_version_that_has_it(table):
    for row in table[1]:
        for cell in row[3:5]:
            equal = re.fullmatch(r"exact: (\d+) of (\d+)", cell)
            assert cell == "not in this version" or (equal and equal[1] == equal[2]), row
        assert row[3] != "not in this version", row


def test_every_family_on_the_page_that_runs_ragged_is_exact(table):
    for row in table[1]:
        for exact, cell in zip(row[3:5], row[7:9], strict=True):
            equal = re.fullmatch(rf"{RAGGED}: (\d+) of (\d+)", cell)
            assert cell == PADDED or (cell == "–" and exact == "not in this version") or equal[1] == equal[2], row
    ragged = [row for row in table[1] if row[7].startswith(RAGGED)]
    assert len(ragged) > 30


def test_the_readme_links_the_page():
    assert f"]({PAGE.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
