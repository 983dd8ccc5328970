"""The students of the course: a table whose first column is the student's id, and whose others also name the student.

Rosters of Moodle, Canvas and GitHub Classroom are such tables: a first line with the columns' names, then a line per
student. The column `name` is for the student's page.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from .plain import MAX_NAME, plain, student_id
from .tables import read_csv

MAX_STUDENTS = 5000
MIN_LETTERS = 3  # of a text that names a student as a part of a path; a shorter id has to be a whole folder
WORDS = re.compile(r"[^\W_]+")


class Roster:
    """The students of a course, by id.

    Args:
        path: of the table.

    Raises:
        ValueError: it cannot be read, has no student, or has one twice.
    """

    def __init__(self, path: Path):
        columns, *lines = read_csv(path, MAX_STUDENTS)
        heads = [column.strip().casefold() for column in columns]
        at = heads.index("name") if "name" in heads else len(heads)
        self.names: dict[str, str] = {}
        texts: dict[frozenset[str], list[str]] = defaultdict(list)  # the students whom these words name
        for line in lines:
            student = student_id(line[0])
            if not line[0].strip() or student in self.names:
                raise ValueError(f"{path}: every line needs an id of its own in its first column, unlike {line[0]!r}.")
            self.names[student] = plain(line[at], MAX_NAME) if at < len(line) else ""
            for words in set(map(_words, line)):
                if len("".join(words)) >= MIN_LETTERS:
                    texts[words].append(student)
        if not self.names:
            raise ValueError(f"{path} names no student: expected a line of column names, then a line per student.")
        self._by_word: dict[str, list[tuple[frozenset[str], str]]] = defaultdict(list)
        for words, students in texts.items():
            if len(students) == 1:  # the name of a group or a section is no student
                self._by_word[max(words)].append((words, *students))

    def student_of(self, parts: Iterable[str]) -> str | None:
        """Return the id of the one student whom a path names; None if there is none, or several.

        A folder or file names the student whose id, or all words of whose name, it contains. The longest match wins.
        """
        found: dict[str, int] = {}
        for part in parts:
            if part in self.names:
                return part
            there = _words(part)
            for words, student in (each for word in there for each in self._by_word.get(word, ())):
                if words <= there:
                    found[student] = max(found.get(student, 0), len("".join(words)))
        longest = [student for student, length in found.items() if length == max(found.values())]
        return longest[0] if len(longest) == 1 else None


def _words(text: str) -> frozenset[str]:
    return frozenset(WORDS.findall(unicodedata.normalize("NFC", text).casefold()))
