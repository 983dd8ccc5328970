"""Release the exercises to students, and grade what comes back.

    python notebooks/exercises/grade.py release           source/ -> release/: no solutions
    python notebooks/exercises/grade.py grade submitted   -> build/grades/grades.csv and build/grades/feedback/
    python notebooks/exercises/grade.py memos points.csv  points and comments given by hand -> the same table and pages

The claim: a submission gets the points that it deserves, whatever else it does. It runs in a sandbox without a network
and without the solutions, its tasks are examined outside of it, and no other submission notices.
"""

import argparse
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grading import sandbox
from grading.examiners import Grade, Options, grade_all
from grading.finding import Ignored, find_submissions
from grading.gradebook import Gradebook
from grading.plain import line
from grading.release import release
from grading.roster import Roster
from grading.submissions import ASSIGNMENTS, Submission
from grading.tables import write_csv
from grading.worker_process import Limits
from tqdm import tqdm

BUILD = Path(__file__).resolve().parents[2] / "build"
MAX_SHOWN = 20  # lines in the terminal on what was ignored; all are in ignored.csv


@dataclass(frozen=True)
class Choice:
    """Which submissions to grade; with none of these, all that are found.

    Attributes:
        students: only these.
        assignments: only these.
        roster: a table of the course's students, see `Roster`.
    """

    students: Sequence[str] = ()
    assignments: Sequence[str] = ()
    roster: Path | None = None


@dataclass(frozen=True)
class Run:
    """What a run did: its grades, the files that it ignored, and the grades that did not replace better ones."""

    grades: list[Grade]
    ignored: list[Ignored]
    kept: list[str]


def grade(
    place: Path,
    out: Path,
    options: Options,
    choice: Choice = Choice(),
    jobs: int = 1,
    replaces: bool = False,
    is_anonymous: bool = False,
) -> Run:
    """Grade the submissions in a folder or .zip; write them into the gradebook in `out`, see `Gradebook`.

    Args:
        place: see `find_submissions`.
        out: the folder for the tables and the pages.
        options: how to grade.
        choice: which submissions.
        jobs: submissions that are graded at the same time.
        replaces: whether a grade may replace a better one of an earlier run.
        is_anonymous: whether the leaderboard's page leaves out the names.

    Raises:
        ValueError: there is nothing to grade at `place`, a student of the choice handed in nothing, an assignment of it
            does not exist, or a table is no such table.
        NoSandboxError: there is no working sandbox on this machine.
    """
    book = Gradebook(out, is_anonymous)
    grades, kept = [], []
    with tempfile.TemporaryDirectory(prefix="submitted-") as scratch:
        submissions, ignored = _select(place, Path(scratch), choice)
        if options.is_sandboxed:
            sandbox.require()
        try:
            with contextlib.closing(grade_all(submissions, options, jobs)) as done:
                for each in tqdm(done, total=len(submissions), desc="grading", unit="notebook"):
                    grades.append(each)
                    kept.append(book.enter(each, options.seed, replaces))
        finally:  # Ctrl-C, too: what is graded is not lost
            book.write()
        reasons = [(line(each.what), line(each.reason)) for each in ignored]
        write_csv(out / "ignored.csv", [("what", "reason"), *reasons])
    ordered = sorted(grades, key=lambda each: (each.student, each.assignment))
    return Run(ordered, ignored, sorted(filter(None, kept)))


