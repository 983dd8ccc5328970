"""Policies alone, without a model: a plan is drawn up for made-up sequences, and reading a token costs nothing.

Hypothesis invents arrivals, lengths, budgets and memories that are too small for everybody; `Simulation` checks after
every iteration what each plan must respect. What a policy prefers is shown on small cases, written by hand.
"""

import ast
import random
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers import scheduler as module
from helpers.scheduler import POLICIES, Budget, FirstComeFirstServed, Priority, Unlimited, make_scheduler
from helpers.sequence import Sequence

SWITCHES = [(mixed, chunked) for mixed in (True, False) for chunked in (True, False)]


class Room:
    """Memory for so many tokens, shared by all. Counts what it gave to whom."""

    def __init__(self, tokens: int):
        self.tokens, self.given = tokens, {}

    def cached_tokens(self, sequence):
        return 0

    def allocate(self, sequence, tokens):
        assert tokens > 0
        if sum(self.given.values()) + tokens > self.tokens:
            return False
        self.given[sequence] = self.given.get(sequence, 0) + tokens
        assert self.given[sequence] == sequence.computed + tokens, "room for tokens that it does not read"
        return True

    def release(self, sequence):
        assert self.given.pop(sequence, 0) >= sequence.computed
        sequence.computed = 0


class Simulation:
    """What an engine does with plans, less the model: sequences come, read their chunks, get tokens and go."""

    def __init__(self, policy, rows: int, tokens: int, memory=None, mixed=True, chunked=True):
        self.scheduler = make_scheduler(policy, mixed, chunked)
        self.budget = Budget(rows, tokens, memory or Unlimited())
        self.waiting, self.running, self.finished = [], [], []
        self.plans, self.preemptions = [], 0

    def add(self, prompt: int, max_tokens: int, name="", priority=0) -> Sequence:
        self.waiting.append(Sequence(name, [0] * prompt, max_tokens, priority=priority))
        return self.waiting[-1]

    def step(self):
        decoding = [one for one in self.running if one.decodes]
        running = list(self.running)
        plan = self.scheduler.schedule(list(self.waiting), list(self.running), self.budget)
        self.check(plan, decoding, running)
        self.plans.append([(chunk.sequence.request_id, chunk.tokens) for chunk in plan.chunks])
        self.preemptions += len(plan.preempted)

        joining = [chunk.sequence for chunk in plan.chunks if chunk.sequence not in self.running]
        self.running = [one for one in self.running if one not in plan.preempted] + joining
        self.waiting = plan.preempted[::-1] + [one for one in self.waiting if one not in joining]
        for one in self.waiting:
            one.waited += 1
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.tokens
            if sequence.unread == 0:
                sequence.token_ids.append(0)
                if sequence.generated == sequence.max_tokens:
                    self.running.remove(sequence)
                    self.budget.memory.release(sequence)
                    self.finished.append(sequence)
        return plan

    def run(self, most: int = 2000):
        while self.waiting or self.running:
            self.step()
            assert len(self.plans) < most, "somebody waits for ever"
        return [one.request_id for one in self.finished]

    def check(self, plan, decoding, running):
        mixed, chunked = self.scheduler.mixed, self.scheduler.chunked
        planned = [chunk.sequence for chunk in plan.chunks]
        joining = [one for one in planned if one not in running]
        assert len(set(planned)) == len(planned), "a row is used twice"
        assert not set(planned) & set(plan.preempted), "who has to leave cannot take part"
        assert len(set(plan.preempted)) == len(plan.preempted)
        assert set(plan.preempted) <= set(running) and set(joining) <= set(self.waiting)
        assert len(running) - len(plan.preempted) + len(joining) <= self.budget.rows
        assert plan.tokens == sum(chunk.tokens for chunk in plan.chunks) <= self.budget.tokens
        assert all(0 < chunk.tokens <= chunk.sequence.unread for chunk in plan.chunks)
        assert plan.chunks or not running, "a step in which nobody gets on"
        assert planned == [one for one in planned if one in running] + joining, "the running come first"

        # The newest make room, so the oldest always gets on: that is why nobody waits for memory for ever.
        stay = running[: len(running) - len(plan.preempted)]
        assert plan.preempted[::-1] == running[len(stay) :]
        assert not (plan.preempted and joining), "somebody has to leave for want of room, and another is let in"
        if not chunked:
            assert all(chunk.tokens == chunk.sequence.unread for chunk in plan.chunks)
        if isinstance(self.scheduler, POLICIES["static"]) and running:
            assert not joining
        decodes = [one for one in planned if one in decoding]
        if mixed:
            assert decodes == [one for one in decoding if one not in plan.preempted], "a decode was held up"
        elif decodes:
            assert planned == decodes == [one for one in decoding if one not in plan.preempted], "not by turns"
        if not mixed and self.plans and self.prefilled_last and decoding:
            assert decodes, "two prefills in a row while somebody could decode"
        self.prefilled_last = bool(planned) and not decodes


