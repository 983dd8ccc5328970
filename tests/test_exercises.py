"""The exercises: what students get is up to date, is well-formed and holds no answer."""

import re
from itertools import pairwise

import nbformat
import pytest
from grading.release import release
from grading.submissions import ASSIGNMENTS, release_of
from handing_in import (
    CODELAB,
    EIGHT,
    ELEVEN,
    EVICTION,
    FIVE,
    FLEET_MEMO,
    FOUR,
    LESSONS,
    MEMO,
    NINE,
    ONE,
    RELEASE,
    ROOT,
    SEVEN,
    SIX,
    SOURCE,
    TEN,
    THREE,
    TWELVE,
    TWO,
    answers_of,
    nbgrader_of,
    points_of,
    read,
)

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


def test_every_lesson_has_at_least_four_tasks():
    assert all(len(answers_of(assignment)) >= 4 for assignment in LESSONS)


def test_every_notebook_of_exercises_ends_with_a_link_to_the_one_that_follows():
    order = []  # a lesson, its exercises, then its codelab or memo
    for number, lesson in enumerate(LESSONS, start=1):
        order.append(f"../../../{lesson}.ipynb")
        own = [name for name in ASSIGNMENTS if name.startswith(f"{number}_")]
        order += [f"../{name}/{name}.ipynb" for name in sorted(own, key=lambda name: name != lesson)]
    for here, following in pairwise(order):
        if here.count("..") == 1:
            _, _, step = read(RELEASE, here.split("/")[1]).cells[-1].source.partition("**Next:**")
            assert f"]({following})" in step, here


def test_every_check_has_one_task():
    tasks = [cell.task for assignment in ASSIGNMENTS for cell in release_of(assignment) if cell.task]
    assert sorted(tasks) == sorted(EXERCISES)


HALVES = {  # tasks that are worth half of the points
    ONE: ["greedy_step", "cached_loop"],
    TWO: ["batch_throughput", "left_pad"],
    THREE: ["init_batch", "generate_next_token", "merge_masks", "filter_rows"],
    FOUR: ["next_chunk", "plan_chunks"],
    FIVE: ["padded_tokens", "attend_row"],
    SIX: ["slices_of", "allocate", "release"],
    SEVEN: ["read_events", "BoundedQueue"],
    EIGHT: ["top_p", "allowed_tokens"],
    NINE: ["propose", "verify"],
    TEN: ["quantize", "unpack"],
    ELEVEN: ["resume", "route"],
    TWELVE: ["finish_times", "missing_count"],
}


@pytest.mark.parametrize("assignment", HALVES)
def test_half_of_the_tasks_are_worth_half_of_the_points(assignment):
    points = points_of(read(SOURCE, assignment))
    assert 2 * sum(points[task] for task in HALVES[assignment]) == sum(points.values())


@pytest.mark.parametrize(
    "assignment, function", [(CODELAB, "schedule"), (EVICTION, "evict"), (MEMO, "design"), (FLEET_MEMO, "plan_fleet")]
)
def test_a_codelab_is_one_function_in_several_tasks(assignment, function):
    assert list(answers_of(assignment)) == [function]
    assert len([cell for cell in release_of(assignment) if cell.task]) > 1


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
