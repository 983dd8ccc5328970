"""The power of the checks: right answers pass however they are written, wrong ones are told which idea they miss.

The misconceptions are declared with the exercises, and `answers` holds right and wrong answers of other kinds.
Whatever a student's function does, `check` returns True or False.
"""

import ast
import inspect
import re
import signal
import time
from itertools import combinations
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from answers import RIGHT, WRONG

from helpers import load_model
from helpers.checks import calling, check
from helpers.checks.calling import Question, answer
from helpers.checks.capacity import run_design
from helpers.checks.comparing import difference
from helpers.checks.examining import examine
from helpers.checks.exercise import Exercise
from helpers.checks.exercises import EXERCISES

TASKS = list(EXERCISES)
DECLARED = {name: each for name, each in EXERCISES.items() if isinstance(each, Exercise)}
SEEDS = (0, pytest.param(4, marks=pytest.mark.slow))  # that of the students, and one of those for grades
RUN_A_MODEL = ("cached_loop", "continuous_loop", "generate_next_token")  # each wrong answer takes a second


def named(answers):
    """Return (task, name, function) for each answer. The name of a wrong one is a piece of the message meant for it."""
    every = [(task, *each) for task, functions in answers.items() for each in functions.items()]
    return [pytest.param(*each, id="-".join(each[:2])) for each in every]


def verdict_on(exercise, function, seed=0, ask=answer):
    return examine(exercise, lambda question: ask(question, function), seed)


# --- the exercises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", DECLARED)
def test_the_reference_passes_and_every_misconception_gets_its_own_message(name, seed):
    exercise = DECLARED[name]
    assert verdict_on(exercise, exercise.solution, seed).passed
    first = exercise.questions(SEEDS[0])[0][0]

    def ask(question, function):  # a misconception does the same twice, which one question shows: the others take time
        return answer(question, function) if question is first else exercise.outcome_of(function, question)

    others = {}
    step = 4 if seed and name in RUN_A_MODEL else 1  # the cases that decide are the same for all seeds
    for misconception in exercise.misconceptions[::step]:
        verdict = verdict_on(exercise, misconception.function, seed, ask)
        if verdict.passed or not verdict.message.startswith(misconception.message.rstrip(".")):
            others[misconception.message] = verdict.message
    assert not others


def test_messages_of_different_misconceptions_differ():
    for exercise in DECLARED.values():
        messages = {misconception.message for misconception in exercise.misconceptions}
        assert not [pair for pair in combinations(messages, 2) if pair[0].startswith(pair[1][:-1])]


@pytest.mark.parametrize("task, name, function", named(RIGHT))
def test_a_right_answer_passes_however_it_is_written(task, name, function, capsys):
    assert check(task, function) is True, capsys.readouterr().out
    assert capsys.readouterr().out.startswith(f"{task}: passed. ")


@pytest.mark.parametrize("task, message, function", named(WRONG))
def test_a_wrong_answer_gets_the_message_meant_for_it(task, message, function, capsys):
    assert check(task, function) is False
    out = capsys.readouterr().out

    assert out.startswith(f"{task}: ")
    quoted = r"(in line \d+), `.*`:"  # a student's line; that of an answer here holds the piece of the message, too
    assert message in re.sub(quoted, r"\1:", out)
    assert "Traceback" not in out and "cannot be compared" not in out
    assert len(out.splitlines()[0]) < 520, "one or two sentences and the case"


@pytest.mark.parametrize("task", ["finish_times", "quantize", "smallest_fleet"])
def test_no_rounding_decides_whether_an_answer_is_right(task):
    for seed in (42, 201, 540):
        for function in RIGHT[task].values():
            assert verdict_on(DECLARED[task], function, seed).passed


def test_a_design_that_fails_on_the_practice_trace_fails_a_grade_on_a_kinder_one():
    assert run_design(24, 64, 100, seed=6).in_time >= 120 > run_design(24, 64, 100).in_time
    assert not verdict_on(EXERCISES["design"], lambda: (24, 64, 100), seed=6).passed


def test_every_task_has_right_answers_in_two_styles_and_wrong_ones():
    assert [task for task in TASKS if not RIGHT[task]] == []
    assert set(WRONG) | {name for name, exercise in DECLARED.items() if exercise.misconceptions} == set(TASKS)