def _select(place: Path, scratch: Path, choice: Choice) -> tuple[list[Submission], list[Ignored]]:
    """Return the chosen submissions and what was ignored; errors as for `grade`."""
    if not place.exists():
        raise ValueError(f"There is no folder and no file {place}.")
    for assignment in choice.assignments:
        if assignment not in ASSIGNMENTS:
            raise ValueError(f"There is no assignment {assignment!r}, only {', '.join(ASSIGNMENTS)}.")
    roster = Roster(choice.roster) if choice.roster else None
    submissions, ignored = find_submissions(place, scratch, roster, choice.assignments)
    if not submissions:
        reasons = "".join(f"\n{line(each.what)}: {line(each.reason)}" for each in ignored[:MAX_SHOWN])
        raise ValueError(f"There is no notebook of an exercise in {place}.{reasons}")
    names = sorted({each.student for each in submissions})
    for student in choice.students:
        if student not in names:
            raise ValueError(f"There is no submission of {student!r} in {place}, only of {', '.join(names)}.")
    return [each for each in submissions if not choice.students or each.student in choice.students], ignored


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("release", help="write the student notebooks to release/")
    grading = commands.add_parser("grade", help="grade a folder of submissions, or a .zip")
    grading.add_argument("place", type=Path, help="a folder or .zip, as Moodle, Canvas or GitHub Classroom make them")
    grading.add_argument("--assignment", action="append", default=[], help="grade only this one; may be repeated")
    grading.add_argument("--roster", type=Path, help="a .csv of the students: the first column has their ids")
    grading.add_argument("--student", action="append", default=[], help="grade only this student; may be repeated")
    grading.add_argument("--replace", action="store_true", help="also replace better grades of earlier runs")
    grading.add_argument("--anonymous", action="store_true", help="leave out the names on the leaderboard's page")
    grading.add_argument("--timeout", type=int, default=60, help="seconds that a cell may take, or a task")
    grading.add_argument("--memory", type=float, default=4, help="GB that a submission may use")
    grading.add_argument("--seed", help="repeat the grades of a table (default: a new one of 128 bits)")
    grading.add_argument("--no-sandbox", action="store_true", help="let submissions run with all your rights")
    jobs = min(8, max(1, (os.cpu_count() or 1) // 2))
    grading.add_argument("--jobs", type=int, default=jobs, help="graded at the same time")
    memos = commands.add_parser("memos", help="fill in the points and comments that were given by hand")
    memos.add_argument("points", type=Path, nargs="?", help="a .csv with student, assignment, points and comment")
    for command in (grading, memos):
        command.add_argument("--out", type=Path, default=BUILD / "grades", help="where the tables and the pages are")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the arguments say."""
    args = _parser().parse_args(argv)
    try:
        match args.command:
            case "release":
                for path in release():
                    print(os.path.relpath(path))
            case "memos":
                _give_points(args)
            case "grade":
                _grade(args)
    except (ValueError, sandbox.NoSandboxError) as error:
        sys.exit(str(error))


def _give_points(args: argparse.Namespace) -> None:
    book = Gradebook(args.out.resolve())
    number = book.give(args.points or args.out / "memos.csv")
    book.write()
    print(f"{number} texts have points. The table is {os.path.relpath(args.out)}/grades.csv.")


def _grade(args: argparse.Namespace) -> None:
    limits = Limits(
        seconds=args.timeout,
        added_seconds=10 * args.timeout,
        total_seconds=120 * args.timeout,
        memory=int(args.memory * 2**30),
        threads=max(1, (os.cpu_count() or 1) // args.jobs),
    )
    options = Options(limits, args.seed or secrets.token_hex(16), not args.no_sandbox)
    choice = Choice(args.student, args.assignment, args.roster)
    out = os.path.relpath(args.out)
    try:
        run = grade(args.place, args.out.resolve(), options, choice, args.jobs, args.replace, args.anonymous)
    except KeyboardInterrupt:
        sys.exit(f"Interrupted. What was graded is in {out}, with the seed {options.seed}.")
    for each in run.grades:
        by_hand = f" + up to {most:g} by hand" if (most := sum(most for _, most in each.memos)) else ""
        points = f"{each.score:5g} of {each.max_score:g}{by_hand}"
        print(f"{each.student:20} {each.assignment:32} {points}  {line(each.note)}")
    for text in run.kept:
        print(text)
    for each in run.ignored[:MAX_SHOWN]:
        print(f"ignored: {line(each.what)}: {line(each.reason)}")
    if len(run.ignored) > MAX_SHOWN:
        print(f"ignored: {len(run.ignored) - MAX_SHOWN} more, see {out}/ignored.csv")
    print(
        f"The table is {out}/grades.csv, the pages are in {out}/feedback. To repeat the grades: --seed {options.seed}"
    )


if __name__ == "__main__":
    main()
