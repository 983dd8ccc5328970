"""Grading, piece by piece: which cells count, what a submission's process may send, what a page and the table hold."""

import csv
import json
import os
import pickle
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from random import Random

import grade
import nbformat
import numpy as np
import pytest
import torch
from answers import RIGHT
from grading import encoding, examiners, feedback, sandbox, worker_process
from grading.encoding import decode, encode
from grading.examination import Task, Work, memo_task
from grading.examiners import Grade
from grading.submissions import ASSIGNMENTS, GradingError, Submission, cells_of, find_submissions, memos_of, release_of
from grading.worker_process import Limits, WorkerProcess
from handing_in import MEMO, ONE, TWO, answers_of, hand_in, notebook

from helpers import kv_cache
from helpers.checks.calling import Failure, Outcome, answer
from helpers.checks.comparing import Grids, difference
from helpers.checks.examining import examine
from helpers.checks.exercise import Exercise
from helpers.checks.exercises import EXERCISES
from helpers.engine import Sequence

# --- which cells count ------------------------------------------------------------------------------------------------


def submitted(path, nb):
    hand_in(path / f"{ONE}.ipynb", nb)
    return cells_of(Submission("ada", ONE, path / f"{ONE}.ipynb"))


def test_the_release_s_own_cells_are_taken_from_the_release(tmp_path):
    nb = notebook(ONE, answers_of(ONE))
    for cell in nb.cells:
        if cell.metadata.get("nbgrader", {}).get("locked"):
            cell.source = "check = lambda *arguments: True"
    cells = submitted(tmp_path, nb)

    own = [cell for cell in release_of(ONE) if "NotImplementedError" not in cell.source]
    assert [cell for cell in cells if not cell.is_students] == own
    assert [cell.source for cell in cells if cell.is_students] == list(answers_of(ONE).values())


def test_deleted_cells_of_the_release_are_put_back_in_their_places(tmp_path):
    nb = notebook(ONE, answers_of(ONE))
    whole = submitted(tmp_path, nb)
    locked = [cell for cell in nb.cells if cell.metadata.get("nbgrader", {}).get("locked")]
    nb.cells = [cell for cell in nb.cells if cell not in locked or "stop" in cell.source]

    assert submitted(tmp_path, nb) == whole


def test_a_student_cannot_make_check_cells_or_change_their_points(tmp_path):
    nb = notebook(ONE, answers_of(ONE))
    check = next(cell for cell in nb.cells if 'check("stop"' in cell.source)
    check.metadata.nbgrader.points = 1000
    other = nbformat.from_dict(check) | {"id": "other"}
    other["metadata"] = {"nbgrader": dict(check.metadata.nbgrader) | {"grade_id": "other"}}
    nb.cells += [check, nbformat.from_dict(other), nbformat.v4.new_code_cell("1", metadata={"nbgrader": [7]})]

    assert sum(cell.points for cell in submitted(tmp_path, nb)) == sum(cell.points for cell in release_of(ONE)) == 8


def test_an_older_notebook_is_read_as_colab_writes_it(tmp_path):
    nb = notebook(ONE, answers_of(ONE))
    whole = submitted(tmp_path, nb)
    for cell in nb.cells:
        del cell["id"]
    nb.nbformat_minor = 0

    assert submitted(tmp_path, nb) == whole


@pytest.mark.parametrize(
    "text, message",
    [
        ("this is no notebook", "cannot be read as a notebook"),
        ("[" * 100_000, "cannot be read as a notebook"),
        ('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "none of the exercise's check cells"),
        (" " * (21 * 2**20), "is larger than 20 MB"),
    ],
)
def test_what_is_no_exercise_is_refused(tmp_path, text, message):
    path = tmp_path / f"{ONE}.ipynb"
    path.write_text(text)
    with pytest.raises(GradingError, match=message):
        cells_of(Submission("ada", ONE, path))


def test_submissions_are_found_in_every_layout_and_links_lead_nowhere(tmp_path):
    folder, elsewhere = tmp_path / "submitted", tmp_path / "elsewhere.ipynb"
    elsewhere.write_text("{}")
    names = [f"Ada/{ONE}/{ONE}", f"Bob [x]/{ONE}", f"cleo_{ONE} (1)", f"cleo_{ONE}", f"eve_{ONE}-2", "x/essay"]
    for name in [f"{name}.ipynb" for name in names]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / f"dan_{ONE}.ipynb").symlink_to(elsewhere)

    found = {(each.student, each.assignment): each.note for each in find_submissions(folder)}
    assert list(found) == [("Ada", ONE), ("Bob [x]", ONE), ("cleo", ONE), ("eve", ONE), ("x", "essay")]
    assert "2 files" in found["cleo", ONE]


