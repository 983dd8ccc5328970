"""A notebook that was handed in, put back into the frame of the release.

The release's own cells (set-up, checks) are taken from the release and never from a submission: a student may have
edited, copied or deleted them. Everything else is the student's, in the student's order.
"""

import ast
import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from nbgrader.utils import is_grade, is_locked, is_solution

EXERCISES = Path(__file__).resolve().parents[1]
ASSIGNMENTS = sorted(path.name for path in (EXERCISES / "source").iterdir() if (path / f"{path.name}.ipynb").exists())
MAX_BYTES = 20 * 2**20  # of a notebook
MAX_CELLS = 2000  # of a notebook
MAX_COPIES = 5  # of a check cell that are examined: the last ones


class GradingError(Exception):
    """A submission cannot be graded; the message says why."""


@dataclass(frozen=True)
class Submission:
    """A student's file for an assignment; `note` is what to say about how it was found, `name` is the student's."""

    student: str
    assignment: str
    path: Path
    note: str = ""
    name: str = ""


@dataclass(frozen=True)
class Cell:
    """A code cell.

    Attributes:
        source: its text.
        is_students: whether the student wrote it or changed it.
        is_added: whether the release has no such cell, so that running it is limited in time.
        points: of a check cell; 0 for others.
        task: of a check cell, the exercise.
        function: of a check cell, the name of the function that is examined.
        memo: of a text that the instructor grades, its name; its points are given by hand.
    """

    source: str
    is_students: bool = False
    is_added: bool = False
    points: float = 0
    task: str = ""
    function: str = ""
    memo: str = ""


def release_of(assignment: str) -> list[Cell]:
    """Return the code cells of a release notebook.

    Raises:
        GradingError: there is no such assignment.
    """
    return [_cell(cell) for cell in _read_release(assignment) if cell.cell_type == "code"]


def memos_of(submission: Submission) -> list[Cell]:
    """Return the texts that the instructor grades, with the release's points; one without an answer is empty.

    An answer in another cell than the one for it, or written into the question, is part of the text before it.

    Raises:
        GradingError: the submission is no notebook, or no exercise.
    """
    released = _read_release(submission.assignment)
    asked = {_grade_id(cell): cell.metadata.nbgrader.points for cell in released if _is_memo(cell)}
    given = {cell.source.strip() for cell in released}
    texts: dict[str, list[str]] = {name: [] for name in asked}
    current = next(iter(asked), None)
    for cell in _read(submission.path) if asked else ():
        if cell.kind == "markdown":
            current = cell.grade_id if cell.grade_id in asked else current
            if cell.source.strip() and cell.source.strip() not in given:
                texts[current].append(cell.source)
    return [Cell("\n\n".join(texts[name]), True, points=points, memo=name) for name, points in asked.items()]


def cells_of(submission: Submission) -> list[Cell]:
    """Return the code cells to be run and examined, in order.

    Raises:
        GradingError: for what is no notebook, or has none of the exercise's cells.
    """
    released = _read_release(submission.assignment)
    own = {_grade_id(cell): cell for cell in released if is_locked(cell)}
    given = {cell.source for cell in released}
    answers = {_grade_id(cell) for cell in released if is_solution(cell)}
    handed_in = _read(submission.path)
    if not any(cell.grade_id in own and is_grade(own[cell.grade_id]) for cell in handed_in):
        raise GradingError("has none of the exercise's check cells, so it is not the notebook that was handed out")
    left, seen = Counter(cell.grade_id for cell in handed_in), set()
    cells: list[tuple[str, Cell | None]] = []  # what stands at a place, for `_put_back`, and the code to run
    for cell in handed_in:
        name, is_copy = cell.grade_id, cell.grade_id in seen
        seen.add(name)
        left[name] -= 1
        if name not in own:
            is_students = cell.source not in given
            is_added = is_students and (is_copy or name not in answers)
            code = cell.kind == "code" and cell.source.strip()
            cells.append((name or cell.source, Cell(cell.source, is_students, is_added) if code else None))
        elif left[name] < MAX_COPIES if is_grade(own[name]) else not is_copy:
            cells.append((name, _code(own[name])))
    _put_back(cells, released)
    return [cell for _, cell in cells if cell]


