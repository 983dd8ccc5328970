"""Students' plans and schedules drive the engine: lesson 4's `planned_by`, and the codelab's score."""

from collections import Counter
from random import Random

import pytest
from answers import solutions

from helpers import Engine, EngineConfig, Request, SamplingParams, generate_continuous, generate_static, workloads
from helpers.checks import first_come, planned_by, run_schedule, score_schedule
from helpers.checks.exercises.lesson_4_order import sequence_of
from helpers.checks.exercises.lesson_5_plan import plan_chunks
from helpers.checks.scheduling import BASELINES, measure, static
from helpers.engine import Scheduler
from helpers.trace import RowStep, Trace
from tests.simulation import queue_of

# --- lesson 4's plans -----------------------------------------------------------------------------------------------


def test_the_reference_plans_what_the_engine_plans():
    draw = Random(5)
    for _ in range(200):
        sequences = [sequence_of(name, draw.randint(1, 30), draw.choice([0, 0, 3])) for name in range(9)]
        running, waiting = sequences[: draw.randint(0, 6)], sequences[draw.randint(6, 9) :]
        for sequence in running:
            sequence.computed = draw.choice([len(sequence.token_ids) - 1, draw.randrange(len(sequence.token_ids))])
        rows = len(running) + draw.randint(1, 3)
        tokens = draw.randint(rows, 50)
        scheduler = Scheduler(EngineConfig(max_batch_size=rows, max_tokens_per_step=tokens))
        scheduler.running, scheduler.waiting = list(running), queue_of(waiting)
        chunks = scheduler.schedule().chunks
        plan = [(chunk.sequence.request_id, chunk.tokens) for chunk in chunks]
        assert plan_chunks.solution(running, waiting, rows, tokens) == plan


def test_a_student_s_plan_runs_the_engine_and_changes_no_token():
    requests = workloads.budgets(9, high=12, seed=3)
    config = EngineConfig(max_batch_size=3, max_tokens_per_step=4, scheduler_cls=planned_by(solutions.plan_chunks))
    engine = Engine(config=config)
    params = [SamplingParams(max_tokens=request.max_tokens) for request in requests]
    outputs = engine.generate([request.prompt for request in requests], params)
    expected = generate_continuous(requests).outputs
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    computed = Counter()
    for iteration in engine.trace.passes:
        computed[iteration.step] += sum(row.tokens for row in iteration.row_steps)
    assert max(computed.values()) == 4


def test_a_student_s_plan_need_not_consider_cached_prefixes():
    requests = workloads.one_beginning(3, words=30, max_tokens=4)
    scheduler_cls = planned_by(solutions.plan_chunks)
    engine = Engine(config=EngineConfig(max_batch_size=1, max_tokens_per_step=30, scheduler_cls=scheduler_cls))
    params = [SamplingParams(max_tokens=request.max_tokens) for request in requests]
    outputs = engine.generate([request.prompt for request in requests], params)
    expected = generate_continuous(requests).outputs
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    prompt_tokens = sum(len(engine.tokenizer(request.prompt)["input_ids"]) for request in requests)
    assert engine.trace.prompt_tokens < prompt_tokens


def test_an_empty_plan_does_not_run_the_engine_for_ever():
    engine = Engine(config=EngineConfig(scheduler_cls=planned_by(lambda *arguments: [])))
    with pytest.raises(ValueError, match="The plan is empty although 2 requests wait or run"):
        engine.generate(["Look", "Many hands"], SamplingParams(max_tokens=2))


# --- the codelab's score --------------------------------------------------------------------------------------------


def two_at_once(policy=first_come):
    """Return a schedule that lets a single free row wait for a second one."""

    def schedule(waiting, running, free_rows):
        return policy(waiting, running, free_rows) if free_rows > 1 or len(waiting) == 1 or not running else []

    return schedule


def test_a_slot_step_with_several_tokens_is_useful_once():
    trace = Trace(2)
    trace.add([RowStep("prefill", 0, 3, 0, 1)], 0.0, 1.0, 0)
    trace.add([RowStep("decode", 0, 4, 0, 4, drafted=3, accepted=3)], 1.0, 1.0, 1)
    assert measure(trace, [0])["useful_share"] == 0.5


