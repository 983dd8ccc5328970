"""Release the exercises to students and grade what comes back, with nbgrader (Jupyter Development Team, JOSE 2019).

    python notebooks/exercises/grade.py release           source/ -> release/: no solutions, no hidden tests
    python notebooks/exercises/grade.py grade submitted   -> build/grades/grades.csv and build/grades/feedback/

The claim: one submission cannot spoil another. Each is graded in a folder, a database and a process of its own. A cell
that takes too long, a kernel that dies and a file that is no notebook cost that submission points and get a note in
the table.

Submissions are programs, and grading runs them with all your rights. Grade strangers' work in a container.
"""

import argparse
import contextlib
import csv
import html
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import nbformat
from nbformat.v4 import new_output
from nbgrader.apps import NbGraderAPI
from nbgrader.converters import Autograde
from nbgrader.preprocessors import Execute
from nbgrader.utils import is_grade, is_locked
from tqdm import tqdm
from traitlets.config import Config, PyFileConfigLoader

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build"
ASSIGNMENTS = sorted(path.name for path in (HERE / "source").iterdir() if (path / f"{path.name}.ipynb").exists())


class GradingError(Exception):
    """nbgrader could not do a step; the message says what it said."""


class PatientExecute(Execute):
    """nbgrader's Execute, except that a kernel which dies or no longer reacts scores 0 and ends nothing else."""

    def preprocess(self, nb, resources, km=None):
        """Run all cells of the notebook in place."""
        try:
            nb, resources = super().preprocess(nb, resources, km)
        except Exception as error:  # DeadKernelError, CellTimeoutError and whatever else a kernel's end looks like
            self.log.error("The kernel is lost: %s", error)
            for cell in filter(is_grade, nb.cells):
                said = "The kernel died or stopped reacting, so nothing in this notebook could be graded."
                cell.outputs = [new_output("error", ename="DeadKernelError", evalue=said, traceback=[said])]
            return nb, resources
        for cell in nb.cells:  # nbgrader takes stderr for a failure, but here it is a library's warning
            for output in cell.get("outputs", []):
                if output.get("name") == "stderr":
                    output.name = "stdout"
        return nb, resources


@dataclass(frozen=True)
class Submission:
    """A student's file for an assignment; `note` is what to say about how it was found."""

    student: str
    assignment: str
    path: Path
    note: str = ""


