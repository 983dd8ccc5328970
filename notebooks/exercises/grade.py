"""Release the exercises to students, and grade what comes back.

    python notebooks/exercises/grade.py release           source/ -> release/: no solutions
    python notebooks/exercises/grade.py grade submitted   -> build/grades/grades.csv and build/grades/feedback/

The claim: a submission gets the points that it deserves, whatever else it does. It runs in a sandbox without a network
and without the solutions, its tasks are examined outside of it, and no other submission notices.
"""

import argparse
import contextlib
import csv
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from grading import sandbox
from grading.examiners import Grade, Options, grade_all
from grading.release import release
from grading.submissions import ASSIGNMENTS, Submission, find_submissions
from grading.worker_process import Limits
from tqdm import tqdm

BUILD = Path(__file__).resolve().parents[2] / "build"
COLUMNS = ["student", "assignment", "score", "max_score", "by_hand", "note", "tasks", "seed"]


def grade(
    folder: Path,
    out: Path,
    limits: Limits,
    seed: int,
    jobs: int = 1,
    is_sandboxed: bool = True,
    students: Sequence[str] = (),
) -> list[Grade]:
    """Grade the submissions in a folder; write out/grades.csv and out/feedback/<student>/<assignment>.html.

    Lines and pages of earlier runs stay, so grades of another week, or before a late submission, are not lost. Those of
    a submission that is graded again are replaced.

    Args:
        folder: see `find_submissions`.
        out: the folder for the table and the pages.
        limits: what a submission may use.
        seed: of the cases; a grade is repeated with the same one.
        jobs: submissions that are graded at the same time.
        is_sandboxed: whether submissions run in the sandbox.
        students: grade only these students' submissions; all if empty.

    Returns:
        The grades of this run.

    Raises:
        ValueError: there is no such folder, no notebook in it or none of a student, or out/grades.csv is another table.
        NoSandboxError: there is no working sandbox on this machine.
    """
    submissions = _select(folder, students)
    present = {each.student for each in submissions}
    if not students:
        present.add(folder.resolve().name)  # see `find_submissions`
    lines = {
        (student, assignment): line
        for (student, assignment), line in _read_table(out / "grades.csv").items()
        if assignment in ASSIGNMENTS or student not in map(_no_formula, present)  # such a file may have a new name now
    }
    if is_sandboxed:
        sandbox.require()
    for student in present:
        for page in (out / "feedback" / student).glob("*.html"):
            if page.stem not in ASSIGNMENTS:
                page.unlink()
    out.mkdir(parents=True, exist_ok=True)
    options, grades = Options(out / "feedback", limits, seed, is_sandboxed), []
    try:
        with contextlib.closing(grade_all(submissions, options, jobs)) as done:
            for each in tqdm(done, total=len(submissions), desc="grading", unit="notebook"):
                grades.append(each)
                points = [f"{number:g}" for number in (each.score, each.max_score, each.by_hand)]
                student, assignment, *texts = map(_no_formula, [each.student, each.assignment, each.note, each.tasks])
                lines[student, assignment] = [student, assignment, *points, *texts, seed]
    finally:  # Ctrl-C, too: what is graded is not lost
        with open(out / "grades.csv.part", "w", newline="", encoding="utf-8", errors="replace") as file:
            csv.writer(file).writerows([COLUMNS, *(lines[key] for key in sorted(lines))])
        os.replace(file.name, out / "grades.csv")  # at once: a second Ctrl-C leaves the old table or the new one
    return sorted(grades, key=lambda line: (line.student, line.assignment))


def _select(folder: Path, students: Sequence[str]) -> list[Submission]:
    """Return the submissions in a folder, of these students only or, with none, of all; errors as for `grade`."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    submissions = find_submissions(folder)
    if not submissions:
        raise ValueError(f"There is no notebook in {folder}: expected <student>/<assignment>.ipynb.")
    names = sorted({each.student for each in submissions})
    for student in students:
        if student not in names:
            raise ValueError(f"There is no submission of {student!r} in {folder}, only of {', '.join(names)}.")
    return [each for each in submissions if not students or each.student in students]


def _read_table(path: Path) -> dict[tuple[str, str], list[str]]:
    """Return the lines of a table of grades by student and assignment; none if there is no such file.

    Raises:
        ValueError: the file is another table.
    """
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        lines = [line for line in csv.reader(file) if line]
    if lines[:1] != [COLUMNS] or any(len(line) != len(COLUMNS) for line in lines):
        raise ValueError(f"{path} is not a table of grades with the columns {', '.join(COLUMNS)}: move it elsewhere.")
    return {(line[0], line[1]): line for line in lines[1:]}


def _no_formula(text: str) -> str:
    """Return a text that a spreadsheet does not compute."""
    return f"'{text}" if text.startswith(tuple("=+-@\t\r")) else text


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("release", help="write the student notebooks to release/")
    options = commands.add_parser("grade", help="grade a folder of submissions")
    options.add_argument("folder", type=Path, help="with <student>/<assignment>.ipynb or the like")
    options.add_argument("--out", type=Path, default=BUILD / "grades", help="where the table and the pages go")
    options.add_argument("--timeout", type=int, default=60, help="seconds that a cell may take, or a task")
    options.add_argument("--memory", type=float, default=4, help="GB that a submission may use")
    options.add_argument("--seed", type=int, help="repeat the grades of a table (default: a new one)")
    options.add_argument("--student", action="append", default=[], help="grade only this student; may be repeated")
    options.add_argument("--no-sandbox", action="store_true", help="let submissions run with all your rights")
    cores = os.cpu_count() or 1
    options.add_argument("--jobs", type=int, default=min(8, max(1, cores // 2)), help="graded at the same time")
    args = parser.parse_args(argv)
    if args.command == "release":
        for path in release():
            print(os.path.relpath(path))
        return
    limits = Limits(
        seconds=args.timeout,
        total_seconds=10 * args.timeout,
        memory=int(args.memory * 2**30),
        threads=max(1, cores // args.jobs),
    )
    seed = secrets.randbelow(10**6) + 10 if args.seed is None else args.seed  # students see 0
    try:
        is_sandboxed = not args.no_sandbox
        grades = grade(args.folder, args.out.resolve(), limits, seed, args.jobs, is_sandboxed, args.student)
    except (ValueError, sandbox.NoSandboxError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"Interrupted. What was graded is in {os.path.relpath(args.out)}, with the seed {seed}.")
    for line in grades:
        print(f"{line.student:20} {line.assignment:32} {line.score:5g} of {line.max_score:g}  {line.note}")
    out = os.path.relpath(args.out)
    print(f"The table is {out}/grades.csv, the pages are in {out}/feedback. To repeat the grades: --seed {seed}")


if __name__ == "__main__":
    main()
