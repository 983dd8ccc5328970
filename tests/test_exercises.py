"""The exercises: what students get is up to date and holds no answer, what they hand in gets the points it deserves.

The submissions below are release notebooks with answers typed in, as students would do it, and they are graded by what
`make grade` runs, all of them once: starting a kernel for each is what takes the time.
"""

import csv
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from exercises import grade

from helpers.checks import TASKS

ROOT = Path(__file__).parents[1]
SOURCE, RELEASE = ROOT / "notebooks/exercises/source", ROOT / "notebooks/exercises/release"
ONE, TWO, THREE, CODELAB, FOUR, FIVE, SIX, SEVEN = grade.ASSIGNMENTS


def read(folder, assignment):
    return nbformat.read(folder / assignment / f"{assignment}.ipynb", as_version=4)


def nbgrader_of(cell):
    return cell.metadata.get("nbgrader", {})


def points_of(nb):
    """For each task, which is the name of its solution cell, the points of the check cells up to the next task."""
    points, task = {}, None
    for cell in nb.cells:
        if nbgrader_of(cell).get("solution"):
            task = nbgrader_of(cell)["grade_id"]
            points[task] = 0
        points[task] = points.get(task, 0) + nbgrader_of(cell).get("points", 0)
    points.pop(None, None)
    return points


def answers_of(assignment):
    """For each task of the source notebook, its solved cell as a student would have written it."""
    solved = {
        nbgrader_of(cell)["grade_id"]: re.sub(r" *### (BEGIN|END) SOLUTION\n?", "", cell.source)
        for cell in read(SOURCE, assignment).cells
        if nbgrader_of(cell).get("solution")
    }
    assert solved
    return solved