# --- what a submission's process may send -----------------------------------------------------------------------------


def cache_of(*layers):
    cache = kv_cache.new()
    for number, keys in enumerate(layers):
        cache.update(keys, keys + 1, number)
    return cache


@pytest.mark.parametrize("task", [name for name, one in EXERCISES.items() if isinstance(one, Exercise)])
def test_a_right_answer_passes_when_its_results_are_sent(task):
    for function in RIGHT[task].values():
        verdict = examine(EXERCISES[task], lambda question, each=function: decode(encode(answer(question, each))))
        assert verdict.passed, f"{function.__name__} {verdict.message}"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 7, -1.5, float("inf"), "é\udc80", b"\0\xff", [], (1, [2, (3,)]), {"a": {1: "b"}}, {1, 2}),
        *(torch.arange(6).reshape(2, 3), torch.zeros(0, 4), torch.tensor(2.5), torch.tensor([[True], [False]])),
        *(torch.arange(6).reshape(1, 6)[:, 5], torch.eye(3).T),  # a column of a single row keeps the stride of its row
        *(cache_of(torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4)), cache_of()),
        *(Outcome(3, ("a",)), Sequence("a", [1, 2], 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_arrives_as_it_was(value):
    outcome = decode(encode(Outcome(value, (value,))))

    assert type(outcome.result) is type(value)
    assert difference(outcome.result, value) is None
    assert type(outcome.arguments) is tuple
    assert outcome.arguments[0] is outcome.result or isinstance(value, bool | int | float | str | None)


def test_numbers_of_other_libraries_arrive_as_python_s():
    assert decode(encode(Outcome([np.int64(3), np.float32(0.5), np.bool_(True)]))).result == [3, 0.5, True]


def test_a_generator_of_random_numbers_arrives_in_its_state():
    random = Random(7)
    random.random()
    assert decode(encode(Outcome(arguments=(random,)))).arguments[0].getstate() == random.getstate()


def test_a_failure_arrives_as_it_was():
    failure = Failure("KeyError", "'a'", "stopped with KeyError", is_final=True)
    assert decode(encode(Outcome(failure=failure))) == Outcome(failure=failure)


@pytest.mark.parametrize("value", [(n for n in "ab"), object(), len, 1j, torch.empty(2, device="meta")])
def test_what_has_no_encoding_keeps_its_type_s_name_and_is_equal_to_nothing(value):
    result = decode(encode(Outcome(value))).result

    assert type(result).__name__ == type(value).__name__
    assert difference(result, [1]) is not None and result != value


def test_an_object_that_is_equal_to_everything_is_not_equal_to_the_right_result():
    class Right(list):
        def __eq__(self, other):
            return True

        __hash__ = None

    assert difference(decode(encode(Outcome(Right([7])))).result, [1]) is not None


def test_a_result_that_contains_itself_or_is_too_large_becomes_a_failure(monkeypatch):
    loop = []
    loop.append(loop)
    assert "cannot be compared (RecursionError)" in decode(encode(Outcome(loop))).failure.message
    monkeypatch.setattr(encoding, "MAX_BYTES", 1000)
    assert "more data than any task asks for" in decode(encode(Outcome("a" * 1001))).failure.message


def message(result, **others):
    return json.dumps({"arguments": ["list", []], "failure": None, "result": result} | others).encode()


DOUBLED = ["list", [["list", [1]], *(["list", [["same", n], ["same", n]]] for n in range(64))]]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"7", b"{}", b"[" * 100_000, pickle.dumps(Outcome(3))),
        *(message(["eval", "1"]), message(["count", -(10**9)]), message(["same", 7]), message([[], []])),
        *(message(DOUBLED), message(["list", [0] * (encoding.MAX_PARTS + 1)])),
        *(message(["tensor", ["torch.float32", [2**40], ""]]), message(["tensor", ["torch.load", [1], ""]])),
        *(message(["record", ["os:system", {}]]), message(["record", ["helpers.engine:Engine", {}]])),
        *(
            message(["record", ["helpers.checks.calling:Failure", {"error": ""}]]),
            message(["dict", [[["list", []], 1]]]),
        ),
        message(1, failure={"message": "a"}),
    ],
)
def test_whatever_else_a_process_sends_is_refused(data):
    with pytest.raises(ValueError, match="not an outcome"):
        decode(data)


