"""Find what was handed in, whatever the files are called and however they are laid out.

A notebook is recognized by the ids of its check cells. Whose it is, a roster says, or else its path: a folder per
student, a name before the exercise's, or what Moodle and Canvas write. Whatever is not graded is listed with a reason.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .archives import NOTEBOOK, File, notebooks_in
from .plain import student_id
from .roster import Roster
from .submissions import ASSIGNMENTS, GradingError, Submission, identify

NAMES = "|".join(map(re.escape, ASSIGNMENTS))
# Browsers, Jupyter and Canvas append the number to a second copy.
NAMED = re.compile(rf"(?:(?P<student>.+)_)?(?P<assignment>{NAMES})(?: ?\(\d+\)|-(?:Copy)?\d+)?", re.IGNORECASE)
MOODLE = re.compile(r"(?P<name>.+?)_(?P<number>\d+)_assign(?:submission|feedback)_.*")
CANVAS = re.compile(r"(?P<name>[^_]+)(?:_LATE)?_(?P<number>\d{2,})_\d{2,}_(?P<file>.+)")


@dataclass(frozen=True)
class Ignored:
    """A file that is not graded, or a student without one, and the reason."""

    what: str
    reason: str


@dataclass(frozen=True)
class _Candidate:
    """A file, and what is known of it. Of several, the greatest is graded."""

    file: File
    assignment: str
    has_checks: bool
    is_work: bool

    @property
    def rank(self) -> tuple:
        return self.has_checks, self.is_work, self.file.modified

    @property
    def shown(self) -> str:
        return "/".join(self.file.parts)


def find_submissions(
    place: Path, scratch: Path, roster: Roster | None = None, assignments: Sequence[str] = ()
) -> tuple[list[Submission], list[Ignored]]:
    """Return the submissions in a folder or a .zip, and what was ignored.

    Args:
        place: a folder per student, or files that name the student; a Moodle or Canvas download; checkouts of GitHub
            Classroom. Archives in it are unpacked.
        scratch: an empty folder for what is unpacked. It has to stay as long as the submissions are read.
        roster: only its students' files count.
        assignments: only these count; all if empty.
    """
    found: dict[tuple[str, str], list[_Candidate]] = defaultdict(list)
    ignored: list[Ignored] = []
    files = list(notebooks_in(place, scratch))
    if place.is_file() and {file.parts[0] for file in files} == {place.stem}:  # a folder that was packed as a whole
        files = [File(file.parts[1:] or file.parts, file.path, file.modified, file.problem) for file in files]
    persons = _Persons(files, place.stem if place.is_file() else place.resolve().name, roster)
    for file in files:
        candidate, reason = _candidate(file, assignments)
        student = persons.student_of(file.parts)
        if not reason and student is None:
            reason = "names no student of the roster, or several"
        if reason:
            ignored.append(Ignored("/".join(file.parts), reason))
        else:
            found[student, candidate.assignment].append(candidate)
    submissions = []
    for (student, assignment), candidates in sorted(found.items()):
        best = max(candidates, key=lambda candidate: candidate.rank)
        for other in candidates:
            if other is not best:
                reason = f"is not graded for {student}, but {best.shown} is: {_why(best, other)}"
                ignored.append(Ignored(other.shown, reason))
        name = roster.names[student] if roster else ""
        note = f"{len(candidates)} files, this is graded: {best.shown}" if len(candidates) > 1 else ""
        submissions.append(Submission(student, assignment, best.file.path, note, name))
    present = {each.student for each in submissions}
    expected = roster.names if roster else persons.folders(place)
    ignored += [Ignored(student, "handed in no notebook that counts") for student in expected if student not in present]
    return submissions, ignored


def _candidate(file: File, assignments: Sequence[str]) -> tuple[_Candidate | None, str]:
    """Return what is known of a file, or the reason why it does not count."""
    if file.problem:
        return None, file.problem
    assignment, is_work, problem = "", False, "has none of the check cells of an exercise"
    try:
        assignment, is_work = identify(file.path)
    except GradingError as error:
        problem = str(error)
    has_checks = bool(assignment)
    if not assignment and (match := NAMED.fullmatch(NOTEBOOK.sub("", _own_name(file.parts[-1])))):
        assignment = next(name for name in ASSIGNMENTS if name.casefold() == match["assignment"].casefold())
    if not assignment:
        return None, problem
    if assignments and assignment not in assignments:
        return None, f"is {assignment}, which is not graded now"
    return _Candidate(file, assignment, has_checks, is_work), ""


def _why(best: _Candidate, other: _Candidate) -> str:
    if best.has_checks > other.has_checks:
        return "only that one has the exercise's check cells"
    if best.is_work > other.is_work:
        return "this one is as it was handed out"
    return "this one is older"


class _Persons:
    """Whose files these are, by a roster or by their paths."""

    def __init__(self, files: Sequence[File], only_student: str, roster: Roster | None):
        self._only_student, self._roster = only_student, roster
        self._numbers: dict[str, set[str]] = defaultdict(set)  # of students with the same name
        for part in {part for file in files for part in file.parts}:
            if match := MOODLE.fullmatch(part) or CANVAS.fullmatch(part):
                self._numbers[match["name"]].add(match["number"])

    def student_of(self, parts: tuple[str, ...]) -> str | None:
        """Return a student's id; None if it is not on the roster."""
        return self._roster.student_of(parts) if self._roster else student_id(self._named(parts))

    def _named(self, parts: tuple[str, ...]) -> str:
        for part in parts:
            if match := MOODLE.fullmatch(part) or CANVAS.fullmatch(part):
                name, number = match["name"], match["number"]
                return f"{name} ({number})" if len(self._numbers[name]) > 1 else name
        is_file = len(parts) == 1
        head = NOTEBOOK.sub("", parts[0]) if is_file else re.sub(r"\.zip$", "", parts[0], flags=re.IGNORECASE)
        if match := NAMED.fullmatch(head):
            return match["student"] or self._only_student
        return head

    def folders(self, place: Path) -> list[str]:
        """Return the students who have a folder, whatever it holds."""
        if self._roster or not place.is_dir():
            return []
        folders = (each.name for each in place.iterdir() if each.is_dir() and not each.name.startswith("."))
        return sorted(filter(None, {self.student_of((name, "")) for name in folders}))


def _own_name(name: str) -> str:
    """Return a file's name without what Canvas puts before it."""
    match = CANVAS.fullmatch(name)
    return match["file"] if match else name