@dataclass(frozen=True)
class Grade:
    """A line of the table. `note` says what went wrong in grading, if something did."""

    student: str
    assignment: str
    score: float
    max_score: float
    note: str = ""


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What nbgrader and the kernels need to find, and where they may leave traces; afterwards all is as before."""
    before = dict(os.environ)
    for name, folder in {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}.items():
        # The former because nbgrader calls alembic by its name, the latter for the package `helpers`.
        os.environ[name] = os.pathsep.join(filter(None, [str(folder), before.get(name)]))
    for name, value in {
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "MPLCONFIGDIR": BUILD / "cache" / "matplotlib",
        "IPYTHONDIR": BUILD / "cache" / "ipython",
        "JUPYTER_CONFIG_DIR": BUILD / "cache" / "jupyter" / "config",
        "JUPYTER_DATA_DIR": BUILD / "cache" / "jupyter" / "data",
        "JUPYTER_RUNTIME_DIR": BUILD / "cache" / "jupyter" / "runtime",
    }.items():
        os.environ.setdefault(name, str(value))
    os.environ["COURSE_MODEL"] = ""  # everybody is graded on the embedded model
    (BUILD / "cache").mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings(action="ignore"):  # nbgrader's own, about its database and old formats
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@_environment()
def release(folder: Path = HERE / "release") -> list[Path]:
    """Write the student version of every assignment to folder/<assignment>/<assignment>.ipynb."""
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="release-") as course:
        _generate(Path(course), ASSIGNMENTS)
        written = []
        for assignment in ASSIGNMENTS:
            target = folder / assignment / f"{assignment}.ipynb"
            target.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(nbformat.read(Path(course, "release", assignment, target.name), as_version=4), target)
            written.append(target)
    return written


def find_submissions(folder: Path) -> list[Submission]:
    """The submissions in a folder, however they are laid out.

    <student>/<assignment>/<assignment>.ipynb, <student>/<assignment>.ipynb and <student>_<assignment>.ipynb are all
    understood, and so is what browsers and Jupyter append to a second copy. Of several copies the newest counts.
    Other notebooks are listed, too, with an assignment that does not exist.
    """
    name = re.compile(rf"(?:(.+)_)?({'|'.join(map(re.escape, ASSIGNMENTS))})(?: ?\(\d+\)|-Copy\d+)?")
    found: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        parents = path.relative_to(folder).parts[:-1]
        if ".ipynb_checkpoints" in parents:
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


@_environment()
def grade(folder: Path, out: Path = BUILD / "grades", timeout: int = 60, jobs: int = 1) -> list[Grade]:
    """Grade all submissions in a folder; write out/grades.csv and out/feedback/<student>/<assignment>.html.

    Args:
        folder: see `find_submissions`.
        timeout: seconds that a cell may take.
        jobs: submissions that are graded at the same time.

    Raises:
        ValueError: there is no such folder, or no notebook in it.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    submissions = find_submissions(folder)
    if not submissions:
        raise ValueError(f"There is no notebook in {folder}: expected <student>/<assignment>.ipynb.")
    shutil.rmtree(out / "feedback", ignore_errors=True)  # pages of an earlier run would look like this one's
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))

    grades = []
    with tempfile.TemporaryDirectory(dir=out, prefix="course-") as course:
        _generate(Path(course), [each for each in ASSIGNMENTS if any(each == s.assignment for s in submissions)])
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            running = {
                pool.submit(_grade_one, submission, Path(course), out / "feedback", timeout): submission
                for submission in submissions
            }
            for done in tqdm(as_completed(running), total=len(running), desc="grading", unit="notebook"):
                submission = running[done]
                try:
                    grades.append(done.result())
                except Exception as error:  # the grader's own process is gone
                    note = f"grading failed: {type(error).__name__}: {error}"
                    grades.append(Grade(submission.student, submission.assignment, 0, 0, note))
    grades.sort(key=lambda line: (line.student, line.assignment))
    with open(out / "grades.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["student", "assignment", "score", "max_score", "note"])
        table.writerows([g.student, g.assignment, f"{g.score:g}", f"{g.max_score:g}", g.note] for g in grades)
    return grades


# --- nbgrader -----------------------------------------------------------------------------------------------------


def _api(course: Path, timeout: int = 60) -> NbGraderAPI:
    config = Config(PyFileConfigLoader("nbgrader_config.py", str(HERE)).load_config())
    config.CourseDirectory.root = str(course)
    config.Execute.timeout = timeout
    steps = Autograde.class_traits()["autograde_preprocessors"].default()
    config.Autograde.autograde_preprocessors = [PatientExecute if step is Execute else step for step in steps]
    api = NbGraderAPI(config=config)
    api.log.setLevel(logging.CRITICAL)  # it is captured and shown when a step fails
    return api


def _generate(course: Path, assignments: Sequence[str]) -> None:
    """Fill a course folder: release/ for the students, gradebook.db to grade by."""
    shutil.copytree(HERE / "source", course / "source", ignore=shutil.ignore_patterns(".*"))
    api = _api(course)
    for assignment in assignments:
        _must_succeed(api.generate_assignment(assignment), f"generating {assignment}")


def _must_succeed(result: dict, step: str) -> None:
    if not result["success"]:
        raise GradingError(f"{step} failed\n{result.get('log', '')}\n{result.get('error', '')}")


def _grade_one(submission: Submission, template: Path, feedback: Path, timeout: int) -> Grade:
    """Grade one submission in a course folder of its own, and write its page."""
    warnings.simplefilter("ignore")  # as above: this is a process of its own
    student, assignment = submission.student, submission.assignment
    page = feedback / student / f"{assignment}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=template.parent, prefix="submission-") as folder:
        # A student's name may be anything, a glob pattern included: nbgrader knows them all as "student".
        course, score, max_score, notes = Path(folder), 0.0, 0.0, [submission.note]
        shutil.copyfile(template / "gradebook.db", course / "gradebook.db")
        submitted = course / "submitted" / "student" / assignment / f"{assignment}.ipynb"
        submitted.parent.mkdir(parents=True)
        shutil.copyfile(submission.path, submitted)
        api = _api(course, timeout)
        try:
            with api.gradebook as gradebook:
                max_score = _max_score(gradebook, assignment)
            _put_back(submitted, template / "release" / assignment / submitted.name)
            _must_succeed(api.autograde(assignment, "student"), "autograding")
            _must_succeed(api.generate_feedback(assignment, "student"), "feedback")
            with api.gradebook as gradebook:
                score = gradebook.find_submission(assignment, "student").score
            notes += _what_happened(course / "autograded" / "student" / assignment / submitted.name, timeout)
            shutil.copyfile(course / "feedback" / "student" / assignment / f"{assignment}.html", page)
        except Exception as error:
            notes.append(str(error).strip() or type(error).__name__)
            shown = html.escape(f"{assignment}: 0 of {max_score:g} points\n\n{notes[-1]}")
            page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><pre>{shown}</pre>', encoding="utf-8")
    note = "; ".join(part.splitlines()[0] for part in notes if part)
    return Grade(student, assignment, score, max_score, note)


def _max_score(gradebook, assignment: str) -> float:
    if assignment not in ASSIGNMENTS:
        raise GradingError(f"there is no assignment of this name; there are {', '.join(ASSIGNMENTS)}")
    return gradebook.find_assignment(assignment).max_score


def _put_back(submitted: Path, released: Path) -> None:
    """Insert the locked cells that a student deleted: what they check may be right all the same.

    (nbgrader's own option for this fails when the cell before is missing, too.)

    Raises:
        GradingError: for what is no notebook, or has none of the exercise's cells.
    """
    try:
        nb = nbformat.v4.upgrade(nbformat.read(submitted, as_version=4))  # Colab writes an older format, without ids
        nbformat.validate(nb)
    except Exception as error:
        raise GradingError(f"cannot be read as a notebook ({type(error).__name__})") from None
    if not any(is_grade(cell) for cell in nb.cells):
        raise GradingError("has none of the exercise's check cells, so it is not the notebook that was handed out")
    there = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in nb.cells]
    place = len(there)
    for cell in reversed(nbformat.read(released, as_version=4).cells):
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        if grade_id in there:
            place = there.index(grade_id) if grade_id else place
        elif is_locked(cell):  # behind what the student may have written instead, so just before the next one
            nb.cells.insert(place, cell)
            there.insert(place, grade_id)
    nbformat.write(nb, submitted)