def identify(path: Path) -> tuple[str, bool]:
    """Return the assignment whose check cells a notebook has, "" for none, and whether it holds work of a student.

    Raises:
        GradingError: it is no notebook.
    """
    cells = _read(path)
    names = {cell.grade_id for cell in cells}
    counts = {assignment: len(names & _checks_of(assignment)) for assignment in ASSIGNMENTS}
    assignment = max(counts, key=counts.get)
    if not counts[assignment]:
        return "", False
    given = {cell.source.strip() for cell in _read_release(assignment)}
    return assignment, any(cell.source.strip() not in given for cell in cells if cell.source.strip())


@cache
def _checks_of(assignment: str) -> set[str]:
    return {_grade_id(cell) for cell in _read_release(assignment) if is_grade(cell) and cell.cell_type == "code"}


def _put_back(cells: list[tuple], released: list) -> None:
    """Insert the locked cells that the student deleted: what they check may be right all the same."""
    place = len(cells)
    for cell in reversed(released):
        there = [key for key, _ in cells]
        if (key := _grade_id(cell) or cell.source) in there:
            place = there.index(key)
        elif is_locked(cell):  # behind what the student may have written instead, so just before the next one
            cells.insert(place, (key, _code(cell)))


def _code(cell) -> Cell | None:
    return _cell(cell) if cell.cell_type == "code" and cell.source.strip() else None


def _cell(cell) -> Cell:
    """Return a cell of the release."""
    if not is_grade(cell):
        return Cell(cell.source)
    for node in ast.walk(ast.parse(cell.source)):
        match node:
            case ast.Call(ast.Name("check"), [ast.Constant(str(task)), ast.Name(function)]):
                return Cell(cell.source, points=cell.metadata.nbgrader.points, task=task, function=function)
    raise GradingError(f'the check cell {_grade_id(cell)} of the release has no `assert check("task", function)`')


def _is_memo(cell) -> bool:
    """Return whether the instructor grades a cell of the release by hand."""
    return cell.cell_type == "markdown" and is_grade(cell)


def _grade_id(cell) -> str:
    tag = cell["metadata"].get("nbgrader")
    grade_id = tag.get("grade_id") if isinstance(tag, dict) else None
    return grade_id if isinstance(grade_id, str) else ""


@dataclass(frozen=True)
class _HandedIn:
    """A cell of a student's notebook."""

    kind: str
    source: str
    grade_id: str


def _read(path: Path) -> list[_HandedIn]:
    """Return a student's cells. Jupyter's own reader would check every output, for a minute if there are many."""
    if path.stat().st_size > MAX_BYTES:
        raise GradingError(f"is larger than {MAX_BYTES / 2**20:g} MB: clear its outputs")
    try:
        cells = json.loads(path.read_bytes())["cells"]
        texts = [cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"]) for cell in cells]
        handed_in = [
            _HandedIn(str(cell["cell_type"]), text, _grade_id(cell)) for cell, text in zip(cells, texts, strict=True)
        ]
    except Exception as error:
        raise GradingError(f"cannot be read as a notebook ({type(error).__name__})") from None
    if len(handed_in) > MAX_CELLS:
        raise GradingError(f"has more than {MAX_CELLS:,} cells")
    return handed_in


@cache
def _read_release(assignment: str) -> list:
    if assignment not in ASSIGNMENTS:
        raise GradingError(f"there is no assignment {assignment!r}, only {', '.join(ASSIGNMENTS)}")
    return nbformat.read(EXERCISES / "release" / assignment / f"{assignment}.ipynb", as_version=4).cells
