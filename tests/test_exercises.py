"""The exercises: what students get is up to date, is well-formed and holds no answer."""

import re
from itertools import pairwise
from pkgutil import resolve_name
from types import FunctionType

import nbformat
import pytest
from grading.release import release
from grading.submissions import ASSIGNMENTS, release_of
from handing_in import FLEET_MEMO, LESSONS, MEMO, RELEASE, ROOT, SOURCE, answers_of, nbgrader_of, points_of, read

from helpers.checks.calling import answer
from helpers.checks.examining import examine
from helpers.checks.exercise import Exercise
from helpers.checks.exercises import EXERCISES


def test_the_release_is_up_to_date(tmp_path):
    for fresh in release(tmp_path):
        committed = RELEASE / fresh.relative_to(tmp_path)
        assert committed.read_text() == fresh.read_text(), "the sources have changed: run make release"
    assert sorted(path.name for path in RELEASE.iterdir()) == ASSIGNMENTS


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_release_contains_no_solution(assignment):
    cells = read(RELEASE, assignment).cells
    text = "\n".join(cell.source for cell in cells)
    assert not re.search("SOLUTION|HIDDEN", text)
    stubs = [cell for cell in cells if cell.cell_type == "code" and "raise NotImplementedError" in cell.source]
    assert len(stubs) == len(answers_of(assignment))

    secret = set()
    for cell in read(SOURCE, assignment).cells:
        for region in re.findall(r"### BEGIN SOLUTION\n(.*?)### END", cell.source, re.DOTALL):
            secret |= {line.strip() for line in region.splitlines()}
        assert len(re.findall("### BEGIN", cell.source)) == len(re.findall("### END", cell.source))
    telling = {line for line in secret if len(line) > 12}  # not `}` and the like
    assert telling
    assert telling.isdisjoint(line.strip() for line in text.splitlines())


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_source_notebook_is_well_formed(assignment):
    nb = read(SOURCE, assignment)
    nbformat.validate(nb)
    ids = [nbgrader_of(cell)["grade_id"] for cell in nb.cells if nbgrader_of(cell)]
    assert len(ids) == len(set(ids))
    assert all(points > 0 for points in points_of(nb).values())
    assert not any(cell.get("outputs") for cell in nb.cells)
    first = next(cell for cell in nb.cells if cell.cell_type == "code")
    assert nbgrader_of(first)["locked"] and "helpers" in first.source
    hints = [cell for cell in nb.cells if "<details>" in cell.source]
    assert len(hints) >= len(answers_of(assignment))


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_check_cell_examines_one_task(assignment):
    cells = [cell for cell in read(SOURCE, assignment).cells if cell.cell_type == "code"]
    checks = [cell for cell in cells if nbgrader_of(cell).get("grade")]
    examined = [re.fullmatch(r'assert check\("(\w+)", (\w+)\)', cell.source) for cell in checks]
    assert all(examined)
    assert {match[2] for match in examined} == set(answers_of(assignment))
    assert [match[1] for match in examined] == [cell.task for cell in release_of(assignment) if cell.task]


def test_every_check_has_one_task():
    tasks = [cell.task for assignment in ASSIGNMENTS for cell in release_of(assignment) if cell.task]
    assert sorted(tasks) == sorted(EXERCISES)


@pytest.mark.parametrize("memo, secret", [(MEMO, "192 blocks"), (FLEET_MEMO, "replica-seconds")])
def test_a_memo_is_a_text_that_the_instructor_grades_and_its_rubric_is_on_the_instructor_s_page(memo, secret):
    (source,), (released,) = (
        [cell for cell in read(folder, memo).cells if cell.cell_type == "markdown" and nbgrader_of(cell)]
        for folder in (SOURCE, RELEASE)
    )
    assert nbgrader_of(released) | nbgrader_of(source) == nbgrader_of(released)
    assert nbgrader_of(source) | {"grade": True, "solution": True, "locked": False, "points": 4} == nbgrader_of(source)
    assert secret in source.source and secret not in released.source
    text = "\n".join(cell.source for cell in read(RELEASE, memo).cells)
    page = (ROOT / "INSTRUCTOR.md").read_text(encoding="utf-8")
    rubric = [line for line in text.splitlines() if line.startswith("| **")]
    assert len(rubric) == 4 and all(line in page for line in rubric)


@pytest.mark.parametrize("assignment", LESSONS)
def test_every_task_has_an_example_and_the_solution_returns_what_it_says(assignment):
    """An example `call` is `value` is evaluated; others are in words."""
    cells = read(SOURCE, assignment).cells
    imports = [
        line for cell in cells[:4] for line in cell.source.splitlines() if re.match(r"import |from \S+ import ", line)
    ]
    namespace = {}
    exec("\n".join(["import torch", *imports]), namespace)
    for text, cell in pairwise(cells):
        if nbgrader_of(cell).get("solution"):
            exec(cell.source, namespace)
            name = nbgrader_of(cell)["grade_id"]
            example = re.search(r"^\*\*Examples?:\*\* (.*?)\n\n", text.source, re.MULTILINE | re.DOTALL)
            assert example or "An example" in text.source, f"{name} has no example"
            for call, value in re.findall(rf"`((?:list\()?{name}\(.*?\))` is `(.*?)`", example[1] if example else ""):
                assert repr(eval(call, namespace)) == repr(eval(value, namespace)), call


def test_a_copy_of_the_course_s_own_function_is_no_right_answer():
    """Calls to it are recognized; its text can be pasted into a cell."""
    passed = set()
    for task, exercise in EXERCISES.items():
        questions = exercise.questions(0) if isinstance(exercise, Exercise) else []
        functions = [resolve_name(name) for name in questions and questions[0][0].forbidden]
        own = {function.__name__: function for function in functions}
        copies = {
            name: FunctionType(function.__code__, dict(function.__globals__), name, function.__defaults__)
            for name, function in own.items()
        }
        for copy in copies.values():
            copy.__globals__.update(copies)
            if examine(exercise, lambda question, copy=copy: answer(question, copy)).passed:
                passed.add(task)
    assert not passed, "INSTRUCTOR.md says so"
