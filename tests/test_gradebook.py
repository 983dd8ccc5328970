"""What the instructor and the students see: pages, the table, points given by hand, and runs that are interrupted."""

import csv
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import grade
import nbformat
import pytest
from grading import examiners, feedback
from grading.examination import Task, Work, memo_task
from grading.examiners import Grade
from grading.feedback import Mark
from grading.gradebook import COLUMNS, Gradebook
from grading.submissions import Submission, cells_of, memos_of
from grading.worker_process import Limits
from handing_in import MEMO, ONE, TWO, hand_in, notebook

from helpers.checks.comparing import Grids

GRIDS = Grids([[1, 2]], [[1, 3]], "mask")
ADA = Submission("ada", ONE, Path(), name="Ada Lovelace")
OPTIONS = examiners.Options(Limits(), "1", is_sandboxed=False)


def test_a_text_that_the_instructor_grades_is_on_the_page_and_its_points_are_the_release_s(tmp_path):
    nb = notebook(MEMO, {})
    submission = Submission("zoe", MEMO, tmp_path / f"{MEMO}.ipynb")
    memo = next(cell for cell in nb.cells if cell.cell_type == "markdown" and "nbgrader" in cell.metadata)
    question = next(cell for cell in nb.cells if cell.cell_type == "markdown" and cell is not memo)
    memo.source = "We use **14** <b>rows</b>.\n\n| a | b |\n| - | - |\n| 1 | 2 |"
    question.source += "\nAn answer in the question."
    memo.metadata.nbgrader.points = 400
    nb.cells.append(nbformat.v4.new_markdown_cell("An answer in a new cell."))
    hand_in(submission.path, nb)
    (cell,) = memos_of(submission)
    task = memo_task(cell)
    page = feedback.page(submission, [Task("design", 4, 2, ""), task])
    assert (cell.memo, task.by_hand, task.points, task.note) == ("memo", 4, 0, "")
    texts = ["memo: <!--points memo-->up to 4 points, given by hand", "<strong>14</strong> &lt;b&gt;rows", "<td>2</td>"]
    texts += ["2 of 8 points so far, 4 of which your instructor has yet to give"]
    texts += ["An answer in the question", "An answer in a new cell"]
    assert [text for text in texts if text not in page] == []
    assert all("An answer" not in each.source for each in cells_of(submission))
    nb.cells = [each for each in nb.cells if each.cell_type == "code"]
    hand_in(submission.path, nb)
    assert [(each.source, each.points) for each in memos_of(submission)] == [("", 4)]


def test_nothing_that_a_student_writes_is_html():
    evil = '</code><script>alert(1)</script><img src=x onerror="alert(1)">'
    memo = f"{evil} <!--/--> [a](javascript:alert(1)) ![b](http://x.org/y.png)\n<style>*{{}}</style>\n\n<{evil}>\n"
    tasks = [Task("stop", 1, 0, evil, work=[Work(evil, f"\x1b[31m{evil}\u202e")])]
    tasks.append(Task("memo", by_hand=4, work=[Work(memo)]))
    page = feedback.page(Submission(evil, evil, Path(), name=evil), tasks, evil)
    assert page.count("<style") == 1 and not any(mark in page for mark in ("<script", "<img", "<a", "\x1b", "\u202e"))
    assert page.count("&lt;script&gt;") >= 6
    filled = feedback.fill(page, 0, 1, {"memo": Mark(4, 3, evil)})
    assert "3 of 5 points" in filled and "<script" not in filled and filled.count("<!--/-->") == page.count("<!--/-->")


def test_a_page_is_bounded_whatever_was_handed_in():
    work = [Work("<" * 10**6, "&" * 10**6) for _ in range(50)]
    tasks = [Task("stop", 1, 0, "'" * 10**6, GRIDS, work) for _ in range(8)] + [Task("", work=work * 20)]
    assert len(feedback.page(ADA, tasks, "<" * 10**6)) <= 500_000