@st.composite
def workloads(draw):
    rows = draw(st.integers(1, 5))
    tokens = draw(st.integers(rows, 24))
    mixed, chunked = draw(st.sampled_from(SWITCHES))
    longest = 24 if chunked else tokens - 1  # unchunked, what does not fit in an iteration can never be read
    requests = draw(
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(1, max(1, longest)), st.integers(1, 12), st.integers(-2, 2)),
            min_size=1,
            max_size=12,
        )
    )
    if not chunked:  # nor what it has grown to when it has to start anew
        requests = [(at, p, max(1, min(m, tokens - p + 1)), urgency) for at, p, m, urgency in requests]
        requests = [request for request in requests if request[1] <= tokens]
    need = max((p + m - 1 for _, p, m, _ in requests), default=1)
    memory = draw(st.one_of(st.none(), st.integers(need, 2 * need)))
    policy = draw(st.sampled_from(sorted(POLICIES)))
    return policy, rows, tokens, memory, mixed, chunked, sorted(requests)


@settings(derandomize=True, deadline=None, max_examples=500, phases=[Phase.generate])
@given(workloads())
def test_whatever_comes_no_budget_is_exceeded_and_every_request_finishes(workload):
    policy, rows, tokens, memory, mixed, chunked, requests = workload
    memory = memory and Room(memory)
    run = Simulation(policy, rows, tokens, memory, mixed, chunked)
    coming = list(enumerate(requests))
    for now in range(31):
        while coming and coming[0][1][0] <= now:
            name, (_, prompt, max_tokens, priority) = coming.pop(0)
            run.add(prompt, max_tokens, name, priority)
        run.step()
    run.run()
    assert sorted(one.request_id for one in run.finished) == list(range(len(requests)))
    assert all(one.generated == one.max_tokens for one in run.finished)
    assert not memory or memory.given == {}


def test_the_workloads_above_preempt_and_chunk_and_wait():
    # Without these, the proof above would prove little. The same kind of workload, drawn by hand.
    draw, preempted, split = random.Random(0), 0, 0
    for _ in range(50):
        run = Simulation("fcfs", 4, 8, Room(30))
        for name in range(8):
            run.add(draw.randint(1, 20), draw.randint(1, 10), name)
        run.run()
        preempted += run.preemptions
        split += any(tokens not in (1, run.finished[0].prompt_tokens) for plan in run.plans for _, tokens in plan)
    assert preempted > 50 and split > 40


# --- memory ---------------------------------------------------------------------------------------------------------


