"""The table of published figures is what a new run gives."""

from pathlib import Path

import pytest

from benchmarks.figures import __main__ as program

README = Path(program.__file__).with_name("README.md")


@pytest.mark.slow
@pytest.mark.parametrize("paper", program.PAPERS)
def test_the_readme_has_the_figures_of_a_new_run(paper):
    lines = program.table({paper: program.PAPERS[paper].figures()}).splitlines()
    assert "\n".join(lines[2:]) in README.read_text(encoding="utf-8")
    assert all(line in README.read_text(encoding="utf-8") for line in lines[:2])