@pytest.mark.parametrize("text", ["[", "*a ", "> ", "|a", "`", "- ", "![", "_", "[a](", "a\n|-|\n", "~~"])
def test_no_markdown_takes_long(text):
    start = time.process_time()
    feedback.rendered(text * (feedback.MAX_MARKDOWN // len(text)))
    assert time.process_time() - start < 30
    assert feedback.rendered(text * feedback.MAX_MARKDOWN * 2) is None


# --- the table --------------------------------------------------------------------------------------------------------


def unreadable(folder, *names):
    """Hand in files that get 0 points without a process."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("no notebook")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Grade in this process: one of its own imports PyTorch for seconds."""
    grade_one = examiners.grade_one
    monkeypatch.setattr(grade, "grade_all", lambda all_, options, jobs: (grade_one(each, options) for each in all_))


def rows_of(out, *columns):
    columns = columns or ("student", "assignment", "seed")
    with open(out / "grades.csv", newline="", encoding="utf-8") as file:
        return [tuple(row[name] for name in columns) for row in csv.DictReader(file)]


def test_the_table_and_the_terminal_get_no_formula_and_no_escape_sequence(tmp_path, monkeypatch, capsys):
    evil, out = "=cmd|'\x1b]0;title\x07'!A1", tmp_path / "out"
    folder = unreadable(tmp_path / "in", f"{evil}/{TWO}.ipynb", f"dan/{TWO}.ipynb", "@eve\x1b[2J/x.ipynb")
    grade_one = examiners.grade_one

    def graded(submissions, options, jobs):
        for each in submissions:
            note = {} if each.student == "dan" else {"note": "stop: \x1b[31mred\x9b\u202e\n=1+1"}
            yield replace(grade_one(each, options), **note)

    monkeypatch.setattr(grade, "grade_all", graded)
    grade.main(["grade", str(folder), "--no-sandbox", "--out", str(out), "--seed", "7"])
    text = (out / "grades.csv").read_text() + (out / "ignored.csv").read_text()
    said = capsys.readouterr().out
    assert "\n'=cmd|" in text and "\n'@eve" in text
    assert not any(mark in text + said for mark in ("\x1b", "\x07", "\x9b", "\u202e"))
    assert f"dan,,{TWO},0,6,0,,0,cannot be read as a notebook (JSONDecodeError),,7" in text
    assert "cannot be read" in (out / "feedback" / "dan" / f"{TWO}.html").read_text()
    assert "ignored: '@eve: handed in no notebook that counts" in said and "ignored: @eve/x.ipynb: cannot be" in said


def test_a_later_run_keeps_the_grades_of_the_submissions_that_it_does_not_contain(tmp_path, quick):
    week = unreadable(tmp_path / "week", f"ada/{ONE}.ipynb", f"bob/{ONE}.ipynb")
    late, out = unreadable(tmp_path / "late", f"ada/{TWO}.ipynb"), tmp_path / "grades"
    grade.grade(week, out, OPTIONS)
    grade.grade(late, out, replace(OPTIONS, seed="2"))
    run = grade.grade(week, out, replace(OPTIONS, seed="3"), grade.Choice(students=["bob"]))
    assert [each.student for each in run.grades] == ["bob"]
    assert rows_of(out) == [("ada", ONE, "1"), ("ada", TWO, "2"), ("bob", ONE, "3")]
    pages = sorted(path.relative_to(out / "feedback").as_posix() for path in out.rglob("*.html"))
    assert pages == [f"ada/{ONE}.html", f"ada/{TWO}.html", f"bob/{ONE}.html"]


def test_a_worse_grade_of_a_later_run_does_not_replace_a_better_one_unasked(tmp_path):
    """An older folder that was graded again took the points of a late submission."""
    book = Gradebook(tmp_path)
    assert book.enter(Grade("ada", ONE, 6, 8, page="late"), "2") == ""
    assert "6 points of an earlier run stay, since this one gave 4" in book.enter(Grade("ada", ONE, 4, 8), "3")
    book.write()
    page = tmp_path / "feedback" / "ada" / f"{ONE}.html"
    assert rows_of(tmp_path, "score", "seed") == [("6", "2")] and page.read_text() == "late"
    book = Gradebook(tmp_path)
    assert book.enter(Grade("ada", ONE, 6, 8, page="as good"), "3") == "" and page.read_text() == "as good"
    assert book.enter(Grade("ada", ONE, 4, 8, page="asked"), "4", replaces=True) == ""
    book.write()
    assert rows_of(tmp_path, "score", "seed") == [("4", "4")] and page.read_text() == "asked"


@pytest.fixture
def memos(tmp_path):
    """A folder with the grades of two memos."""
    book = Gradebook(tmp_path / "grades")
    for student in ("ada", "bob"):
        tasks = [Task("design", 4, 2), Task("memo", by_hand=4, work=[Work("*Text*")])]
        page = feedback.page(Submission(student, MEMO, tmp_path), tasks)
        book.enter(Grade(student, MEMO, 2, 4, memos=(("memo", 4),), page=page), "1")
    book.write()
    return tmp_path / "grades"


def test_points_and_comments_for_memos_come_from_a_table_into_the_grades_and_the_pages(memos, capsys):
    columns = "student", "by_hand", "given", "total"
    assert rows_of(memos, *columns) == [("ada", "4", "", "2"), ("bob", "4", "", "2")]
    marks = memos / "marks.csv"
    marks.write_text(f"student;assignment;points;comment\nada;{MEMO};3,5;Well <argued>.\nbob;{MEMO}\n")
    grade.main(["memos", str(marks), "--out", str(memos)])
    assert rows_of(memos, *columns) == [("ada", "4", "3.5", "5.5"), ("bob", "4", "", "2")]
    page = memos / "feedback" / "ada" / f"{MEMO}.html"
    for text in ("5.5 of 8 points", "memo: <!--points memo-->3.5 of 4 points", "Well &lt;argued&gt;."):
        assert text in page.read_text()
    assert "2 of 8 points so far" in page.parents[1].joinpath("bob", f"{MEMO}.html").read_text()
    filled = (memos / "memos.csv").read_text().replace(f"bob,{MEMO},memo,4,,", f"bob,{MEMO},memo,4,1,Short.")
    (memos / "memos.csv").write_text(filled)  # in a spreadsheet
    grade.main(["memos", "--out", str(memos)])
    book = Gradebook(memos)
    late = feedback.page(Submission("ada", MEMO, memos), [Task("design", 4, 4), Task("memo", by_hand=4)])
    book.enter(Grade("ada", MEMO, 4, 4, memos=(("memo", 4),), page=late), "2")
    book.write()
    assert rows_of(memos, "student", "total") == [("ada", "7.5"), ("bob", "3")]
    assert "7.5 of 8 points" in page.read_text() and "2 texts have points" in capsys.readouterr().out


HEAD = "student,assignment,memo,points"


@pytest.mark.parametrize(
    "text, message",
    [
        (f"{HEAD}\nada,{MEMO},memo,5\n", "gets '5' points, expected 0 to 4"),
        (f"{HEAD}\nada,{MEMO},memo,nan\n", "expected 0 to 4"),
        (f"{HEAD}\neve,{MEMO},memo,2\n", "has no text 'memo'"),
        ("student,points\nada,2\n", "is not a table with the columns student, assignment, points"),
        (f"{HEAD}\n" * 100_002, "more than 100,000 lines"),
        (None, "There is no file"),
    ],
)
def test_points_that_cannot_be_given_are_refused_and_nothing_changes(memos, text, message):
    before = {path: path.read_text() for path in memos.rglob("*.*")}
    marks = memos.parent / "marks.csv"
    if text:  # a right line comes before the wrong one
        marks.write_text(text.replace(f"{HEAD}\n", f"{HEAD}\nbob,{MEMO},memo,1\n", 1))
    with pytest.raises(SystemExit, match=message):
        grade.main(["memos", str(marks), "--out", str(memos)])
    assert {path: path.read_text() for path in memos.rglob("*.*")} == before


def test_what_cannot_be_graded_is_refused(tmp_path):
    folder, out = unreadable(tmp_path / "week", f"ada_{ONE}.ipynb"), tmp_path / "grades"
    (tmp_path / "empty" / "hw").mkdir(parents=True)
    for path, choice, message in [
        (folder, grade.Choice(["ada", "eve"]), r"no submission of 'eve'.*ada"),
        (folder, grade.Choice(assignments=["essay"]), f"no assignment 'essay', only .*{ONE}"),
        (folder, grade.Choice(roster=tmp_path / "none.csv"), "no file"),
        (tmp_path / "empty", grade.Choice(), r"(?s)no notebook of an exercise.*hw: handed in no notebook"),
        (tmp_path / "submitted", grade.Choice(), "no folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            grade.grade(path, out, OPTIONS, choice)
    out.mkdir()
    for table in ("name;points\neve;3\n", ",".join(COLUMNS) + "\neve\n"):
        (out / "grades.csv").write_text(table)
        with pytest.raises(ValueError, match="is not a table"):
            grade.grade(folder, out, OPTIONS)


def test_without_a_sandbox_grading_says_how_to_get_one(tmp_path, monkeypatch):
    unreadable(tmp_path, f"ada/{ONE}.ipynb")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"apt install bubblewrap.*--no-sandbox"):
        grade.main(["grade", str(tmp_path), "--out", str(tmp_path / "out")])


def test_a_default_seed_cannot_be_guessed(tmp_path, monkeypatch):
    """Of 10^6 seeds, a submission had tried all within 20 s, and knew the future of a contest's trace."""
    seeds, run = [], grade.Run([], [], [])
    monkeypatch.setattr(grade, "grade", lambda path, out, options, *rest: seeds.append(options.seed) or run)
    for _ in "ab":
        grade.main(["grade", str(tmp_path), "--out", str(tmp_path)])
    assert len(set(seeds)) == 2 and all(len(bytes.fromhex(seed)) == 16 for seed in seeds)


# --- examiners and interrupts -----------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch):
    """Examiners that are copies of this process: a new process would import PyTorch for seconds."""
    monkeypatch.setattr(examiners.multiprocessing, "get_context", lambda _: get_context("fork"))


def grade_by_name(submission, options):
    if submission.student == "dan":
        raise SystemExit(1)
    if submission.student == "bob":
        time.sleep(60)
    return Grade(submission.student, submission.assignment)


def test_an_examiner_that_dies_costs_one_submission_and_ctrl_c_ends_grading_at_once(tmp_path, monkeypatch, forked):
    monkeypatch.setattr(examiners, "grade_one", grade_by_name)
    submissions = [Submission(student, ONE, tmp_path / "a.ipynb") for student in ("dan", "ada", "bob", "cleo")]
    grades = examiners.grade_all(submissions, OPTIONS, jobs=1)
    lost = next(grades)
    assert (lost.score, lost.max_score, lost.note) == (0, 8, "grading failed: the grader's own process ended")
    assert "grading failed" in lost.page and "0 of 8 points" in lost.page
    next_one = next(grades)
    assert (next_one.student, next_one.note) == ("ada", "")
    interrupt = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    interrupt.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(grades)
    assert time.monotonic() - start < 20


def test_what_was_graded_before_an_interrupt_is_in_the_table(tmp_path, monkeypatch, quick):
    folder, out = unreadable(tmp_path / "week", f"ada/{ONE}.ipynb", f"bob/{ONE}.ipynb"), tmp_path / "grades"
    grade.grade(folder, out, OPTIONS)

    def interrupted(submissions, options, jobs):
        yield Grade("bob", ONE, 3, 8)
        raise KeyboardInterrupt

    monkeypatch.setattr(grade, "grade_all", interrupted)
    with pytest.raises(SystemExit, match=r"Interrupted.*the seed 2"):
        grade.main(["grade", str(folder), "--no-sandbox", "--out", str(out), "--seed", "2"])
    assert rows_of(out) == [("ada", ONE, "1"), ("bob", ONE, "2")]
    assert len(list(out.rglob("*.html"))) == 2


# --- the leaderboard --------------------------------------------------------------------------------------------------


def contestant(student, *scores, name="", score=0):
    measured = tuple({"passes": (mine, 100), "tokens": (tokens, 50)} for mine, tokens in scores)
    return Grade(student, "18_capstone_engine", score or len(scores), 6, name=name, page="", scores=measured)


def standings(folder):
    with open(folder / "leaderboard.csv", newline="", encoding="utf-8") as file:
        return [(line["rank"], line["student"], line["passes"]) for line in csv.DictReader(file)]


def test_a_leaderboard_ranks_milestones_first_then_costs_and_keeps_earlier_runs(tmp_path):
    book = Gradebook(tmp_path)
    for grade_ in [
        contestant("ada", (120, 50), (100, 50), name="Ada <Lovelace>"),
        contestant("ben", (90, 50), (100, 60), name="=cmd()"),
        contestant("cyd", (50, 10)),
        contestant("dan"),
    ]:
        book.enter(grade_, "1")
    book.write()
    assert standings(tmp_path) == [("1", "ben", "95.0"), ("2", "ada", "110.0"), ("3", "cyd", "50.0")]
    page = (tmp_path / "leaderboard.html").read_text()
    assert "Ada &lt;Lovelace&gt;" in page and "<Lovelace>" not in page and "dan" not in page
    assert "'=cmd()" in (tmp_path / "leaderboard.csv").read_text()
    later = Gradebook(tmp_path, is_anonymous=True)
    later.enter(contestant("cyd", (100, 50), (90, 60)), "2")
    later.enter(contestant("ada", (10, 10)), "2")  # a worse grade, so the earlier line stays
    later.write()
    assert standings(tmp_path) == [("1", "ben", "95.0"), ("1", "cyd", "95.0"), ("3", "ada", "110.0")]
    page = (tmp_path / "leaderboard.html").read_text()
    assert "Engine 3" in page and "Ada" not in page and "ben" not in page
