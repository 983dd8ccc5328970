"""Find what was handed in, and put it back into the frame of the release.

The release's own cells (set-up, checks) are taken from the release and never from a submission: a student may have
edited or deleted them. Everything else is the student's, in the student's order.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbgrader.utils import is_grade, is_locked

EXERCISES = Path(__file__).resolve().parents[1]
ASSIGNMENTS = sorted(path.name for path in (EXERCISES / "source").iterdir() if (path / f"{path.name}.ipynb").exists())
MAX_BYTES = 20 * 2**20  # of a notebook


class GradingError(Exception):
    """A submission cannot be graded; the message says why."""


@dataclass(frozen=True)
class Submission:
    """A student's file for an assignment; `note` is what to say about how it was found."""

    student: str
    assignment: str
    path: Path
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """A code cell.

    Attributes:
        source: its text.
        is_students: whether the student wrote it or changed it.
        points: of a check cell; 0 for others.
        task: of a check cell, the exercise.
        function: of a check cell, the name of the function that is examined.
        memo: of a text that the instructor grades, its name; its points are given by hand.
    """

    source: str
    is_students: bool = False
    points: float = 0
    task: str = ""
    function: str = ""
    memo: str = ""


def find_submissions(folder: Path) -> list[Submission]:
    """Return the submissions in a folder, in whichever of three ways it is laid out.

    These are <student>/<assignment>/<assignment>.ipynb, <student>/<assignment>.ipynb and <student>_<assignment>.ipynb,
    also with what browsers, Jupyter and Canvas append to a second copy. Of several copies the newest counts. Other
    notebooks are listed, too, with an assignment that does not exist; the student of one that is in no other folder is
    the name of the whole folder. Links out of the folder are ignored.
    """
    name = re.compile(rf"(?:(.+)_)?({'|'.join(map(re.escape, ASSIGNMENTS))})(?: ?\(\d+\)|-(?:Copy)?\d+)?")
    found: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        parents = path.relative_to(folder).parts[:-1]
        inside = path.is_file() and path.resolve().is_relative_to(folder.resolve())
        if ".ipynb_checkpoints" in parents or not inside:
            continue
        prefix, assignment = match.groups() if (match := name.fullmatch(path.stem)) else (None, path.stem)
        if parents and parents[-1] == assignment:
            parents = parents[:-1]
        student = "/".join(parents) or prefix or folder.resolve().name
        found.setdefault((student, assignment), []).append(path)
    submissions = []
    for (student, assignment), paths in sorted(found.items()):
        newest = max(paths, key=lambda path: path.stat().st_mtime)
        note = f"{len(paths)} files, this is the newest: {newest.name}" if len(paths) > 1 else ""
        submissions.append(Submission(student, assignment, newest, note))
    return submissions


def release_of(assignment: str) -> list[Cell]:
    """Return the code cells of a release notebook.

    Raises:
        GradingError: there is no such assignment.
    """
    return [_cell(cell) for cell in _read_release(assignment) if cell.cell_type == "code"]


def memos_of(submission: Submission) -> list[Cell]:
    """Return the texts that the instructor grades, with the release's points; a deleted one is empty.

    Raises:
        GradingError: the submission is no notebook, or no exercise.
    """
    texts: dict[str, str] = {}
    for cell in _read(submission.path):
        if cell.cell_type == "markdown":
            texts.setdefault(_grade_id(cell), cell.source)
    asked = [cell for cell in _read_release(submission.assignment) if _is_memo(cell)]
    return [
        Cell(texts.get(name := _grade_id(cell), ""), True, cell.metadata.nbgrader.points, memo=name) for cell in asked
    ]


def cells_of(submission: Submission) -> list[Cell]:
    """Return the code cells to be run and examined, in order.

    Raises:
        GradingError: for what is no notebook, or has none of the exercise's cells.
    """
    released = _read_release(submission.assignment)
    own = {_grade_id(cell): cell for cell in released if is_locked(cell)}
    given = {cell.source for cell in released}
    handed_in = _read(submission.path)
    if not any(_grade_id(cell) in own and is_grade(own[_grade_id(cell)]) for cell in handed_in):
        raise GradingError("has none of the exercise's check cells, so it is not the notebook that was handed out")
    cells: list[tuple] = []  # (the release's name of a cell or "", the cell)
    for cell in handed_in:
        grade_id = _grade_id(cell)
        if grade_id not in own:
            cells.append(("", cell))
        elif grade_id not in dict(cells):
            cells.append((grade_id, own[grade_id]))
    _put_back(cells, released)
    return [
        _cell(cell) if grade_id in own else Cell(cell.source, is_students=cell.source not in given)
        for grade_id, cell in cells
        if cell.cell_type == "code" and cell.source.strip()
    ]


def _put_back(cells: list[tuple], released: list) -> None:
    """Insert the locked cells that the student deleted: what they check may be right all the same."""
    place = len(cells)
    for cell in reversed(released):
        there = [_grade_id(each) or each.source for _, each in cells]
        if (key := _grade_id(cell) or cell.source) in there:
            place = there.index(key)
        elif is_locked(cell):  # behind what the student may have written instead, so just before the next one
            cells.insert(place, (key, cell))


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
    tag = cell.metadata.get("nbgrader")
    grade_id = tag.get("grade_id") if isinstance(tag, dict) else None
    return grade_id if isinstance(grade_id, str) else ""


def _read(path: Path) -> list:
    if path.stat().st_size > MAX_BYTES:
        raise GradingError(f"is larger than {MAX_BYTES / 2**20:g} MB: clear its outputs")
    try:
        nb = nbformat.v4.upgrade(nbformat.read(path, as_version=4))  # Colab writes an older format, without ids
        nbformat.validate(nb)
        return nb.cells
    except Exception as error:
        raise GradingError(f"cannot be read as a notebook ({type(error).__name__})") from None


def _read_release(assignment: str) -> list:
    if assignment not in ASSIGNMENTS:
        raise GradingError(f"there is no assignment of this name: rename the file if it is {', '.join(ASSIGNMENTS)}")
    return nbformat.read(EXERCISES / "release" / assignment / f"{assignment}.ipynb", as_version=4).cells