def test_calling_the_course_s_own_solution_is_said_in_every_task():
    pairs = [(exercise, name) for exercise in DECLARED.values() for name in exercise.questions(0)[0][0].forbidden]
    assert len(pairs) > 20
    for exercise, name in pairs:
        own = resolve_name(name)
        message = verdict_on(exercise, lambda *arguments, own=own: own(*arguments)).message
        assert message.startswith(f"calls the course's own `{name.partition(':')[2]}`.")


def test_no_message_gives_the_solution_away():
    """Beside the student's own line, a message holds only texts from the checks' source, and results."""
    texts = [misconception.message for exercise in DECLARED.values() for misconception in exercise.misconceptions]
    pieces = set()
    for exercise in DECLARED.values():
        tree = ast.parse(inspect.getsource(exercise.solution).strip())
        kinds = (ast.Call, ast.Subscript, ast.BinOp, ast.Compare)
        pieces |= {piece for node in ast.walk(tree) if isinstance(node, kinds) and len(piece := ast.unparse(node)) > 12}
    assert len(pieces) > 100
    assert [piece for piece in pieces if any(piece in text for text in texts)] == []
    helpful = "cumsum clamp torch.cat .pad( (mask trim_left select_rows concatenate sorted( kv_cache. dim= key="
    assert [word for word in helpful.split() if any(word in text for text in texts)] == []


# --- whatever a student's function does -----------------------------------------------------------------------------


def test_an_exception_is_reported_with_its_line(capsys):
    def divides(lengths, seconds_per_pass):
        nothing = 0
        return sum(lengths) / nothing

    assert check("top_p", divides) is False
    line = inspect.getsourcelines(divides)[1] + 2
    out = capsys.readouterr().out
    quoted = f"line {line}, `return sum(lengths) / nothing`: float division by zero"
    assert f"stopped with ZeroDivisionError in {quoted}" in out
    assert "Traceback" not in out and len(out.splitlines()) == 1


