"""What every committed lesson must be, so that it reads well everywhere and nbval's comparison means something.

The comparison itself is `pytest --nbval`. It cannot see what is checked here: it passes a cell that was never
executed whatever that cell prints, and compares no image.
"""

import functools
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
OVERVIEW = ROOT / "notebooks" / "0_in_ten_minutes.ipynb"  # no lesson: it builds no part of the map
NOTEBOOKS = [*sorted((ROOT / "notebooks").glob("*.ipynb")), *sorted((ROOT / "notebooks" / "extra").glob("*.ipynb"))]

MOST_BYTES = 1_500_000
MOST_IGNORED = 5  # cells whose output is not compared: each one is a hole in the test
IGNORED = "nbval-ignore-output"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
MEASURES = "measures"  # the tag with which a cell runs alone in `make course`
READS_A_CLOCK = re.compile(r"hardware\.\w+\(|perf_counter\(|throughput\(|run_l(oad|ive)\(|pass_seconds\(|\bmeasure\(")
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
    return problems + list(problems_of_predictions(nb))


def problems_of_cell(cell):
    """What is wrong with a code cell and its outputs."""
    if "execution" in cell.metadata:
        yield "records when it ran"
    if "nbval-skip" in tags_of(cell) or re.search("NBVAL", cell.source):
        yield f"is kept from nbval; the only way to do that is the tag {IGNORED}"
    if IGNORED in tags_of(cell) and MEASURES not in tags_of(cell) and (call := READS_A_CLOCK.search(cell.source)):
        yield f"calls {call[0]}...) and is not tagged {MEASURES}"
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
    text = "\n".join([output.get("text", ""), *data, *output.get("traceback", [])])
    return re.sub(r"base64,[\w+/=]+", "", text)  # images of a player


@functools.cache
def read(path):
    return nbformat.read(path, as_version=4)


def minutes_of(nb):
    """The minutes that a notebook takes to read: 200 words or 5 lines of code per minute."""
    words = sum(len(cell.source.split()) for cell in nb.cells if cell.cell_type == "markdown")
    shown = [
        cell for cell in nb.cells if cell.cell_type == "code" and not {"bootstrap", "hide-input"} & set(tags_of(cell))
    ]
    return words / 200 + sum(bool(line.strip()) for cell in shown for line in cell.source.splitlines()) / 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_committed_notebook_is_sound_and_says_how_many_minutes_it_takes_to_read(path):
    nb = read(path)
    assert problems_of(nb, path.stat().st_size) == []
    stated = re.search(r"^\*\*Time:\*\* about (\d+) minutes to read", nb.cells[0].source, re.MULTILINE)
    assert abs(int(stated[1]) - minutes_of(nb)) <= 4


# --- counts in prose --------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.,/])\d+(?:,\d{3})*(?:\.\d+)?(?![\w/⁰¹²³⁴-⁹]|[.,]\d)")
YEAR = re.compile(r"(19|20)\d\d")
NO_PROSE = re.compile(
    r"`[^`\n]*`|\]\([^)]*\)|^\|[^\n]*$|<details>.*?</details>|\*\*Time:\*\* [^\n]*$", re.DOTALL | re.MULTILINE
)
# Numbers that a lesson takes from elsewhere and names the source of, or computes in the sentence itself.
GIVEN = {
    "1_single_token_generation": "50",
    "2_static_batching": "512",
    "4_scheduling": "126 132 85 28",
    "5_chunked_prefill": "312 156 114 342 1,594",
    "6_padding_free_batching": "31 3,176",
    "7_paged_kv_cache": "20.4 38.2 138",
    "8_prefix_sharing": "128 127",
    "10_load_and_overload": "32",
    "14_quantized_weights": "768 35,000 59 128",
    "15_adapters_and_live_weights": "84",
    "17_many_replicas": "512",
    "18_planning_capacity": "21 39 512",
    "integers_all_the_way": "32,768 32,767",
    "separate_replicas": "125",
    "anyscale_23x": "400 132 40 8,000",
}


def unprinted_counts(nb):
    """Return (cell id, number) for every number of 20 or more in prose that no code and no output of the notebook has.

    Numbers below 20, years, and numbers in tables and in folded answers are not looked at.
    """
    shown = set()
    for cell in nb.cells:
        if cell.cell_type == "code":
            text = " ".join([cell.source, *map(text_of, cell.outputs)])
            shown |= {
                number.replace(",", "") for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text.replace("_", ""))
            }
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            for found in NUMBER.findall(NO_PROSE.sub(" ", cell.source)):
                number = found.replace(",", "")
                if number not in shown and float(number) >= 20 and not YEAR.fullmatch(found):
                    yield cell.id, found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_count_in_prose_is_that_of_the_code_or_of_an_output(path):
    given = GIVEN.get(path.stem, "").split()
    found = list(unprinted_counts(read(path)))

    assert [(cell, number) for cell, number in found if number not in given] == []
    assert set(given) <= {number for _, number in found}, "GIVEN lists numbers that the prose does not have"


# --- predictions, and what a lesson has -------------------------------------------------------------------------

MOST_PREDICTIONS = 5
SECTIONS = ("## What it costs", "## Where this lives in vLLM")


def problems_of_predictions(nb):
    """Yield what is wrong with the cells in which a reader writes a guess, and with those that answer them."""
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    guesses = [number for number, cell in enumerate(cells) if re.match(r"guess\w* = ", cell.source)]
    if len(guesses) > MOST_PREDICTIONS:
        yield f"{len(guesses)} predictions, the most is {MOST_PREDICTIONS}"
    for number in guesses:
        if not all(re.match(r"guess\w* = \.\.\.", line) for line in cells[number].source.splitlines()):
            yield f"cell [{number + 1}] holds more than a reader's guess"
        answer = cells[number + 1]
        if "compare_guess(" not in answer.source:
            yield f"cell [{number + 2}] does not compare the guess"
        if "hide-output" not in tags_of(answer):
            yield f"cell [{number + 2}] shows its answer"
    for number, cell in enumerate(cells, start=1):
        jupyter = cell.metadata.get("jupyter", {})
        for tag, setting in (("hide-output", "outputs_hidden"), ("hide-input", "source_hidden")):
            if (tag in tags_of(cell)) != jupyter.get(setting, False) and "bootstrap" not in tags_of(cell):
                yield f"cell [{number}]: the tag {tag} and the setting {setting} disagree"


LESSONS = [path for path in NOTEBOOKS if path.name[0].isdecimal()]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.name)
def test_a_lesson_opens_with_a_picture_and_the_map_has_a_headline_of_one_line_and_ends_with_its_costs_and_vllm(path):
    nb = read(path)
    headlines = [output for cell in nb.cells if "headline" in tags_of(cell) for output in cell.outputs]
    assert [text_of(output).count("\n") for output in headlines] == [1]
    if path == OVERVIEW:
        return
    opening = [cell for cell in nb.cells if cell.cell_type == "code" and "bootstrap" not in tags_of(cell)][:2]
    assert f"plots.system_map({path.name.split('_')[0]})" in "".join(cell.source for cell in opening)
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    assert [section for section in SECTIONS if not re.search(rf"^{section}$", prose, re.MULTILINE)] == []
