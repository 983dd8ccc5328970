"""The course runner, on lessons of a few cells: what it shows, what it writes, and how it stops."""

import nbformat
import pytest
import run_course
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
IMAGE = f"""import base64
from IPython.display import Image, display
display(Image(base64.b64decode("{PIXEL}"), format="png"), metadata={{"image/png": {{"alt": "A \\"gray\\" pixel"}}}})"""


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)})


@pytest.fixture
def lesson(tmp_path):
    """Write a lesson of the given cells and return its path."""

    def write(number, *cells):
        folder = tmp_path / "notebooks"
        folder.mkdir(exist_ok=True)
        title = new_markdown_cell(
            f"# Lesson {number}: rows & columns\n\n<details><summary>Why?</summary>\n\n*So.*</details>"
        )
        path = folder / f"{number}_rows.ipynb"
        nbformat.write(new_notebook(cells=[title, *cells]), path)
        return path

    return write


@pytest.fixture
def run(tmp_path):
    """Run the course on those lessons; return the exit code and the folder of the pages."""

    def main(*arguments):
        out = tmp_path / "pages"
        return run_course.main(["--notebooks", str(tmp_path / "notebooks"), "--out", str(out), *arguments]), out

    return main


def test_each_lesson_gets_a_line_and_pages_that_need_no_network(lesson, run, capsys, monkeypatch, tmp_path):
    lesson(1, code("print(2 * 21, 'tokens')", "headline"), code(IMAGE))
    lesson(2, code("import os, pathlib\nprint(os.environ['COURSE_MODEL'], pathlib.Path.cwd().name)", "headline"))
    (tmp_path / "my_model").mkdir()
    monkeypatch.chdir(tmp_path)
    exit_code, out = run("--model", "my_model")
    assert exit_code == 0
    shown = capsys.readouterr()
    first, second, last = shown.out.splitlines()
    assert first.startswith("1_rows") and " s " in first and first.endswith("42 tokens")
    # The relative folder still names the model, although the kernel works beside the lessons.
    assert second.endswith(f"{tmp_path / 'my_model'} notebooks")
    assert last == "To read them, open pages/index.html"
    assert "1/1" not in shown.out and "cell" in shown.err  # the progress bar

    index = (out / "index.html").read_text()
    for text in ('href="1_rows.html"', 'href="2_rows.ipynb"', "Lesson 1: rows &amp; columns", "42 tokens"):
        assert text in index
    page = (out / "1_rows.html").read_text()
    assert '<html lang="en">' in page and "<title>Lesson 1: rows &amp; columns</title>" in page
    assert "<summary>Why?</summary>" in page and "<em>So.</em>" in page
    assert "alt='A \"gray\" pixel'" in page and f"data:image/png;base64,{PIXEL}" in page
    assert "<script" not in page and "<link" not in page
    executed = nbformat.read(out / "1_rows.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].text == "42 tokens\n"


def test_a_failing_cell_stops_the_course_and_is_named(lesson, run, capsys):
    stale = nbformat.v4.new_output("stream", text="of an earlier run\n")
    lesson(1, code("print('before')"), code("x = {}\nx['missing']"), new_code_cell("x", outputs=[stale]))
    lesson(2, code("print('never')"))
    exit_code, out = run()
    assert exit_code == 1
    shown = capsys.readouterr()
    assert "1_rows.ipynb stopped in cell [2], line 2\n    x['missing']\nKeyError: 'missing'" in shown.err
    assert "Traceback" not in shown.err + shown.out
    page = (out / "1_rows.html").read_text()
    assert "before" in page and "KeyError" in page and "of an earlier run" not in page
    assert not (out / "2_rows.html").exists()
    assert "stopped early" in (out / "index.html").read_text()


def test_the_line_that_fails_is_quoted_if_it_calls_a_function_of_another_cell(lesson, run, capsys):
    lesson(1, code("def fail(x):\n    return 1 / x"), code("import textwrap\n\nprint(1)\nfail(0)"))
    assert run()[0] == 1
    error = "1_rows.ipynb stopped in cell [2], line 4\n    fail(0)\nZeroDivisionError: division by zero"
    assert error in capsys.readouterr().err


def test_a_syntax_error_is_quoted_with_its_line(lesson, run, capsys):
    lesson(1, code("x = 1\ny = )"))
    assert run()[0] == 1
    assert "stopped in cell [1], line 2\n    y = )\nSyntaxError" in capsys.readouterr().err


def test_a_kernel_that_ends_stops_the_course(lesson, run, capsys):
    lesson(1, code("import os"), code("os._exit(1)"))
    assert run()[0] == 1
    assert "stopped in cell [2]\n    os._exit(1)\nDeadKernelError: Kernel died" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wanted, names", [("", "1 2 10"), ("2", "2"), ("10 1", "1 10"), ("1,2", "1 2"), (" 2, 10", "2 10")]
)
def test_lessons_are_selected_by_number_and_run_in_reading_order(lesson, tmp_path, wanted, names):
    for number in (10, 2, 1):
        lesson(number)
    selected = run_course.select(tmp_path / "notebooks", wanted)
    assert [path.name for path in selected] == [f"{number}_rows.ipynb" for number in names.split()]


def test_an_unknown_lesson_is_an_error_that_lists_those_there_are(lesson, run):
    lesson(1), lesson(2)
    with pytest.raises(SystemExit, match="no lesson 7; there are 1, 2"):
        run("--lessons", "1 7")


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
    assert [cell.metadata for cell in nb.cells[1:]] == [
        {"tags": []},
        {"tags": ["kept"]},
        {"tags": ["raises-exception"]},
    ]
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2, 3]
    stream, result = nb.cells[2].outputs
    assert stream.text == "0\n1\n2\n" and result.execution_count == 2
    assert len(nb.cells[3].outputs[0].traceback) == 1  # the message, without the frames
    run("--save")
    assert path.read_text() == stored


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("import warnings\nwarnings.warn('mind')", "cell [2]\n    import warnings"),
        ("print('before')\n1 / 0", "cell [2], line 2\n    1 / 0"),
    ],
    ids=["stderr", "failure"],
)
def test_save_leaves_a_lesson_alone_that_fails_or_writes_to_stderr(lesson, run, capsys, source, place):
    path = lesson(1, code("x = 1"), code(source))
    before = path.read_text()
    assert run("--save")[0] == 1
    assert f"1_rows.ipynb stopped in {place}" in capsys.readouterr().err
    assert path.read_text() == before
