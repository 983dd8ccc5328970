"""The capstone: right engines pass every draw, wrong ones are told what they missed, and cheats gain nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from answers import RIGHT, WRONG
from answers.capstone import MILESTONES, SOLUTION, engine
from grading.encoding import decode, encode
from handing_in import CAPSTONE, RELEASE, ROOT, hand_in, notebook

from helpers.checks import calling, try_engine
from helpers.checks.calling import answer
from helpers.checks.capstone import MILESTONES as DECLARED
from helpers.checks.capstone import course_run
from helpers.checks.engine_calls import Row
from helpers.checks.engine_models import EOS, KeyedModel
from helpers.checks.engine_run import Run, Workload, run_engine
from helpers.checks.engine_workloads import cases
from helpers.checks.examining import examine
from helpers.checks.exercises import EXERCISES

WORKFLOW = ROOT / ".github/classroom/capstone.yml"


def verdict_on(task, engine_class, seed=0):
    return examine(EXERCISES[task], lambda question: answer(question, engine_class), seed)


def named(answers):
    return [pytest.param(task, *each, id=f"{task}-{each[0]}") for task in MILESTONES for each in answers[task].items()]


@pytest.mark.parametrize("number, right", list(enumerate(named(RIGHT))))
def test_a_right_engine_passes_its_draw(number, right):
    """Each engine on one of five draws; test_checks.py has the students' own draw."""
    task, _, engine_class = right.values
    verdict = verdict_on(task, engine_class, 1 + number % 5)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize("task, message, engine_class", named(WRONG))
def test_a_wrong_engine_is_told_the_same_on_another_draw(task, message, engine_class):
    verdict = verdict_on(task, engine_class, 1)
    assert not verdict.passed and message in verdict.message


def test_milestones_differ_an_engine_that_stops_at_one_fails_the_next():
    assert all(len(WRONG[task]) >= 5 for task in MILESTONES)
    joins = "and not short_of_memory:"
    stopped = {
        "engine_static": [("len(self.running) < self.max_rows", "not self.running")],
        "engine_continuous": [(joins, joins.replace(":", " and not decodes_first:"))],
        "engine_chunked": [("rows, left = {}, self.max_tokens_per_step", "rows, left = {}, 10**6")],
        "engine_prefixes": [("            self.share(request)\n", "")],
    }  # fmt: skip
    for task, changes in stopped.items():
        before = MILESTONES[MILESTONES.index(task) - 1]
        assert verdict_on(before, engine(*changes)).passed, before
        assert not verdict_on(task, engine(*changes)).passed, task