@pytest.mark.slow
def test_the_race_costs_what_the_codelab_says(capsys):
    scores = score_schedule(solutions.schedule)
    race = scores["race"]
    first = race["first come, first served"]
    assert list(scores) == ["race", "mixed", "arriving"]
    assert race["yours"]["forward_passes"] == 106  # longest first: 7 prefills + 99 decode steps
    assert first["forward_passes"] == 132  # 6 prefills + 126 decode steps
    assert first["useful_share"] == 680 / (132 * 8)
    assert first["left_free"] == 0
    assert race["static"]["forward_passes"] == 400
    assert race["static"]["left_free"] == 1890 / (400 * 8)
    assert race["static"]["p95_latency"] > 2 * first["p95_latency"]
    assert race["floor"] == 100  # the longest request; full rows would take 85
    for score in scores.values():
        assert all(score["floor"] <= score[policy]["forward_passes"] for policy in (*BASELINES, "yours"))
        assert score["yours"]["forward_passes"] < score["static"]["forward_passes"]
    out = capsys.readouterr().out
    assert "forward passes" in out and "floor                                  100" in out


@pytest.mark.slow
def test_joining_in_twos_costs_what_the_codelab_says():
    requests, arrivals = workloads.budgets(32), [2 * number for number in range(32)]
    schedules = {"first come": first_come, "in twos": two_at_once(), "longest in twos": two_at_once(solutions.schedule)}
    costs = {name: measure(run_schedule(each, requests, arrivals), arrivals) for name, each in schedules.items()}
    passes = {name: cost["forward_passes"] for name, cost in costs.items()}
    assert passes == {"first come": 139, "in twos": 132, "longest in twos": 130}
    assert [round(cost["p95_latency"]) for cost in costs.values()] == [90, 82, 82]


def test_the_loop_that_runs_a_schedule_is_the_course_s_continuous_loop():
    race = workloads.race(16, long=40)
    trace, theirs = run_schedule(first_come, race, [0] * 16), generate_continuous(race).trace
    assert [iteration.row_steps for iteration in trace.passes] == [iteration.row_steps for iteration in theirs.passes]
    trace, theirs = run_schedule(static, race, [0] * 16), generate_static(race).trace
    assert trace.forward_passes == theirs.forward_passes


def test_latency_counts_forward_passes_from_the_arrival():
    requests = [Request("Once upon a time, a brave", 3, 0), Request("Once upon a time, a brave", 2, 1)]
    trace = run_schedule(first_come, requests, [0, 9], rows=1)
    # Request 0 is done after 3 passes; the server then waits for request 1, which takes 2.
    assert trace.token_times == {0: [1, 2, 3], 1: [10, 11]}
    assert measure(trace, [0, 9])["p95_latency"] == pytest.approx(2 + 0.95)


def test_rows_count_as_left_free_only_while_requests_wait():
    requests = [Request("Once upon a time, a brave", 4, id) for id in "abc"]

    def one_at_a_time(waiting, running, free_rows):
        return [] if running else waiting[:1]

    trace = run_schedule(one_at_a_time, requests, [0, 0, 0], rows=2)
    assert trace.forward_passes == 12
    assert measure(trace, [0, 0, 0])["left_free"] == (4 + 4) / (12 * 2)  # while "c" runs, no request waits


def test_a_schedule_sees_what_waits_and_what_runs():
    seen = []

    def spying(waiting, running, free_rows):
        seen.append((len(waiting), [(request.request_id, request.generated) for request in running], free_rows))
        waiting_before = list(waiting)
        waiting.clear()  # a copy: nothing is lost
        return waiting_before[:free_rows]

    run_schedule(spying, [Request("Once upon a time, a brave", 3, id) for id in "abc"], [0, 0, 1], rows=2)
    assert seen[:3] == [(2, [], 2), (1, [("a", 2), ("b", 2)], 0), (1, [], 2)]


def test_an_invalid_schedule_is_told_so_and_not_scored(capsys):
    assert score_schedule(lambda waiting, running, free_rows: []) == {}
    assert capsys.readouterr().out == (
        "schedule: lets no request join although none is running: the server would wait forever (given: 32 waiting, "
        "0 running, 8 free rows).\n"
    )
    assert score_schedule(lambda waiting: waiting) == {}
    assert "is called as schedule(waiting, running, free_rows)" in capsys.readouterr().out
