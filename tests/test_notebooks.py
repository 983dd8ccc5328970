"""What every committed lesson must be, so that it reads well everywhere and nbval's comparison means something.

The comparison itself is `pytest --nbval`. It cannot see what is checked here: it passes a cell that was never
executed whatever that cell prints, and compares no image.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MOST_BYTES = 1_500_000
MOST_IGNORED = 5  # cells whose output is not compared: each one is a hole in the test
IGNORED = "nbval-ignore-output"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
OF_A_MACHINE = re.compile(r"/home/|/root/|/work/|/tmp/|/Users/|[A-Z]:\\|" + re.escape(str(ROOT)))
MEASURED_TIME = re.compile(r"\d ?(s|ms|µs|seconds?|milliseconds?)\b|\d (tokens|requests)(/| a | per )s", re.IGNORECASE)
# Colab opens a notebook without the folder around it: such an image shows nothing.
RELATIVE_IMAGE = re.compile(
    r"!\[[^\]]*\]\((?!https://|data:|attachment:)|<img[^>]*src=.(?!https://|data:)", re.IGNORECASE
)


def problems_of(nb, size=0):
    """What is wrong with a notebook of so many bytes, a sentence each."""
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        return [f"not a valid notebook: {error}"]
    problems = []
    cells = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        problems.append("not executed from top to bottom")
    if nb.metadata != {"kernelspec": KERNEL, "language_info": {"name": "python"}}:
        problems.append("metadata of one machine")
    if size > MOST_BYTES:
        problems.append(f"{size} bytes, the most is {MOST_BYTES}")
    if sum(IGNORED in tags_of(cell) for cell in cells) > MOST_IGNORED:
        problems.append(f"more than {MOST_IGNORED} cells are not compared")
    for number, cell in enumerate(cells, start=1):
        problems += [f"cell [{number}]: {problem}" for problem in problems_of_cell(cell)]
    for cell in nb.cells:
        if cell.cell_type == "markdown" and (image := RELATIVE_IMAGE.search(cell.source)):
            problems.append(f"relative image: {image[0]}")
    return problems


def problems_of_cell(cell):
    """What is wrong with a code cell and its outputs."""
    if "execution" in cell.metadata:
        yield "records when it ran"
    if "nbval-skip" in tags_of(cell) or re.search("NBVAL", cell.source):
        yield f"is kept from nbval; the only way to do that is the tag {IGNORED}"
    for output in cell.outputs:
        if output.get("name") == "stderr":
            yield "wrote to stderr"
        if output.output_type == "error" and "raises-exception" not in tags_of(cell):
            yield f"failed: {output.ename}"
        for mime in output.get("data", {}):
            if mime.startswith("image/") and not output.metadata.get(mime, {}).get("alt", "").strip():
                yield f"{mime} without an alternative text"
        text = text_of(output)
        if path := OF_A_MACHINE.search(text):
            yield f"a path of one machine, {path[0]}"
        if IGNORED not in tags_of(cell) and (measured := MEASURED_TIME.search(text)):
            yield f"seems to print a measured time ({measured[0]}) and is not tagged {IGNORED}"


def tags_of(cell):
    return cell.metadata.get("tags", [])


def text_of(output):
    """All that an output says, images left out."""
    data = [str(value) for mime, value in output.get("data", {}).items() if not mime.startswith("image/")]
    return "\n".join([output.get("text", ""), *data, *output.get("traceback", [])])


def test_there_are_lessons():
    assert any(path.name[0].isdecimal() for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_committed_notebook_is_sound(path):
    assert problems_of(nbformat.read(path, as_version=4), path.stat().st_size) == []


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.name[0].isdecimal()], ids=lambda path: path.name)
def test_a_lesson_has_one_headline_of_one_line(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if "headline" in tags_of(cell)]
    assert [text_of(output).count("\n") for cell in cells for output in cell.outputs] == [1]


# --- the check itself: a notebook that is sound, and one for each way not to be -----------------------------------


def lesson(source="1 + 1", *outputs, tags=(), **changes):
    cell = new_code_cell(source, execution_count=1, outputs=list(outputs), metadata={"tags": list(tags)})
    nb = new_notebook(cells=[new_markdown_cell("# Lesson\n\n![ok](https://example.org/a.png)"), cell])
    cell.update(changes)
    nb.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    return nb


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def image(**metadata):
    return new_output("display_data", data={"image/png": "L3RtcC8=/tmp/"}, metadata={"image/png": metadata})


def error():
    return new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])


def with_markdown(source):
    nb = lesson()
    nb.cells.append(new_markdown_cell(source))
    return nb


def with_many_ignored():
    nb = lesson()
    tags = {"tags": [IGNORED]}
    nb.cells += [new_code_cell("x", execution_count=n + 2, metadata=tags) for n in range(MOST_IGNORED + 1)]
    return nb


def with_other_metadata():
    nb = lesson()
    nb.metadata.language_info.version = "3.11.7"
    return nb


def test_the_check_passes_a_sound_notebook():
    outputs = [stream("3 tokens, 130 slot-steps, 12 passes\n"), image(alt="A curve.")]
    assert problems_of(lesson("run()", *outputs)) == []
    assert problems_of(lesson("run()", stream("0.3 s\n"), tags=[IGNORED])) == []
    assert problems_of(lesson("run()", error(), tags=["raises-exception"])) == []


@pytest.mark.parametrize(
    "nb, problem",
    [
        (lesson(cell_type="cod"), "not a valid notebook"),
        (lesson(execution_count=None), "not executed"),
        (lesson(execution_count=2), "not executed"),
        (with_other_metadata(), "metadata"),
        (lesson(metadata={"execution": {"iopub.status.busy": "2026-01-01"}}), "records when"),
        (lesson("x", tags=["nbval-skip"]), "kept from nbval"),
        (lesson("# NBVAL_IGNORE_OUTPUT\nx"), "kept from nbval"),
        (lesson("x", stream("warning", name="stderr")), "wrote to stderr"),
        (lesson("x", error()), "failed: ValueError"),
        (lesson("x", image()), "alternative text"),
        (lesson("x", stream("loaded /home/me/model\n")), "/home/"),
        (lesson("x", stream(f"loaded {ROOT}/helpers\n")), "a path of one machine"),
        (lesson("x", new_output("execute_result", data={"text/plain": "'/tmp/x'"})), "/tmp/"),
        (lesson("x", stream("it took 0.31 s\n")), "measured time (1 s)"),
        (lesson("x", stream("12.5 ms a token\n")), "measured time"),
        (lesson("x", stream("183 tokens/s\n")), "measured time"),
        (lesson("x", stream("183 tokens a second\n")), "measured time"),
        (with_many_ignored(), "cells are not compared"),
        (with_markdown("![a](images/a.png)"), "relative image"),
        (with_markdown('<img width="9" src="../images/a.png">'), "relative image"),
    ],
)
def test_the_check_finds(nb, problem):
    found = problems_of(nb)
    assert len(found) == 1 and problem in found[0]


def test_the_check_finds_a_notebook_that_is_too_large():
    assert problems_of(lesson(), MOST_BYTES + 1) == ["1500001 bytes, the most is 1500000"]
