"""The course runner, on lessons of a few cells: what it prints, what it writes, and how it stops."""

import os
import signal
import threading
import time

import nbformat
import pytest
import run_course
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers.models.loading import EMBEDDED

# In the place of torch, which takes seconds to import: these are all that the runner calls.
TORCH = """
threads = 0

def get_num_threads():
    return threads

def set_num_threads(number):
    global threads
    threads = number
"""


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)})


@pytest.fixture
def lesson(tmp_path):
    """Write a lesson of the given cells and return its path."""

    def write(number, *cells):
        folder = tmp_path / "notebooks"
        title = new_markdown_cell(f"# Lesson {number}: rows & columns")
        path = folder / (f"{number}_rows.ipynb" if isinstance(number, int) else f"extra/{number}.ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("torch.py").write_text(TORCH)
        nbformat.write(new_notebook(cells=[title, *cells]), path)
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Run the course on those lessons; return the exit code and the folder of the executed notebooks."""

    def main(*arguments):
        out = tmp_path / "executed"
        return run_course.main(["--notebooks", str(tmp_path / "notebooks"), "--out", str(out), *arguments]), out

    return main


def test_each_lesson_gets_a_line_and_an_executed_copy_that_names_the_model(lesson, run, capsys, monkeypatch, tmp_path):
    threads = "import torch\ntorch.set_num_threads(8)", "print(torch.get_num_threads())"
    monkeypatch.setattr(run_course, "reason_against", lambda model: "")  # loading it takes seconds
    path = lesson(1, code("print(2 * 21, 'tokens')", "headline"), *map(code, threads))
    before = path.read_text()
    where = "import os, pathlib\nprint(os.environ['COURSE_MODEL'], pathlib.Path.cwd().name)"
    lesson(2, code(where, "headline"))
    lesson("a_paper", code(where, "headline"))
    (tmp_path / "my_model").mkdir()
    monkeypatch.chdir(tmp_path)
    exit_code, out = run("--model", "my_model")
    assert exit_code == 0
    shown = capsys.readouterr()
    first, second, last = shown.out.splitlines()
    assert first.startswith("1_rows") and " s " in first and first.endswith("42 tokens")
    # The relative folder still names the model, although the kernel works beside the lessons.
    assert second.endswith(f"{tmp_path / 'my_model'} notebooks")
    assert last.startswith("a_paper") and last.endswith(f"{tmp_path / 'my_model'} extra")
    assert "1/1" not in shown.out and "cell" in shown.err  # the progress bar

    assert path.read_text() == before
    executed = nbformat.read(out / "1_rows.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].text == "42 tokens\n"
    assert executed.cells[3].outputs[0].text == "8\n", "it has no company, and so all threads"
    assert executed.metadata.course.model == "my_model"
    assert (out / "extra" / "a_paper.ipynb").exists()


def test_only_a_model_that_can_be_loaded_is_accepted_before_any_lesson_runs(lesson, run, capsys, tmp_path):
    assert run_course.reason_against(str(EMBEDDED)) == ""
    lesson(1, code("print('never')"))
    with pytest.raises(SystemExit) as refused:
        run("--model", str(tmp_path / "nothing"))
    assert refused.value.code == 2 and "there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


def test_a_failing_cell_stops_the_course_and_is_named(lesson, run, capsys, tmp_path):
    stale = nbformat.v4.new_output("stream", text="of an earlier run\n")
    lesson(1, code("print('before')"), code("x = {}\nx['missing']"), new_code_cell("x", outputs=[stale]))
    path = str(tmp_path / "executed" / "1_rows.ipynb")
    wait = f"while not pathlib.Path({path!r}).exists() and time.monotonic() < end:\n    time.sleep(0.02)"
    lesson(2, code(f"import pathlib, time\nend = time.monotonic() + 60\n{wait}"), code("print('never')"))  # beside 1
    lesson(3, code("print('never')"))
    exit_code, out = run()
    assert exit_code == 1
    shown = capsys.readouterr()
    assert "1_rows.ipynb stopped in cell [2], line 2\n    x['missing']\nKeyError: 'missing'" in shown.err
    assert "Traceback" not in shown.err + shown.out
    executed = (out / "1_rows.ipynb").read_text()
    assert "before" in executed and "KeyError" in executed and "of an earlier run" not in executed
    assert not any(nbformat.read(out / "2_rows.ipynb", as_version=4).cells[2].outputs)
    assert not (out / "3_rows.ipynb").exists()


@pytest.mark.slow
def test_a_cell_that_measures_runs_alone_and_has_all_threads_and_any_other_one_half_of_them(lesson, run, tmp_path):
    begin = "import pathlib, time\nrunning = pathlib.Path({!r})\n(running / '{}').touch()\ntime.sleep(0.1)\n"
    end = "print(len([*running.iterdir()]), torch.get_num_threads())\n(running / '{}').unlink()"
    (tmp_path / "running").mkdir()
    for number in (1, 2):
        source = begin.format(str(tmp_path / "running"), number) + end.format(number)
        tags = [[], ["measures"], ["measures", "nbval-ignore-output"], [], ["measures"], []]
        lesson(number, code("import torch\ntorch.set_num_threads(8)"), *(code(source, *each) for each in tags))
    exit_code, out = run()
    assert exit_code == 0
    cells = [cell for path in out.glob("*.ipynb") for cell in nbformat.read(path, as_version=4).cells[2:]]
    measured = [cell.outputs[0].text for cell in cells if "measures" in cell.metadata.tags]
    assert measured == ["1 8\n"] * 6
    assert {cell.outputs[0].text.split()[1] for cell in cells if not cell.metadata.tags} == {"4"}


@pytest.mark.slow
def test_other_cells_run_side_by_side_and_ctrl_c_ends_them_and_writes_what_ran(lesson, run, tmp_path):
    for number in (1, 2, 3):
        mark = f"open({str(tmp_path / str(number))!r}, 'w').close()\nimport time\ntime.sleep(600)"
        lesson(number, code("print('before')"), code(mark, "nbval-ignore-output"), code("print('never')"))

    def press():
        end = time.monotonic() + 60
        while not all((tmp_path / number).exists() for number in "12") and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run()
    for number in "12":
        assert (tmp_path / number).exists(), "its cell never began"
        executed = nbformat.read(tmp_path / "executed" / f"{number}_rows.ipynb", as_version=4)
        assert [len(cell.outputs) for cell in executed.cells[1:]] == [1, 0, 0]
    assert not (tmp_path / "executed" / "3_rows.ipynb").exists()


def test_notebooks_are_selected_by_number_or_name_and_run_in_reading_order(lesson, tmp_path):
    for number in (10, "a_paper", 2, 1):
        lesson(number)
    for wanted, names in (
        ("", "1_rows 2_rows 10_rows a_paper"),
        ("10,1", "1_rows 10_rows"),
        ("a_paper 2", "2_rows a_paper"),
    ):
        selected = run_course.select(tmp_path / "notebooks", wanted)
        assert [path.stem for path in selected] == names.split()


def test_save_stores_the_same_notebook_whenever_it_runs(lesson, run):
    path = lesson(
        1,
        code("print('one')"),
        code("import sys\nfor i in range(3):\n    print(i)\n    sys.stdout.flush()\n'done'", "kept"),
        code("def fail():\n    raise ValueError('wanted')\nfail()", "raises-exception"),
    )
    nb = nbformat.read(path, as_version=4)
    nb.metadata = nbformat.from_dict({"kernelspec": {"name": "mine", "display_name": "Mine"}, "widgets": {}})
    nb.cells[1].metadata["execution"] = {"shell.execute_reply": "2026-01-01T00:00:00"}
    nb.cells[1].execution_count = 17
    nbformat.write(nb, path)
    ids = [cell.id for cell in nb.cells]

    assert run("--save")[0] == 0
    stored = path.read_text()
    nb = nbformat.read(path, as_version=4)
    assert nb.metadata == {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    assert (nb.nbformat, nb.nbformat_minor, [cell.id for cell in nb.cells]) == (4, 5, ids)
    assert [cell.metadata for cell in nb.cells[1:]] == [{"tags": tags} for tags in ([], ["kept"], ["raises-exception"])]
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2, 3]
    stream, result = nb.cells[2].outputs
    assert stream.text == "0\n1\n2\n" and result.execution_count == 2
    assert len(nb.cells[3].outputs[0].traceback) == 1  # the message, without the frames
    run("--save")
    assert path.read_text() == stored
