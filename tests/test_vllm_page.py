"""docs/vllm.md is the one page that names vLLM's files, those of the version that benchmarks install."""

import re
from pathlib import Path

import nbformat
import pytest

from benchmarks.install import HOME, PACKAGES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "vllm.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = re.findall(r"^\|.*\| `([\w./]+\.py)` \| (.*) \|$", TEXT, re.MULTILINE)
INSTALLED = next(HOME.glob("vllm/lib/python*/site-packages/vllm"), None)


def texts():
    pages = [path for folder in ("", "docs", "benchmarks", "helpers") for path in (ROOT / folder).glob("*.md")]
    yield from ((path, path.read_text(encoding="utf-8")) for path in pages if path != PAGE)
    for path in [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "notebooks" / "extra").glob("*.ipynb")]:
        yield path, "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)


def test_the_page_states_the_version_that_benchmarks_install():
    (version,) = [package.partition("==")[2] for package in PACKAGES["vllm"] if package.startswith("vllm")]
    assert f"version {version}" in TEXT


def test_a_path_on_any_other_page_and_in_a_notebook_is_one_of_this_repository():
    foreign = {
        f"{path.name}: {name}"
        for path, text in texts()
        for name in re.findall(r"(?:[\w.-]+/)+\w+\.py\b", text)
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "helpers", path.parent))
    }
    assert foreign == set()


def test_each_lesson_links_to_its_table():
    titles = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", TEXT, re.M)}
    links = [link for _, text in texts() for link in re.findall(r"docs/vllm\.md#([\w-]+)\)", text)]
    assert sorted(links) == sorted(titles)


@pytest.mark.skipif(INSTALLED is None, reason="python -m benchmarks.install vllm")
@pytest.mark.parametrize(("file", "names"), ROWS)
def test_a_name_is_in_its_file(file, names):
    source = (INSTALLED / file).read_text(encoding="utf-8")
    words = [word for name in re.findall(r"`([\w.]+)`", names) for word in name.split(".")]
    assert words
    assert [word for word in words if not re.search(rf"\b{word}\b", source)] == []
