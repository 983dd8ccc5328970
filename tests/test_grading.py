"""Grading, piece by piece: which cells of a notebook count, and what a submission's process may send."""

import json
import pickle
from random import Random

import nbformat
import numpy as np
import pytest
import torch
from answers import RIGHT
from grading import encoding
from grading.encoding import decode, encode
from grading.submissions import GradingError, Submission, cells_of, release_of
from handing_in import ONE, answers_of, hand_in, notebook

from helpers import kv_cache
from helpers.checks.calling import Failure, Outcome, answer
from helpers.checks.comparing import difference
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
    assert not any(cell.is_added for cell in cells)
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
    points = {cell.task: cell.points for cell in submitted(tmp_path, nb) if cell.points}
    assert points == {cell.task: cell.points for cell in release_of(ONE) if cell.points}  # of two copies, one counts


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


# --- what a submission's process may send -----------------------------------------------------------------------------


def cache_of(*layers):
    cache = kv_cache.new()
    for number, keys in enumerate(layers):
        cache.update(keys, keys + 1, number)
    return cache


@pytest.mark.parametrize("task", [name for name, exercise in EXERCISES.items() if isinstance(exercise, Exercise)])
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


def test_numbers_of_other_libraries_a_state_of_random_numbers_and_a_failure_arrive():
    random, failure = Random(7), Failure("KeyError", "'a'", "stopped with KeyError", is_final=True)
    random.random()
    arrived = decode(encode(Outcome([np.int64(3), np.float32(0.5), np.bool_(True)], (random,), failure)))
    assert arrived.result == [3, 0.5, True] and arrived.failure == failure
    assert arrived.arguments[0].getstate() == random.getstate()


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
        message(["dict", [[n * (2**61 - 1), 0] for n in range(5001)]]),  # keys of equal hashes
        message(["list", [["set", [n * (2**61 - 1) for n in range(1000)]] for _ in range(6)]]),
    ],
)
def test_whatever_else_a_process_sends_is_refused(data):
    with pytest.raises(ValueError, match="not an outcome"):
        decode(data)