def test_output_that_the_watch_has_just_read_belongs_to_the_cell_that_printed_it(monkeypatch):
    worker = WorkerProcess.__new__(WorkerProcess)  # without a process
    worker.limits, worker._printed, worker._lock = Limits(), bytearray(), threading.Lock()
    worker._output, printing = os.pipe()
    os.write(printing, b"hello")
    has_read, proceed, read = threading.Event(), threading.Event(), os.read

    def slow_read(*arguments):
        data = read(*arguments)
        has_read.set()
        proceed.wait(60)
        return data

    monkeypatch.setattr(worker_process.os, "read", slow_read)
    with ThreadPoolExecutor() as threads:
        threads.submit(worker._read)  # as the watch does
        has_read.wait(60)
        printed = threads.submit(worker.printed)
        wait([printed], timeout=0.2)
        proceed.set()
        assert printed.result() == "hello"
    os.close(worker._output)
    os.close(printing)


# --- the page and the table -------------------------------------------------------------------------------------------

GRIDS = Grids([[1, 2]], [[1, 3]], "mask")


def test_a_page_names_each_task_with_its_points_message_picture_code_and_output():
    tasks = [
        Task("left_pad", 2, 0, "pads on the right.", GRIDS, [Work("def left_pad(): ...", "a = 1\n")]),
        Task("stop", 1, 1, "passed. Well done."),
    ]
    page = feedback.page(ONE, tasks, seed=7)

    for text in (
        f"{ONE}: 1 of 3 points",
        "left_pad: 0 of 2 points",
        "pads on the right.",
        "def left_pad(): ...",
        "a = 1",
    ):
        assert text in page
    assert 'alt="mask: row 0, column 1: expected 2, got 3."' in page
    assert "seed 7" in page


def test_a_text_that_the_instructor_grades_is_on_the_page_and_its_points_are_the_release_s(tmp_path):
    nb = notebook(MEMO, {})
    memo = next(cell for cell in nb.cells if cell.cell_type == "markdown" and "nbgrader" in cell.metadata)
    memo.source = "We use <b>14</b> rows."
    memo.metadata.nbgrader.points = 400
    path = tmp_path / f"{MEMO}.ipynb"
    hand_in(path, nb)
    (cell,) = memos_of(Submission("zoe", MEMO, path))
    task = memo_task(cell)
    page = feedback.page(MEMO, [task])

    assert (cell.memo, cell.source, task.by_hand, task.points) == ("memo", "We use <b>14</b> rows.", 4, 0)
    assert "memo: up to 4 points, given by hand" in page and "We use &lt;b&gt;14&lt;/b&gt; rows." in page
    assert task.note == ""
    assert all(each.source != cell.source for each in cells_of(Submission("zoe", MEMO, path)))

    nb.cells.remove(memo)
    hand_in(path, nb)
    assert [(each.source, each.points) for each in memos_of(Submission("zoe", MEMO, path))] == [("", 4)]


def test_nothing_that_a_student_writes_is_html():
    evil = '</code><script>alert(1)</script><img src=x onerror="alert(1)">'
    page = feedback.page(evil, [Task("stop", 1, 0, evil, work=[Work(evil, f"\x1b[31m{evil}\u202e")])], evil)

    assert "<script" not in page and "<img" not in page and "\x1b" not in page and "\u202e" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_a_page_is_bounded_whatever_was_handed_in():
    work = [Work("<" * 10**6, "&" * 10**6) for _ in range(50)]
    tasks = [Task("stop", 1, 0, "'" * 10**6, GRIDS, work) for _ in range(8)] + [Task("", work=work * 20)]

    assert len(feedback.page(ONE, tasks, "<" * 10**6)) <= 500_000


