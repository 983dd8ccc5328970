"""Earned points stay: what a submission's cells cost in time, and what a lost process or a copied cell takes."""

import copy
from dataclasses import replace

import pytest
from grading import examination
from grading.examination import case_seed, grade_cells
from grading.submissions import Submission, cells_of
from grading.worker_process import ENDED, Limits, WorkerLostError
from handing_in import EVICTION, TWO, answers_of, hand_in, nbgrader_of, notebook, with_cells

from helpers.checks.calling import answer

LIMITS = Limits(seconds=60, added_seconds=600)


class Clock:
    """A clock that only a cell's `sleep(seconds)` moves."""

    now = 0.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The clock of workers that run cells in this process: `die()` ends them, and so does a cell at its limit."""
    clock = Clock()

    def die():
        raise WorkerLostError(ENDED)

    class InProcess:
        def __init__(self, limits, is_sandboxed, deadline):
            self.limits, self.names = limits, {"sleep": clock.sleep, "die": die}

        def run(self, source, seconds=None):
            start = clock.now
            exec("\n".join(line for line in source.splitlines() if line[:1] != "%"), self.names)
            if clock.now - start > (seconds or self.limits.seconds):
                raise WorkerLostError("took longer than 60 s")
            return ""

        def ask(self, question, name, seconds):
            assert seconds > 1, "replayed cells are charged"
            return answer(question, self.names[name])

        def close(self):
            pass

    monkeypatch.setattr(examination, "WorkerProcess", InProcess)
    monkeypatch.setattr(examination.time, "monotonic", lambda: clock.now)
    return clock


def cells_from(tmp_path, nb, assignment=TWO):
    hand_in(tmp_path / "notebook.ipynb", nb)
    return cells_of(Submission("ada", assignment, tmp_path / "notebook.ipynb"))


def earned(tmp_path, nb, limits=LIMITS):
    return {task.name: task.earned for task in grade_cells(cells_from(tmp_path, nb), limits, "seed", False)}


def index_of(nb, name):
    return next(index for index, cell in enumerate(nb.cells) if nbgrader_of(cell).get("grade_id") == name)


ALL = {"left_pad": 3, "position_ids": 3}


@pytest.mark.parametrize(
    "cells",
    [
        ["sleep(55)"] * 12,  # more than the limit of added cells: later ones are left out, and no answer is
        ["sleep(52)"] * 6 + ["die()"],  # five minutes that run again
        ["sleep(61)"],
    ],
)
def test_own_cells_before_right_answers_cost_no_points(tmp_path, clock, cells):
    assert earned(tmp_path, with_cells(notebook(TWO, answers_of(TWO)), cells, at=1)) == ALL


def test_only_added_cells_are_charged_and_each_task_anew(tmp_path, clock):
    answers = answers_of(TWO)
    nb = notebook(TWO, answers | {"position_ids": "sleep(50)"})
    index = index_of(nb, "position_ids")
    with_cells(nb, [answers["position_ids"]], index + 1)  # after 50 s of an answer cell
    with_cells(nb, ["sleep(55)"] * 3, 1)
    nb.cells += [nb.cells[index + 3]] * 4  # copies of an answer cell
    assert earned(tmp_path, nb, replace(LIMITS, added_seconds=40)) == ALL | {"": 0}
    assert clock.now == 55 + 50 + 50


@pytest.mark.parametrize("is_in_the_answer, cost", [(True, {"left_pad": 0}), (False, {})])
def test_a_crash_after_minutes_of_cells_costs_its_own_task_and_before_a_check_nothing(
    tmp_path, clock, is_in_the_answer, cost
):
    answers = answers_of(TWO)
    nb = notebook(TWO, answers | ({"left_pad": answers["left_pad"] + "\ndie()"} if is_in_the_answer else {}))
    with_cells(nb, [] if is_in_the_answer else ["die()"], index_of(nb, "test_left_pad"))
    assert earned(tmp_path, with_cells(nb, ["sleep(52)"] * 6, 1)) == ALL | cost
    assert clock.now == 2 * 6 * 52, "the cells ran again, once"


def test_when_the_time_of_a_submission_is_over_its_points_stay(tmp_path, clock):
    answers = answers_of(TWO)
    nb = notebook(TWO, answers | {name: f"sleep(59)\n{answers[name]}" for name in ("left_pad", "position_ids")})
    slow = with_cells(nb, ["sleep(59)\ndie()"] * 3, at=-1)
    limits = Limits(seconds=60, total_seconds=100)
    assert earned(tmp_path, slow, limits) == ALL | {"": 0}
    assert earned(tmp_path, with_cells(nb, ["sleep(50)", "sleep(50)", "die()"], at=-6), limits)["left_pad"] == 3


@pytest.mark.parametrize("first, second", [("wrong", "right"), ("right", "wrong")])
def test_the_best_copy_of_a_task_counts_and_its_page_shows_all_work(tmp_path, clock, first, second):
    right = answers_of(TWO)["left_pad"]
    texts = {"right": right, "wrong": "def left_pad(*arguments): return None"}
    nb = notebook(TWO, answers_of(TWO) | {"left_pad": texts[first]})
    index = index_of(nb, "left_pad")
    copies = copy.deepcopy(nb.cells[index : index + 2])
    copies[0].source = texts[second]
    nb.cells += copies
    tasks = {task.name: task for task in grade_cells(cells_from(tmp_path, nb), LIMITS, "seed", False)}
    assert {name: task.earned for name, task in tasks.items()} == ALL
    assert [work.source for work in tasks["left_pad"].work] == [texts[first], texts[second]]


def test_of_many_copies_of_a_check_the_last_few_are_examined(tmp_path, clock):
    nb = notebook(TWO, answers_of(TWO))
    check = next(cell for cell in nb.cells if 'check("left_pad"' in cell.source)
    nb.cells[1:1] = [check] * 50
    assert sum(cell.task == "left_pad" for cell in cells_from(tmp_path, nb)) == 5
    assert earned(tmp_path, nb) == ALL


def test_no_task_and_no_copy_has_the_cases_of_another(tmp_path, clock, monkeypatch):
    """A function that has seen a contest's trace would know the future in the next task."""
    seeds = []
    monkeypatch.setattr(examination, "examine", lambda exercise, ask, seed: seeds.append(seed) or 1 / 0)
    nb = notebook(EVICTION, answers_of(EVICTION))
    nb.cells += [cell for cell in nb.cells if nbgrader_of(cell).get("grade")]
    grade_cells(cells_from(tmp_path, nb, EVICTION), LIMITS, "seed", False)
    assert len(set(seeds)) == len(seeds) == 6 and min(map(int.bit_length, seeds)) > 100
    assert case_seed("a", "evict") == case_seed("a", "evict") != case_seed("b", "evict")


def test_a_result_that_takes_too_long_to_compare_loses_its_task_only(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(examination, "COMPARING_SECONDS", -59.7)
    examine = examination.examine

    def slow(exercise, ask, seed):
        while exercise.name == "left_pad":
            pass
        return examine(exercise, ask, seed)

    monkeypatch.setattr(examination, "examine", slow)
    assert earned(tmp_path, notebook(TWO, answers_of(TWO))) == ALL | {"left_pad": 0}