def test_an_exception_in_a_notebook_cell_is_reported_with_its_line(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    function = "def stop(token_ids, eos_id, max_tokens):\n    wide = 1\n    return token_ids[17]"
    cell = f"{function}\n\nresult = check('stop', stop)"
    shell.user_ns["check"] = check
    assert shell.run_cell(cell).success
    assert shell.user_ns["result"] is False
    assert "stopped with IndexError in line 3, `return token_ids[17]`" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_what_is_not_written_yet_is_said_kindly(task, capsys):
    def stub(*arguments):
        raise NotImplementedError

    assert check(task, stub) is False
    assert f"{task}: is not written yet." in capsys.readouterr().out


STRANGE = [
    *(None, 7, "text", [], (), {}, [None], (None, None), float("nan"), float("inf"), object(), {"a": 1}),
    *(torch.zeros(0), torch.zeros(2, 3), torch.zeros(2, device="meta"), np.zeros(3), type, b"", {1}, 1j, range(3)),
]


@pytest.mark.parametrize("task", TASKS)
def test_whatever_comes_back_check_says_so_and_does_not_raise(task, capsys):
    for strange in STRANGE:
        assert check(task, lambda *arguments, strange=strange: strange) is False, strange
        assert len(capsys.readouterr().out) > len(task) + 10


def test_what_is_no_function_is_said_kindly(capsys):
    assert check("stop", ([[1]], 0)) is False
    assert "is given a tuple, not a function" in capsys.readouterr().out
    assert check("stop", lambda rows: rows) is False
    called = "is called as stop(token_ids, eos_id, max_tokens), but your function does not accept that"
    assert called in capsys.readouterr().out


def test_an_unknown_task_is_an_error_that_lists_those_there_are():
    with pytest.raises(ValueError, match=r"no exercise 'leftpad'\. There are: adapt_rows, "):
        check("leftpad", len)


@pytest.mark.parametrize("catch", [(), Exception, BaseException], ids=["plain", "except_Exception", "bare_except"])
def test_a_loop_that_does_not_end_is_stopped_at_the_time_that_the_message_says(catch, monkeypatch, capsys):
    monkeypatch.setattr(calling, "SECONDS", 1)

    def endless(lengths, seconds_per_pass):
        try:
            while True:
                time.sleep(0.001)  # the clock counts, not the computing
        except catch:
            while True:  # it has swallowed the first interruption, and gets a second one
                pass

    start = time.monotonic()
    assert check("top_p", endless) is False
    assert "did not finish within 1 seconds: does your loop end?" in capsys.readouterr().out
    assert 1 <= time.monotonic() - start < 30


def test_a_time_limit_leaves_no_timer_and_no_handler_behind():
    before = signal.getsignal(signal.SIGALRM)
    check("kv_cache_bytes", max)

    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_the_student_s_own_interrupt_gets_through():
    def interrupted(lengths, seconds_per_pass):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("top_p", interrupted)


def test_checks_leave_the_model_and_the_course_s_solutions_as_they_were():
    from helpers import batching

    model, _ = load_model()
    before = batching.generate_next_token.__code__
    for task in ("cached_loop", "generate_next_token", "continuous_loop"):
        check(task, lambda *arguments: 1 / 0)

    assert "forward" not in vars(model)
    assert batching.generate_next_token.__code__ is before


# --- calls and comparisons ------------------------------------------------------------------------------------------


def test_a_function_gets_copies_and_a_change_is_in_the_outcome():
    question = Question("f(rows)", ([1, 2],))
    outcome = answer(question, lambda rows: rows.append(3))

    assert question.arguments == ([1, 2],)
    assert outcome.arguments == ([1, 2, 3],)


def test_a_course_s_own_solution_is_recognised_under_every_name():
    from helpers.batching import merge_batches as joined

    question = Question("merge_batches(first, second)", ({}, {}), forbidden=("helpers.batching:merge_batches",))
    for function in (joined, lambda first, second: joined(first, second)):
        failure = answer(question, function).failure
        assert failure.is_final and "calls the course's own `merge_batches`" in failure.message


@pytest.mark.parametrize(
    "got, right",
    [
        (3, 3.0),
        (np.float32(0.1), 0.1),
        (torch.tensor(0.1), 0.1),
        (np.int64(3), 3),
        ([np.int64(3), 4], [3, 4]),
        ([1, "a"], (1, "a")),
        (torch.tensor([0.1]), torch.tensor([0.1 + 1e-8])),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
    ],
)
def test_rounding_and_kinds_of_numbers_make_no_difference(got, right):
    assert difference(got, right) is None


@pytest.mark.parametrize(
    "got, right, message",
    [
        (3.0, 3, "the result should be an int, but is the float 3.0"),
        (True, 1, "the result should be an int, but is a bool"),
        (None, 1.5, "the result should be a number, but is None (is a `return` missing?)"),
        (3.2001, 3.2, "the result should be 3.2, but is 3.2001"),
        (1000000.5, 1000123.0, "the result should be 1.00012e+06, but is 1e+06"),
        ([1, 2], [1, 3], "the result should be [1, 3], but is [1, 2]"),
        ([5, torch.tensor(6)], [5, 6], "the result, place 1 should be an int, but is a tensor of int64 with shape []"),
        ((1, 2), [1, 2], "the result should be a list, but is a tuple"),
        ({}, {"a": 1}, "the result has no 'a'"),
        (torch.zeros(2), torch.zeros(3), "the result has shape [2], but should have [3]"),
        (torch.tensor([[0, 1]]), torch.tensor([[0, 2]]), "the result, row 0, column 1: expected 2, got 1"),
        (torch.tensor([1.0]), torch.tensor([1]), "the result holds float32, but should hold int64"),
        (
            [(torch.tensor([0.0, 1.0]), 3)],
            [(torch.tensor([0.0, 2.0]), 3)],
            "the result, place 0, place 0, row 1: expected 2, got 1",
        ),
    ],
)
def test_the_first_difference_is_said_in_words(got, right, message):
    assert difference(got, right).message.startswith(message)


# --- drawing --------------------------------------------------------------------------------------------------------


def padded_on_the_right(first, second):
    wide = max(each["attention_mask"].size(1) for each in (first, second))
    masks = [
        torch.nn.functional.pad(mask, (0, wide - mask.size(1)))
        for mask in (first["attention_mask"], second["attention_mask"])
    ]
    return DECLARED["merge_batches"].solution(first, second) | {"attention_mask": torch.cat(masks)}


def test_a_notebook_gets_a_picture(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", shown.append)
    check("merge_batches", padded_on_the_right)

    assert len(capsys.readouterr().out.splitlines()) == 1
    [picture] = shown
    assert "expected" in picture.alt