def test_a_note_says_per_task_what_went_wrong_in_a_few_words():
    message = "stopped with KeyError in line 2, `a[1]`: 1 (given: the row [1, 2])."
    assert Task("stop", 2, 0, message).note == "stop: stopped with KeyError in line 2, `a[1]`: 1"
    assert Task("stop", 2, 2, "passed. Good.").note == Task("").note == ""
    assert len(Task("stop", 2, 0, "a" * 500).note) < 120


def test_the_table_holds_no_formula_and_a_submission_without_a_notebook_has_a_line_and_a_page(tmp_path):
    folder, out = tmp_path / "submitted", tmp_path / "grades"
    for student in ("=cmd|'/c calc'!A1", "dan"):
        (folder / student).mkdir(parents=True)
        (folder / student / f"{TWO}.ipynb").write_text("no notebook")
    grade.grade(folder, out, Limits(), seed=1, is_sandboxed=False)
    text = (out / "grades.csv").read_text()

    assert "\n'=cmd" in text
    assert f"dan,{TWO},0,6,0,cannot be read as a notebook (NotJSONError),,1" in text
    assert "cannot be read" in (out / "feedback" / "dan" / f"{TWO}.html").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["feedback", "grades.csv"]


def rows_of(out):
    with open(out / "grades.csv", newline="", encoding="utf-8") as file:
        return [(row["student"], row["assignment"], row["seed"]) for row in csv.DictReader(file)]