@pytest.mark.parametrize("task", MILESTONES)
def test_the_course_s_engine_serves_every_workload_and_two_draws_share_no_token(task):
    texts = []
    for seed in (0, 1):
        for workload, model in cases(task, seed):
            run = course_run(DECLARED[task], workload, model)
            assert not run.error and all(request.finished for request in run.requests.values()), workload.name
            texts.append([request.output for request in run.requests.values()])
    assert texts[0] != texts[len(texts) // 2]


def test_the_stand_in_s_tokens_depend_on_every_key():
    model, prompt = KeyedModel("a"), [3, 1, 4, 1, 5, 9, 2, 6]
    assert model.alone(prompt, 5) != KeyedModel("b").alone(prompt, 5)
    for index in range(len(prompt)):
        other = [*prompt[:index], 50, *prompt[index + 1 :]]
        assert model.keys_of(other)[-1] != model.keys_of(prompt)[-1]
    assert model.alone([*prompt, EOS], 3) != [], "EOS in a prompt ends nothing"


def test_texts_of_the_course_s_model_are_those_of_its_requests_alone():
    from helpers import generate_alone

    requests = [("Once upon a time, a brave", 9), ("Many hands", 3), ("Many hands", 5)]
    texts = try_engine(engine(), requests)
    assert texts == [
        prompt + output.text for (prompt, _), output in zip(requests, generate_alone(requests).outputs, strict=True)
    ]
    wrong = engine(("if request.uncomputed == 0:", "if True:"), ("left = {}, self.max_tokens_per_step", "left = {}, 4"))
    with pytest.raises(ValueError, match="A chunk of a prompt yields no token"):
        try_engine(wrong, requests)


# --- engines that cheat -----------------------------------------------------------------------------------------------

WORK = Workload("two", [(0, [1, 2, 3], 4), (9, [4, 5], 2)], 2, 20, 4)


def run_of(step):
    """Return the error of a run whose engine does something in its steps."""

    class Engine:
        def __init__(self, model, *limits):
            self.model, self.requests = model, []

        def add_request(self, *request):
            self.requests.append(request)

    Engine.step = step
    return run_engine(Engine, WORK, KeyedModel("secret")).error


def test_an_engine_knows_no_request_before_it_arrives():
    seen = []

    def look(self):
        seen.extend(self.requests)
        self.model.forward([Row(1, 0, [4, 5], [0])])

    with pytest.raises(Exception, match="request 1, which has not arrived"):
        run_of(look)
    assert [request for request, *_ in seen] == [0]


@pytest.mark.parametrize(
    "step, message",
    [
        # Right tokens that the model has not given are no output.
        (lambda self: {0: KeyedModel("secret").alone([1, 2, 3], 4)}, "the model has given 0 of them so far"),
        (lambda self: self.model._serve(("forward", 7)), "cannot read"),
        (lambda self: self.model._serve(()), "cannot read"),
        (lambda self: self.model._serve(("measures",)), "cannot read"),
        (lambda self: [self.model._serve(("arrivals",)) for _ in range(9)], "computes nothing"),
        (lambda self: {}, "computes nothing in 3 steps"),
        (lambda self: None, "should return a dict"),
        (lambda self: {7: [1]}, "no request that has arrived"),
        (lambda self: {0: "tokens"}, "should return lists of token ids"),
        (lambda self: self.model.forward([]), "should return a dict"),
    ],
)
def test_whatever_an_engine_sends_is_an_error_in_words(step, message):
    assert message in run_of(step)


@pytest.mark.parametrize(
    "row, message",
    [
        (Row(0, 0, [1, 2, 3], [9]), "names block 9"),
        (Row(0, 0, [1, 2, 3], [-1]), "names block -1"),
        (Row(0, 0, [1, 2, 3], []), "has no slot"),
        (Row(0, 0, [1] * 21, [0, 1, 2, 3]), "computes 21 tokens in a pass"),
        (Row(0, 10**12, [1], [0]), "`start` is the place"),
        (Row(0, 0, [1], [0] * 10**6), "block table of 1000000 blocks"),
        (Row(0, 0.0, [1], [0]), "calls `forward` with 0.0: ids"),
        ((0, 0, [1]), "rows are `Row`s"),
    ],
)
def test_an_impossible_pass_is_refused_and_ends_the_run(row, message):
    run = Run(WORK, KeyedModel("secret"))
    run.serve(("arrivals",))
    sent = (row.request_id, row.start, row.token_ids, row.block_table) if isinstance(row, Row) else row
    assert message in run.serve(("forward", [sent]))
    assert run.serve(("arrivals",)) is None and message in run.error and run.passes == 0


def test_an_engine_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(calling, "SECONDS", 1)
    begin = "rows, left = {}, self.max_tokens_per_step"
    endless = engine((begin, f"{begin}\n        while True: pass"))
    assert "did not finish within 1 seconds" in verdict_on("engine_cached", endless).message
    busy = engine(("            request.computed += count\n", ""))  # computes the same tokens again and again
    assert not verdict_on("engine_cached", busy).passed


def test_messages_survive_the_way_out_of_a_sandbox():
    for message in [("arrivals",), ("forward", [(0, 0, [1, 2], [3])]), ("finished", {0: [1, 2]})]:
        assert decode(encode(calling.Outcome(message))).result == message


# --- the starter and the workflow of GitHub Classroom -----------------------------------------------------------------


def steps_of_the_workflow():
    """Return the settings of the steps that check a milestone, and the last step, which reports."""
    (job,) = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values()
    return [step["with"] for step in job["steps"] if "command" in step.get("with", {})], job["steps"][-1]


def test_the_workflow_checks_each_milestone_and_its_points_are_the_notebook_s():
    commands, report = steps_of_the_workflow()
    assert [step["command"].split()[-1] for step in commands] == MILESTONES
    assert all(step["max-score"] == 2 and step["timeout"] <= 10 for step in commands)
    assert report["with"]["runners"].split(",") == MILESTONES
    assert set(report["env"]) == {f"{task.upper()}_RESULTS" for task in MILESTONES}


@pytest.mark.slow
def test_the_workflow_s_command_passes_right_notebooks_and_fails_others(tmp_path):
    command = steps_of_the_workflow()[0][0]["command"]
    path = Path(command.split()[-2])
    assert path == RELEASE.relative_to(ROOT) / CAPSTONE / f"{CAPSTONE}.ipynb"
    (tmp_path / "helpers").symlink_to(ROOT / "helpers")
    for answers, code in [({"MyEngine": SOLUTION}, 0), ({}, 1), ({"MyEngine": "MyEngine = 1 / 0"}, 1)]:
        hand_in(tmp_path / path, notebook(CAPSTONE, answers))
        words = [sys.executable, *command.split()[1:]]
        result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == code, result.stdout + result.stderr