def _what_happened(autograded: Path, timeout: int) -> list[str]:
    """Notes on an autograded notebook: a kernel that died, cells that took too long."""
    nb = nbformat.read(autograded, as_version=4)
    names = [output.ename for cell in nb.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    if "DeadKernelError" in names:
        return ["the kernel died or stopped reacting, nothing could be graded"]
    late = names.count("CellTimeoutError")
    return [f"{late} cell{'s' if late > 1 else ''} took longer than {timeout} s"] if late else []


# --- the command line ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("release", help="write the student notebooks to release/")
    options = commands.add_parser("grade", help="grade a folder of submissions")
    options.add_argument("folder", type=Path, help="with <student>/<assignment>.ipynb or the like")
    options.add_argument("--out", type=Path, default=BUILD / "grades", help="where the table and the pages go")
    options.add_argument("--timeout", type=int, default=60, help="seconds that a cell may take")
    cores = os.cpu_count() or 1
    options.add_argument("--jobs", type=int, default=min(8, max(1, cores // 2)), help="graded at the same time")
    args = parser.parse_args(argv)
    if args.command == "release":
        for path in release():
            print(os.path.relpath(path))
        return
    try:
        grades = grade(args.folder, args.out.resolve(), args.timeout, args.jobs)
    except ValueError as error:
        sys.exit(str(error))
    for line in grades:
        print(f"{line.student:20} {line.assignment:32} {line.score:5g} of {line.max_score:g}  {line.note}")
    out = os.path.relpath(args.out)
    print(f"The table is {out}/grades.csv, the pages are in {out}/feedback.")


if __name__ == "__main__":
    main()