def test_a_later_run_keeps_the_grades_of_the_submissions_that_it_does_not_contain(tmp_path):
    week, late, out = tmp_path / "week", tmp_path / "late", tmp_path / "grades"
    for path in (week / "ada" / f"{ONE}.ipynb", week / "=bob" / f"{ONE}.ipynb", late / "ada" / f"{TWO}.ipynb"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("no notebook")
    grade.grade(week, out, Limits(), seed=1, is_sandboxed=False)
    grade.grade(late, out, Limits(), seed=2, is_sandboxed=False)
    (grade_again,) = grade.grade(week, out, Limits(), seed=3, is_sandboxed=False, students=["=bob"])

    assert grade_again.student == "=bob"
    assert rows_of(out) == [("'=bob", ONE, "3"), ("ada", ONE, "1"), ("ada", TWO, "2")]
    pages = sorted(path.relative_to(out / "feedback").as_posix() for path in out.rglob("*.html"))
    assert pages == [f"=bob/{ONE}.html", f"ada/{ONE}.html", f"ada/{TWO}.html"]


def test_the_line_of_a_file_that_was_renamed_goes_with_its_page(tmp_path):
    folder, out = tmp_path / "week", tmp_path / "grades"
    folder.mkdir()
    wrong, right = folder / "ada_homework.ipynb", folder / f"ada_{ONE}.ipynb"
    wrong.write_text("no notebook")
    (line,) = grade.grade(folder, out, Limits(), seed=1, is_sandboxed=False)
    assert f"rename the file if it is {ASSIGNMENTS[0]}" in line.note
    wrong.rename(right)
    grade.grade(folder, out, Limits(), seed=2, is_sandboxed=False, students=["ada"])
    assert rows_of(out) == [("ada", ONE, "2"), ("week", "ada_homework", "1")], "another student's, for all it knows"
    grade.grade(folder, out, Limits(), seed=3, is_sandboxed=False)

    assert rows_of(out) == [("ada", ONE, "3")]
    assert [path.stem for path in out.rglob("*.html")] == [ONE]


def test_a_student_who_handed_in_nothing_and_a_table_that_is_not_the_grader_s_are_refused(tmp_path):
    folder, out = tmp_path / "week", tmp_path / "grades"
    folder.mkdir()
    (folder / f"ada_{ONE}.ipynb").write_text("no notebook")
    with pytest.raises(ValueError, match=r"no submission of 'eve'.*ada"):
        grade.grade(folder, out, Limits(), seed=1, is_sandboxed=False, students=["ada", "eve"])
    out.mkdir()
    for table in ("name;points\neve;3\n", ",".join(grade.COLUMNS) + "\neve\n"):
        (out / "grades.csv").write_text(table)
        with pytest.raises(ValueError, match="is not a table of grades"):
            grade.grade(folder, out, Limits(), seed=1, is_sandboxed=False)


def test_a_folder_without_submissions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no notebook"):
        grade.grade(tmp_path, tmp_path / "out", Limits(), seed=1)
    with pytest.raises(ValueError, match="no folder"):
        grade.grade(tmp_path / "submitted", tmp_path / "out", Limits(), seed=1)


def die(submission, options):
    raise SystemExit(1)


def test_an_examiner_that_dies_costs_one_submission(tmp_path, monkeypatch):
    options = examiners.Options(tmp_path, Limits(), seed=1)
    examiner = examiners._Examiner(replace(options, is_sandboxed=False))
    monkeypatch.setattr(examiners, "grade_one", die)
    lost = examiner.grade(Submission("ada", ONE, tmp_path / "a.ipynb"))
    monkeypatch.undo()
    Path(tmp_path, "a.ipynb").write_text("no notebook")
    next_one = examiner.grade(Submission("bob", ONE, tmp_path / "a.ipynb"))
    examiner.close()

    assert (lost.score, lost.max_score, lost.note) == (0, 8, "grading failed: the grader's own process ended")
    assert "grading failed" in (tmp_path / "ada" / f"{ONE}.html").read_text()
    assert "cannot be read" in next_one.note


def grade_ada_only(submission, options):
    if submission.student != "ada":
        time.sleep(60)
    return Grade(submission.student, submission.assignment)


def test_ctrl_c_ends_grading_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(examiners, "grade_one", grade_ada_only)
    submissions = [Submission(student, ONE, tmp_path / "a.ipynb") for student in ("ada", "bob", "cleo")]
    grades = examiners.grade_all(submissions, examiners.Options(tmp_path, Limits(), seed=1), jobs=1)
    assert next(grades).student == "ada"
    interrupt = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    interrupt.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(grades)

    assert time.monotonic() - start < 20
    assert list(tmp_path.iterdir()) == []  # no page says that grading bob failed


def test_an_examiner_that_is_stopped_while_its_process_starts_ends_it(tmp_path):
    examiner = examiners._Examiner(examiners.Options(tmp_path, Limits(), seed=1))
    examiner.stop()
    with pytest.raises(CancelledError):
        examiner.grade(Submission("ada", ONE, tmp_path / "a.ipynb"))
    examiner.process.join()
    examiner.close()


def test_what_was_graded_before_an_interrupt_is_in_the_table(tmp_path, monkeypatch):
    folder, out = tmp_path / "week", tmp_path / "grades"
    for student in ("ada", "bob"):
        (folder / student).mkdir(parents=True)
        (folder / student / f"{ONE}.ipynb").write_text("no notebook")
    grade.grade(folder, out, Limits(), seed=1, is_sandboxed=False)

    def interrupted(submissions, options, jobs):
        yield Grade("bob", ONE, 3, 8)
        raise KeyboardInterrupt

    monkeypatch.setattr(grade, "grade_all", interrupted)
    with pytest.raises(SystemExit, match=r"Interrupted.*the seed 2"):
        grade.main(["grade", str(folder), "--no-sandbox", "--out", str(out), "--seed", "2"])
    assert rows_of(out) == [("ada", ONE, "1"), ("bob", ONE, "2")]
    assert len(list(out.rglob("*.html"))) == 2


def test_the_table_of_earlier_runs_is_whole_if_writing_the_new_one_is_interrupted(tmp_path, monkeypatch):
    folder, out = tmp_path / "week", tmp_path / "grades"
    folder.mkdir()
    (folder / f"ada_{ONE}.ipynb").write_text("no notebook")
    grade.grade(folder, out, Limits(), seed=1, is_sandboxed=False)

    def interrupted(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(grade.csv, "writer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grade.grade(folder, out, Limits(), seed=2, is_sandboxed=False)
    assert rows_of(out) == [("ada", ONE, "1")]


def test_without_a_sandbox_grading_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    hand_in(tmp_path / "ada" / f"{ONE}.ipynb", notebook(ONE, {}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"apt install bubblewrap.*--no-sandbox"):
        grade.main(["grade", str(tmp_path), "--out", str(tmp_path / "out")])
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2; exit 1\n")
    bwrap.chmod(0o755)
    with pytest.raises(sandbox.NoSandboxError, match="cannot make one here: bwrap: No permissions"):
        sandbox.require()
