"""Submissions for the tests of grading: release notebooks with answers typed in, as a student would do it."""

import json
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
SOURCE, RELEASE = ROOT / "notebooks/exercises/source", ROOT / "notebooks/exercises/release"
LESSONS = sorted((path.stem for path in ROOT.glob("notebooks/[1-9]*.ipynb")), key=lambda name: int(name.split("_")[0]))
ONE, TWO, THREE = LESSONS[:3]
CODELAB, EVICTION, MEMO, FLEET_MEMO = "4_codelab_scheduler", "8_codelab_eviction", "10_design_memo", "18_fleet_memo"
CAPSTONE = "18_capstone_engine"


def read(folder, assignment):
    return nbformat.read(folder / assignment / f"{assignment}.ipynb", as_version=4)


def nbgrader_of(cell):
    return cell.metadata.get("nbgrader", {})


def points_of(nb):
    """For each task, which is the name of its solution cell, the points of the check cells up to the next task.

    Points that the instructor gives by hand are left out.
    """
    points, task = {}, None
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
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
        if nbgrader_of(cell).get("solution") and cell.cell_type == "code"
    }
    assert solved
    return solved


def notebook(assignment, answers):
    """A release notebook with these answers typed in, {task: cell}."""
    nb = read(RELEASE, assignment)
    for cell in nb.cells:
        if nbgrader_of(cell).get("grade_id") in answers:
            cell.source = answers[nbgrader_of(cell)["grade_id"]]
    return nb


def with_cells(nb, sources, at):
    """Put a student's own cells into a notebook at a place."""
    index = at if at >= 0 else len(nb.cells) + at
    nb.cells[index:index] = [nbformat.v4.new_code_cell(source) for source in sources]
    return nb


def hand_in(path, nb):
    """Write a notebook to a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(nb), encoding="utf-8")
