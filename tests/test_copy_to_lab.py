"""The copies of `make lab`: whole notebooks but for the answers to predictions, and never overwritten."""

from pathlib import Path

import copy_to_lab
import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
LESSON, EXERCISES = "7_paged_kv_cache.ipynb", "exercises/release/7_paged_kv_cache/7_paged_kv_cache.ipynb"


def test_a_copy_has_all_cells_and_outputs_except_the_answers_to_predictions(tmp_path):
    copy_to_lab.main([LESSON, EXERCISES], lab=tmp_path)
    assert (tmp_path / EXERCISES).read_text() == (NOTEBOOKS / EXERCISES).read_text()
    copied = nbformat.read(tmp_path / LESSON, as_version=4)
    nbformat.validate(copied)
    answers = 0
    for cell, stored in zip(copied.cells, nbformat.read(NOTEBOOKS / LESSON, as_version=4).cells, strict=True):
        assert cell.source == stored.source
        if "compare_guess(" in cell.source:
            answers += 1
            assert cell.outputs == [] and "outputs_hidden" not in str(cell.metadata)
        else:
            assert cell == stored
    assert answers > 2


def test_an_answer_that_its_reader_unfolded_is_removed_too(tmp_path):
    unfolded = new_code_cell("1", metadata={"tags": ["hide-output"]}, outputs=[new_output("stream", text="1")])
    nbformat.write(new_notebook(cells=[unfolded]), tmp_path / "1_a.ipynb")
    copy_to_lab.main(["1_a.ipynb"], notebooks=tmp_path, lab=tmp_path / "lab")
    assert nbformat.read(tmp_path / "lab" / "1_a.ipynb", as_version=4).cells[0].outputs == []


def test_a_copy_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / LESSON).write_text("my own")
    copy_to_lab.main([LESSON], lab=tmp_path)
    assert (tmp_path / LESSON).read_text() == "my own"