def hand_in(path, assignment, answers):
    """A release notebook with these answers typed in, {task: cell}."""
    nb = read(RELEASE, assignment)
    for cell in nb.cells:
        if nbgrader_of(cell).get("grade_id") in answers:
            cell.source = answers[nbgrader_of(cell)["grade_id"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)


def table_of(out):
    with open(out / "grades.csv", newline="", encoding="utf-8") as file:
        return {(row["student"], row["assignment"]): row for row in csv.DictReader(file)}


# --- what is handed out -------------------------------------------------------------------------------------------


def test_the_release_is_up_to_date(tmp_path):
    for fresh in grade.release(tmp_path):
        committed = RELEASE / fresh.relative_to(tmp_path)
        assert committed.read_text() == fresh.read_text(), "the sources have changed: run make release"
    assert sorted(path.name for path in RELEASE.iterdir()) == grade.ASSIGNMENTS


@pytest.mark.parametrize("assignment", grade.ASSIGNMENTS)
def test_the_release_contains_no_solution_and_no_hidden_test(assignment):
    cells = read(RELEASE, assignment).cells
    text = "\n".join(cell.source for cell in cells)
    assert not re.search("SOLUTION|HIDDEN", text)
    stubs = [cell for cell in cells if cell.cell_type == "code" and "raise NotImplementedError" in cell.source]
    assert len(stubs) == len(answers_of(assignment))

    secret = set()
    for cell in read(SOURCE, assignment).cells:
        for region in re.findall(r"### BEGIN [A-Z ]+\n(.*?)### END", cell.source, re.DOTALL):
            secret |= {line.strip() for line in region.splitlines()}
        assert len(re.findall("### BEGIN", cell.source)) == len(re.findall("### END", cell.source))
    telling = {line for line in secret if len(line) > 12}  # not `}` and the like
    assert len(telling) >= 3
    shown = {line.strip() for line in text.splitlines()}
    assert telling & shown <= {"from helpers import workloads"}


@pytest.mark.parametrize("assignment", grade.ASSIGNMENTS)
def test_a_source_notebook_is_well_formed(assignment):
    nb = read(SOURCE, assignment)
    nbformat.validate(nb)
    ids = [nbgrader_of(cell)["grade_id"] for cell in nb.cells if nbgrader_of(cell)]
    assert len(ids) == len(set(ids))
    assert all(points > 0 for points in points_of(nb).values())
    assert not any(cell.get("outputs") for cell in nb.cells)
    first = next(cell for cell in nb.cells if cell.cell_type == "code")
    assert nbgrader_of(first)["locked"] and "helpers" in first.source
    for task in answers_of(assignment):
        assert any(f'assert check("{task}", {task})' in cell.source for cell in nb.cells)
    hints = [cell for cell in nb.cells if "<details>" in cell.source]
    assert len(hints) == len(answers_of(assignment))


def test_every_lesson_has_at_least_four_tasks():
    assert all(len(answers_of(assignment)) >= 4 for assignment in (ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN))


def test_every_check_has_one_task():
    tasks = [task for assignment in grade.ASSIGNMENTS for task in answers_of(assignment)]
    assert sorted(tasks) == sorted(TASKS)


# --- what comes back ----------------------------------------------------------------------------------------------

HALVES = {  # tasks that are worth half of the points
    ONE: ["greedy_step", "cached_loop"],
    TWO: ["batch_throughput", "left_pad"],
    THREE: ["init_batch", "generate_next_token", "merge_masks", "filter_rows"],
    FOUR: ["what_to_read", "plan_chunks"],
    FIVE: ["padded_tokens", "attend_row"],
    SIX: ["allocate", "release"],
    SEVEN: ["read_events", "BoundedQueue"],
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The lines of both tables, and the folder of the first."""
    folder, out = tmp_path_factory.mktemp("submitted"), tmp_path_factory.mktemp("grades")
    for assignment in grade.ASSIGNMENTS:  # every layout that is understood
        hand_in(folder / "Ada" / assignment / f"{assignment}.ipynb", assignment, answers_of(assignment))
        hand_in(folder / "Bob [x]" / f"{assignment}.ipynb", assignment, {})
    half = {task: answer for task, answer in answers_of(TWO).items() if task in HALVES[TWO]}
    hand_in(folder / f"cleo_{TWO}.ipynb", TWO, half)
    first_come = answers_of(CODELAB)["schedule"].partition('    """\n    longest')[0] + '    """\n'
    hand_in(folder / f"cleo_{CODELAB}.ipynb", CODELAB, {"schedule": first_come + "    return waiting[:free_rows]\n"})
    hand_in(folder / f"dan_{ONE} (1).ipynb", ONE, answers_of(ONE) | {"stop": "import os\n\nos._exit(1)"})
    (folder / f"eve_{THREE}.ipynb").write_text("this is no notebook")
    (folder / "eve_essay.ipynb").write_text("{}")

    # Beside it, with a short time limit and from the command line.
    hasty_folder, hasty_out = tmp_path_factory.mktemp("endless"), tmp_path_factory.mktemp("grades")
    endless = answers_of(TWO) | {"batch_throughput": "while True:\n    pass"}
    hand_in(hasty_folder / f"fay_{TWO}.ipynb", TWO, endless)
    command = [sys.executable, grade.__file__, "grade", "--timeout", "15", "--out", hasty_out, hasty_folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hasty:
        grade.grade(folder, out, timeout=120, jobs=2)
        assert "fay" in hasty.communicate(timeout=300)[0]
    assert hasty.returncode == 0
    return table_of(out) | table_of(hasty_out), out


@pytest.mark.slow
@pytest.mark.parametrize("assignment", grade.ASSIGNMENTS)
def test_the_solutions_score_full_marks(graded, assignment):
    row = graded[0]["Ada", assignment]
    assert float(row["score"]) == float(row["max_score"]) == sum(points_of(read(SOURCE, assignment)).values())
    assert row["note"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("assignment", grade.ASSIGNMENTS)
def test_an_untouched_release_scores_zero(graded, assignment):
    row = graded[0]["Bob [x]", assignment]
    assert float(row["score"]) == 0 < float(row["max_score"])
    assert row["note"] == ""


@pytest.mark.parametrize("assignment", HALVES)
def test_half_of_the_tasks_are_worth_half_of_the_points(assignment):
    points = points_of(read(SOURCE, assignment))
    assert 2 * sum(points[task] for task in HALVES[assignment]) == sum(points.values())


@pytest.mark.slow
@pytest.mark.parametrize("assignment", [TWO, CODELAB])
def test_a_half_right_submission_gets_its_half(graded, assignment):
    row = graded[0]["cleo", assignment]
    assert 2 * float(row["score"]) == float(row["max_score"]) > 0


@pytest.mark.slow
def test_a_crash_costs_its_own_submission_only(graded):
    row = graded[0]["dan", ONE]
    assert float(row["score"]) == 0 < float(row["max_score"])
    assert "died" in row["note"]


@pytest.mark.slow
def test_an_endless_loop_costs_its_own_task_only(graded):
    row, points = graded[0]["fay", TWO], points_of(read(SOURCE, TWO))
    assert float(row["score"]) == sum(points.values()) - points["batch_throughput"]
    assert "took longer than 15 s" in row["note"]


@pytest.mark.slow
def test_a_file_that_is_no_exercise_gets_a_note(graded):
    assert "cannot be read" in graded[0]["eve", THREE]["note"]
    assert "no assignment" in graded[0][graded_name(graded[0]), "eve_essay"]["note"]


def graded_name(table):
    return next(student for student, assignment in table if assignment == "eve_essay")


@pytest.mark.slow
def test_every_line_of_the_table_has_a_page(graded):
    table, out = graded
    pages = {str(page.relative_to(out / "feedback").with_suffix("")) for page in out.glob("feedback/**/*.html")}
    assert pages == {f"{student}/{assignment}" for student, assignment in table if student != "fay"}
    page = (out / "feedback" / "cleo" / f"{TWO}.html").read_text()
    assert "position_ids: is not written yet" in page


@pytest.mark.slow
def test_nothing_of_the_grading_is_left_behind(graded):
    assert sorted(path.name for path in graded[1].iterdir()) == ["feedback", "grades.csv"]


def test_a_folder_without_submissions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no notebook"):
        grade.grade(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        grade.grade(tmp_path / "submitted")
