"""The grades of a course, from one run to the next: a table, a page per submission, and the points given by hand.

A folder has grades.csv, memos.csv for the instructor to fill in, feedback/<student>/<assignment>.html, and a
leaderboard if there is a contest. What an earlier run has entered stays, unless a student's new grade is as good.
"""

from pathlib import Path

from . import feedback
from .examiners import Grade
from .feedback import Mark
from .leaderboard import Leaderboard
from .plain import line
from .tables import read_csv, write_csv

COLUMNS = ["student", "name", "assignment", "score", "max_score", "by_hand", "given", "total", "note", "tasks", "seed"]
MEMO_COLUMNS = ["student", "assignment", "memo", "most", "points", "comment"]
MAX_COMMENT = 5000  # characters


class Gradebook:
    """The grades in a folder.

    Args:
        folder: it need not exist yet.
        is_anonymous: whether the leaderboard's page leaves out the names.

    Raises:
        ValueError: grades.csv or memos.csv in it is another table.
    """

    def __init__(self, folder: Path, is_anonymous: bool = False):
        self.folder, self.is_anonymous, self.board = folder, is_anonymous, Leaderboard(folder)
        self.lines: dict[tuple[str, str], dict[str, str]] = {}
        self.marks: dict[tuple[str, str], dict[str, Mark]] = {}
        for fields in _read(folder / "grades.csv", COLUMNS):
            self.lines[fields["student"], fields["assignment"]] = fields
        for fields in _read(folder / "memos.csv", MEMO_COLUMNS):
            marks = self.marks.setdefault((fields["student"], fields["assignment"]), {})
            try:
                marks[fields["memo"]] = Mark(float(fields["most"]))
            except ValueError:
                raise ValueError(f"{folder / 'memos.csv'}: {fields['most']!r} is no number of points.") from None
        if self.marks:
            self.give(folder / "memos.csv")

    def enter(self, grade: Grade, seed: str, replaces: bool = False) -> str:
        """Enter a grade and write its page; return what was not entered, in words.

        Args:
            grade: of this run.
            seed: of this run.
            replaces: whether it may replace a better one.
        """
        key = grade.student, grade.assignment
        before = self.lines.get(key)
        if before and float(before["score"]) > grade.score and not replaces:
            kept = f"{before['score']} points of an earlier run stay, since this one gave {grade.score:g}"
            return f"{grade.student} {grade.assignment}: {kept}. --replace takes this one"
        marks = {name: Mark(most) for name, most in grade.memos} | self.marks.get(key, {})
        if marks:
            self.marks[key] = marks
        self.lines[key] = {
            "student": grade.student,
            "name": grade.name,
            "assignment": grade.assignment,
            "score": f"{grade.score:g}",
            "max_score": f"{grade.max_score:g}",
            "note": line(grade.note, 2000),
            "tasks": grade.tasks,
            "seed": seed,
        }
        self.board.enter(grade)
        page = self.page(key)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(self._filled(key, grade.page), encoding="utf-8", errors="replace")
        return ""

    def give(self, path: Path) -> int:
        """Take points and comments for memos from a table, fill them into the pages, and return how many there are.

        Args:
            path: of a table with the columns student, assignment, points and, if you like, memo and comment. Lines
                without points are left alone.

        Raises:
            ValueError: it is another table, or gives points for what was not graded, or too many.
        """
        given: list[tuple[tuple[str, str], str, Mark]] = []
        for fields in _read(path, ["student", "assignment", "points"], exactly=False):
            if not fields["points"].strip():
                continue
            key = fields["student"], fields["assignment"]
            marks = self.marks.get(key, {})
            memo = fields.get("memo") or next(iter(marks), "")
            if memo not in marks:
                raise ValueError(f"{path}: {' '.join(key)} has no text {memo!r} to give points for.")
            most, text = marks[memo].most, fields["points"].strip()
            try:
                points = float(text.replace(",", "."))
            except ValueError:
                points = -1.0
            if not 0 <= points <= most:
                raise ValueError(f"{path}: {' '.join(key)} gets {text!r} points, expected 0 to {most:g}.")
            given.append((key, memo, Mark(most, points, fields.get("comment", "").strip()[:MAX_COMMENT])))
        for key, memo, mark in given:
            self.marks[key] = self.marks[key] | {memo: mark}
            if self.page(key).exists():
                text = self._filled(key, self.page(key).read_text(encoding="utf-8"))
                self.page(key).write_text(text, encoding="utf-8")
        return len(given)

    def write(self) -> None:
        """Write the tables."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for key, fields in self.lines.items():
            marks = self.marks.get(key, {}).values()
            given = [mark.points for mark in marks if mark.points is not None]
            fields["by_hand"] = f"{sum(mark.most for mark in marks):g}"
            fields["given"] = f"{sum(given):g}" if given else ""
            fields["total"] = f"{float(fields['score']) + sum(given):g}"
        ordered = [self.lines[key] for key in sorted(self.lines)]
        write_csv(self.folder / "grades.csv", [COLUMNS, *([fields[name] for name in COLUMNS] for fields in ordered)])
        if self.marks:
            memos = [
                [*key, name, f"{mark.most:g}", "" if mark.points is None else f"{mark.points:g}", mark.comment]
                for key in sorted(self.marks)
                for name, mark in self.marks[key].items()
            ]
            write_csv(self.folder / "memos.csv", [MEMO_COLUMNS, *memos])

        self.board.write(self.is_anonymous)

    def page(self, key: tuple[str, str]) -> Path:
        """Return where the page of a (student, assignment) is."""
        return self.folder / "feedback" / key[0] / f"{key[1]}.html"

    def _filled(self, key: tuple[str, str], page: str) -> str:
        score, most = (float(self.lines[key][name]) for name in ("score", "max_score"))
        return feedback.fill(page, score, most, self.marks.get(key, {}))


def _read(path: Path, columns: list[str], exactly: bool = True) -> list[dict[str, str]]:
    """Return the lines of a table as dicts; none if there must be one sort of table, but is no file yet."""
    if exactly and not path.exists():
        return []
    heads, *lines = read_csv(path)
    known = heads == columns if exactly else set(columns) <= set(heads)
    if not exactly:  # spreadsheets leave out what is empty at the end of a line
        lines = [(line + [""] * len(heads))[: len(heads)] for line in lines]
    if not known or any(len(line) != len(heads) for line in lines):
        raise ValueError(f"{path} is not a table with the columns {', '.join(columns)}: move it elsewhere.")
    return [dict(zip(heads, line, strict=True)) for line in lines]