def test_the_newest_gives_up_its_memory_starts_anew_and_finishes():
    run = Simulation("fcfs", rows=3, tokens=16, memory=Room(12))
    a, b, c = run.add(4, 4, "a"), run.add(4, 3, "b"), run.add(3, 4, "c")
    assert run.step().preempted == []
    assert (a.computed, b.computed, c.computed) == (4, 4, 3)
    # 11 of 12 are taken, and everybody wants one more: a gets it, and c is taken out for b.
    plan = run.step()
    assert [(chunk.sequence, chunk.tokens) for chunk in plan.chunks] == [(a, 1), (b, 1)]
    assert plan.preempted == [c]
    assert (c.computed, c.generated, c.unread) == (0, 1, 4)  # the token that it got is not lost
    assert run.waiting == [c] and run.running == [a, b]
    # 10 are taken. a and b go on, and b ends with it. Then c reads anew all that it had, its first answer included.
    assert [(chunk.sequence, chunk.tokens) for chunk in run.step().chunks] == [(a, 1), (b, 1)]
    assert run.finished == [b]
    assert [(chunk.sequence, chunk.tokens) for chunk in run.step().chunks] == [(a, 1), (c, 4)]
    assert run.run() == ["b", "a", "c"]
    assert run.preemptions == 1 and c.generated == 4


def test_who_was_preempted_comes_before_who_still_waits():
    run = Simulation("fcfs", rows=2, tokens=16, memory=Room(8))
    run.add(4, 5, "a"), run.add(4, 2, "b"), run.add(1, 1, "c")
    run.step()
    assert [one.request_id for one in run.step().preempted] == ["b"]
    assert [one.request_id for one in run.waiting] == ["b", "c"]
    # There is room for c, and none for b, which has 5 tokens by now: c does not overtake, or b could wait for ever.
    assert [run.plans[-1] for _ in range(3) if run.step()] == [[("a", 1)]] * 3
    assert [one.request_id for one in run.finished] == ["a"]
    run.step()
    assert run.plans[-1] == [("b", 5), ("c", 1)]


def test_a_preempted_sequence_loses_the_chunk_that_it_had_in_the_same_plan():
    # b decodes first, since decodes are never held up; then a, older and still reading, needs its room.
    run = Simulation("fcfs", rows=2, tokens=8, memory=Room(13))
    a = Sequence("a", [0] * 12, 2)
    b = Sequence("b", [0] * 3, 9)
    run.running = [a, b]
    assert run.budget.memory.allocate(a, 8) and run.budget.memory.allocate(b, 3)
    a.computed, b.computed = 8, 3
    b.token_ids.append(0)
    plan = run.step()
    assert plan.preempted == [b]
    assert [(chunk.sequence, chunk.tokens) for chunk in plan.chunks] == [(a, 4)]


def test_cached_tokens_are_not_read_and_cost_no_budget():
    class Cached(Unlimited):
        def cached_tokens(self, sequence):
            return len(sequence.token_ids) - 2

        def allocate(self, sequence, tokens):
            if sequence.computed == 0:
                sequence.computed = self.cached_tokens(sequence)
            return True

    run = Simulation("fcfs", rows=4, tokens=5, memory=Cached(), chunked=False)
    for name, prompt in (("a", 30), ("b", 20), ("c", 10)):
        run.add(prompt, 1, name)
    run.run()
    assert run.plans == [[("a", 2), ("b", 2)], [("c", 2)]]  # with 5 tokens, only two of the pieces of 2 fit whole


# --- the two switches -----------------------------------------------------------------------------------------------


def plans(mixed, chunked):
    run = Simulation("fcfs", rows=3, tokens=6, mixed=mixed, chunked=chunked)
    run.add(4, 4, "a"), run.add(5, 2, "b"), run.add(3, 1, "c")
    run.run()
    return run.plans


def test_mixed_and_chunked_an_iteration_takes_all_the_tokens_it_can():
    assert plans(mixed=True, chunked=True) == [
        [("a", 4), ("b", 2)],
        [("a", 1), ("b", 3), ("c", 2)],
        [("a", 1), ("b", 1), ("c", 1)],
        [("a", 1)],
    ]


def test_mixed_and_whole_a_prompt_waits_until_it_fits():
    assert plans(mixed=True, chunked=False) == [
        [("a", 4)],
        [("a", 1), ("b", 5)],
        [("a", 1), ("b", 1), ("c", 3)],
        [("a", 1)],
    ]


def test_chunked_and_unmixed_prefills_and_decodes_take_turns():
    assert plans(mixed=False, chunked=True) == [
        [("a", 4), ("b", 2)],
        [("a", 1)],
        [("b", 3), ("c", 3)],
        [("a", 1), ("b", 1)],
        [("a", 1)],
    ]


def test_whole_and_unmixed_every_prompt_takes_a_turn_of_its_own_here():
    assert plans(mixed=False, chunked=False) == [
        [("a", 4)],
        [("a", 1)],
        [("b", 5)],
        [("a", 1), ("b", 1)],
        [("c", 3)],
        [("a", 1)],
    ]


def test_unmixed_prompts_are_read_one_after_the_other_while_nobody_can_decode():
    run = Simulation("fcfs", rows=2, tokens=4, mixed=False)
    run.add(9, 2, "a"), run.add(2, 1, "b")
    run.run()
    assert run.plans == [[("a", 4)], [("a", 4)], [("a", 1), ("b", 2)], [("a", 1)]]


# --- what each policy prefers ---------------------------------------------------------------------------------------


def order(policy, *requests, rows=1):
    """In which order requests of (name, max_tokens, priority) on few rows end."""
    run = Simulation(policy, rows, 64)
    for name, max_tokens, priority in requests:
        run.add(3 + len(run.waiting), max_tokens, name, priority)
    return "".join(run.run())


REQUESTS = [("a", 4, 0), ("b", 9, 2), ("c", 1, 1), ("d", 8, -1), ("e", 2, 0)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", "abcde"),
        ("static", "abcde"),
        ("balanced", "abcde"),
        # The longest has 9: 7 to 9 are long, 4 to 6 middling, and among the long, b came first. When c and e are left,
        # e is the longest.
        ("longest_first", "bdaec"),
        ("shortest_first", "ceadb"),
        ("priority", "daecb"),
    ],
)
def test_the_order_of_a_queue_on_one_row(policy, expected):
    assert order(policy, *REQUESTS) == expected


def test_with_a_long_request_among_short_ones_longest_first_needs_the_fewest_iterations():
    steps = {}
    for policy in POLICIES:
        run = Simulation(policy, 2, 64)
        for name, max_tokens in enumerate([2, 3, 2, 3, 10]):
            run.add(4 + name, max_tokens, name)
        run.run()
        steps[policy] = len(run.plans)
    # 20 tokens on 2 rows take at least 10 iterations, and the long request alone takes 10.
    assert steps["longest_first"] == 10
    assert steps["fcfs"] == 14 and steps["static"] == 3 + 3 + 10 and steps["shortest_first"] == 15


def test_the_first_come_are_served_first_even_where_a_later_one_would_fit():
    run = Simulation("fcfs", rows=3, tokens=8, chunked=False)
    run.add(5, 2, "a"), run.add(6, 2, "b"), run.add(1, 1, "c")
    run.run()
    assert run.plans[0] == [("a", 5)]  # 3 tokens are left: too few for b, and c does not overtake it
    assert run.plans[1] == [("a", 1), ("b", 6), ("c", 1)]


def test_static_batching_lets_nobody_in_before_everybody_is_out():
    run = Simulation("static", rows=2, tokens=64)
    for name, max_tokens in zip("abcd", (1, 4, 2, 1), strict=True):
        run.add(3, max_tokens, name)
    run.run()
    assert run.plans == [
        [("a", 3), ("b", 3)],
        [("b", 1)],
        [("b", 1)],
        [("b", 1)],
        [("c", 3), ("d", 3)],
        [("c", 1)],
    ]


def test_balanced_interrupts_when_enough_wait_or_somebody_waits_too_long():
    def joins(waiting: int, running: int, waited: int, **limits) -> bool:
        policy = POLICIES["balanced"](**limits)
        queue = [Sequence(n, [0] * 3, 5, waited=waited if n == 0 else 0) for n in range(waiting)]
        rows = [Sequence(-n, [0] * 4, 5, computed=3) for n in range(1, running + 1)]
        return policy.queue(queue, rows) == queue

    assert joins(1, 0, 0)  # nobody is disturbed
    assert not joins(1, 4, 0) and joins(2, 4, 0)  # 0.3 * 4 = 1.2
    assert joins(3, 10, 0) and not joins(2, 10, 0)
    assert not joins(1, 8, 19) and joins(1, 8, 20)
    assert joins(1, 8, 3, max_waiting_tokens=3) and not joins(8, 8, 0, waiting_served_ratio=1.1)


# --- starvation -----------------------------------------------------------------------------------------------------


def iterations_until_admitted(scheduler, most: int, level: int) -> int | None:
    """One request of that priority, on one row, while in every iteration a more urgent one (0) of one token arrives."""
    run = Simulation(scheduler, rows=1, tokens=8)
    run.add(2, 1, "urgent", 0)
    patient = run.add(3, 1, "patient", level)
    for now in range(most):
        run.step()
        if patient in run.finished:
            return now
        run.add(2, 1, "urgent", 0)
    return None


@pytest.mark.parametrize("ageing", [1, 3, 10])
@pytest.mark.parametrize("level", [1, 2, 5])
def test_whoever_waits_becomes_more_urgent_so_nobody_starves(ageing, level):
    # Every `ageing` iterations count as a level. After ageing * level of them it is as urgent as the newcomers and came
    # before them; those of its level that came before it are one at most, since one comes and one goes.
    waited = iterations_until_admitted(Priority(ageing=ageing), 1000, level)
    assert ageing * (level - 1) < waited <= ageing * level + 1


def test_without_ageing_an_unurgent_request_does_starve():
    # So that the bound above is the ageing's merit, not the workload's.
    assert iterations_until_admitted(Priority(ageing=10**9), 1000, 1) is None


@pytest.mark.parametrize("policy", ["fcfs", "balanced", "static"])
def test_in_order_of_arrival_nobody_starves_whatever_the_priorities(policy):
    assert iterations_until_admitted(make_scheduler(policy), 50, 5) <= 2


# --- small print ----------------------------------------------------------------------------------------------------


def test_a_budget_must_let_all_rows_decode():
    assert Budget(4, 4).tokens == 4
    with pytest.raises(ValueError, match="4 rows that all decode read 4 tokens"):
        Budget(4, 3)
    with pytest.raises(ValueError, match="at least 1 row"):
        Budget(0, 3)


def test_a_policy_is_taken_by_name_or_as_an_object():
    for name, policy in POLICIES.items():
        made = make_scheduler(name, mixed=False, chunked=True)
        assert type(made) is policy and not made.mixed and made.chunked
    own = FirstComeFirstServed()
    assert make_scheduler(own) is own
    with pytest.raises(ValueError, match=r"no policy 'sjf': choose one of static, fcfs"):
        make_scheduler("sjf")
    with pytest.raises(ValueError, match="ageing is a number of iterations of at least 1"):
        Priority(ageing=0)


def test_a_policy_of_your_own_is_one_method():
    class LastComeFirstServed(FirstComeFirstServed):
        def queue(self, waiting, running):
            return list(waiting)[::-1]

    assert order(LastComeFirstServed(), *REQUESTS) == "edcba"


def test_the_scheduler_knows_no_model():
    # Neither of the two files imports anything but the standard library and the other: a plan can drive a simulator.
    for name in ("scheduler", "sequence"):
        tree = ast.parse((Path(module.__file__).parent / f"{name}.py").read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {"." * node.level + node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert names == {"collections.abc", "dataclasses"} | ({"typing", ".sequence"} if name == "scheduler" else set())
