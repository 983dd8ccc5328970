"""The scheduler alone, without a model: plans for made-up sequences, which cost nothing to run.

Hypothesis invents arrivals, lengths, budgets and memories that are too small for all sequences. `Simulation` checks in
every iteration what each plan must respect. What a policy prefers is test_policies.py.
"""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.engine import POLICIES, FirstComeFirstServed, UnlimitedMemory
from tests.simulation import Simulation, TokenMemory, operations, run_without_a_model

SWITCHES = [(mixed, chunked) for mixed in (True, False) for chunked in (True, False)]


def chunks(plan) -> list[tuple]:
    return [(chunk.sequence, chunk.tokens) for chunk in plan.chunks]


@st.composite
def workloads(draw):
    rows = draw(st.integers(1, 5))
    tokens = draw(st.integers(rows, 24))
    mixed, chunked = draw(st.sampled_from(SWITCHES))
    longest = 24 if chunked else tokens - 1  # unchunked, a prompt that does not fit in an iteration can never run
    requests = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30),  # the iteration in which it arrives
                st.integers(1, max(1, longest)),  # prompt tokens
                st.integers(1, 12),  # max_tokens
                st.integers(-2, 2),  # priority
                st.sampled_from([1, 1, 1, 3]),  # samples
            ),
            min_size=1,
            max_size=12,
        )
    )
    if not chunked:  # nor may a sequence that is computed anew after a preemption have outgrown an iteration
        requests = [(at, p, max(1, min(m, tokens - p + 1)), *rest) for at, p, m, *rest in requests]
        requests = [request for request in requests if request[1] <= tokens]
    need = max((p + m - 1 for _, p, m, *_ in requests), default=1)
    memory = draw(st.one_of(st.none(), st.integers(need, 2 * need)))
    policy = draw(st.sampled_from(sorted(POLICIES)))
    return policy, rows, tokens, memory, mixed, chunked, sorted(requests)


@settings(max_examples=300, phases=[Phase.generate])
@given(workloads())
def test_no_budget_is_ever_exceeded_and_every_request_finishes(workload):
    policy, rows, tokens, memory, mixed, chunked, requests = workload
    memory = memory and TokenMemory(memory)
    simulation = Simulation(policy, rows, tokens, memory, mixed, chunked)
    arriving, names = list(enumerate(requests)), []
    for now in range(31):
        while arriving and arriving[0][1][0] <= now:
            name, (_, prompt, max_tokens, priority, samples) = arriving.pop(0)
            first = simulation.add(prompt, max_tokens, name, priority)
            for _ in range(samples - 1):
                simulation.add(prompt, max_tokens, name, priority, parent=first)
            names += [name] * samples
        simulation.step()
    simulation.run()
    assert sorted(sequence.request_id for sequence in simulation.finished) == names
    assert all(sequence.generated == sequence.max_tokens for sequence in simulation.finished)
    assert not memory or memory.allocated == {}


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_newest_sequence_loses_its_memory_is_computed_anew_and_finishes_and_the_runner_is_told_once():
    simulation = Simulation("fcfs", rows=3, tokens=16, memory=TokenMemory(12))
    scheduler = simulation.scheduler
    a, b, c = simulation.add(4, 4, "a"), simulation.add(4, 3, "b"), simulation.add(3, 4, "c")
    plan = simulation.step()
    assert plan.preempted == plan.released == []
    assert (a.computed, b.computed, c.computed) == (4, 4, 3)
    # 11 of 12 tokens are allocated, and each sequence needs one more: a gets it, and c is preempted for b.
    plan = simulation.step()
    assert chunks(plan) == [(a, 1), (b, 1)] and plan.preempted == plan.released == [c]
    assert (c.computed, c.generated, c.num_uncomputed_tokens) == (0, 1, 4)  # its new token is not lost
    assert list(scheduler.waiting) == [c] and scheduler.running == [a, b]
    # 10 are allocated. a and b advance, and b ends. Then c computes all of its tokens anew, generated ones included.
    plan = simulation.step()
    assert chunks(plan) == [(a, 1), (b, 1)] and plan.released == []
    assert simulation.finished == [b]
    plan = simulation.step()
    assert chunks(plan) == [(a, 1), (c, 4)] and plan.released == [b], "it has ended"
    assert simulation.run() == ["b", "a", "c"]
    assert simulation.num_preemptions == 1 and c.generated == 4
    assert simulation.step().released == [c] and simulation.step().released == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_for_which_there_is_no_memory_is_not_overtaken_by_one_that_fits(policy):
    memory = TokenMemory(10)
    simulation = Simulation(policy, rows=3, memory=memory)
    memory.allocated["not a sequence"] = 5
    simulation.add(6, 3, "large"), simulation.add(2, 3, "small")
    assert simulation.step().chunks == [] and len(simulation.scheduler.waiting) == 2
    del memory.allocated["not a sequence"]
    assert [one.request_id for one in simulation.step().sequences] == ["large", "small"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_exceeds_the_token_budget_is_not_overtaken_by_one_that_fits(policy):
    simulation = Simulation(policy, rows=3, tokens=8, chunked=False)
    simulation.add(5, 3, "a"), simulation.add(6, 3, "b"), simulation.add(1, 3, "c")
    assert [one.request_id for one in simulation.step().sequences] == ["a"]  # 3 tokens are left: too few for b
    assert [one.request_id for one in simulation.scheduler.waiting] == ["b", "c"]


def start(scheduler, computed):
    """Give waiting sequences their rows, with this many tokens computed."""
    for sequence, tokens in computed.items():
        assert scheduler.memory.allocate(sequence, tokens)
        sequence.computed = tokens
        scheduler.waiting.remove(sequence)
        scheduler.running.append(sequence)


def test_the_tokens_of_a_preempted_sequence_return_to_the_budget_of_the_same_plan():
    # b decodes first, since decodes are never delayed. Then a, which is older and still in its prefill, needs memory.
    # c, which is also in its prefill, gets the token that b would have computed.
    simulation = Simulation("fcfs", rows=3, tokens=8, memory=TokenMemory(20))
    a, c, b = simulation.add(12, 2, "a"), simulation.add(9, 2, "c"), simulation.add(6, 9, "b")
    start(simulation.scheduler, {a: 8, c: 2, b: 6})
    b.token_ids.append(0)
    plan = simulation.step()
    assert plan.preempted == [b] and chunks(plan) == [(a, 4), (c, 4)]


def test_cached_tokens_are_not_computed_and_cost_no_budget():
    class Cached(UnlimitedMemory):
        def cached_tokens(self, sequence):
            return len(sequence.token_ids) - 2

        def allocate(self, sequence, tokens):
            if sequence.computed == 0:
                sequence.computed = self.cached_tokens(sequence)
            return True

    simulation = Simulation("fcfs", rows=4, tokens=5, memory=Cached(), chunked=False)
    for name, prompt in (("a", 30), ("b", 20), ("c", 10)):
        simulation.add(prompt, 1, name)
    simulation.run()
    assert simulation.plans == [[("a", 2), ("b", 2)], [("c", 2)]]  # of 5 tokens, the third prompt would need 6


# --- the two switches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixed", "chunked", "plans"),
    [
        (True, True, ["a4 b2", "a1 b3 c2", "a1 b1 c1", "a1"]),  # an iteration takes all the tokens it can
        (True, False, ["a4", "a1 b5", "a1 b1 c3", "a1"]),  # a prompt waits until it fits
        (False, True, ["a4 b2", "a1", "b3 c3", "a1 b1", "a1"]),  # prefills and decodes take turns
        (False, False, ["a4", "a1", "b5", "a1 b1", "c3", "a1"]),  # and every prompt has a turn of its own here
    ],
)
def test_chunks_fill_an_iteration_and_unmixed_prefills_and_decodes_take_turns(mixed, chunked, plans):
    simulation = Simulation("fcfs", rows=3, tokens=6, mixed=mixed, chunked=chunked)
    simulation.add(4, 4, "a"), simulation.add(5, 2, "b"), simulation.add(3, 1, "c")
    simulation.run()
    assert [" ".join(f"{name}{tokens}" for name, tokens in plan) for plan in simulation.plans] == plans


# --- requests arrive and end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_samples_of_a_prompt_that_is_never_computed_join_the_queue_when_it_ends(steps):
    simulation = Simulation("fcfs", rows=1, tokens=4)
    first = simulation.add(9, 2, "request")
    second = simulation.add(9, 2, "request", parent=first)
    for _ in range(steps):
        simulation.step()
    simulation.scheduler.finish(first, "abort")
    assert list(simulation.scheduler.waiting) == [second]
    simulation.run()
    assert second.generated == 2 and simulation.scheduler.requests == {}


@pytest.mark.parametrize("which", ["a running sequence", "a sequence twice"])
def test_a_policy_must_admit_waiting_sequences_once_each(which):
    class Wrong(FirstComeFirstServed):
        def order(self, waiting, running):
            return [*running[:1], *waiting] if which == "a running sequence" else [*waiting, *waiting]

    simulation = Simulation(Wrong(), rows=4)
    one = simulation.add(3, 9, "one")
    if which == "a running sequence":
        scheduler = simulation.scheduler
        scheduler.waiting.remove(one), scheduler.running.append(one)
        simulation.add(3, 9, "two")
    with pytest.raises(ValueError, match="The policy admits sequence 'one', which is not waiting"):
        simulation.scheduler.schedule()


def test_a_sample_has_waited_since_its_request_was_added_so_that_later_requests_do_not_overtake_it():
    simulation = Simulation("priority", rows=1, tokens=4)
    first = simulation.add(4 * 60, 1, "first")
    second = simulation.add(4 * 60, 1, "first", parent=first)
    other = simulation.add(3, 1, "other")
    for _ in range(60):
        simulation.step()
    assert simulation.finished == [first] and list(simulation.scheduler.waiting) == [second, other]
    assert [one.waited for one in simulation.scheduler.waiting] == [60, 60]
    simulation.run()
    assert simulation.finished == [first, second, other]


# --- costs ------------------------------------------------------------------------------------------------------------


def busy(policy, waiting: int, memory=None, rows: int = 4) -> Simulation:
    """Return a simulation whose rows all decode, and in which many sequences wait."""
    simulation = Simulation(policy, rows=rows, memory=memory)
    for name in range(rows):
        simulation.add(2, 1000, f"running {name}")
    simulation.step(), simulation.step()
    for name in range(waiting):
        simulation.add(2, 10 + name % 5, name, priority=name % 3)
    return simulation


def iteration(simulation: Simulation):
    scheduler = simulation.scheduler
    plan = scheduler.schedule()
    scheduler.update(plan, run_without_a_model(plan))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_iteration_costs_no_more_when_ten_thousand_sequences_wait(policy):
    def cost(waiting: int) -> int:
        simulation = busy(policy, waiting)
        iteration(simulation)
        full = operations(lambda: iteration(simulation))
        simulation.scheduler.finish(simulation.scheduler.running[1], "abort")
        return full, operations(lambda: iteration(simulation))

    few, many = cost(20), cost(10_000)
    assert many[0] == few[0], "no row is free"
    assert many[1] <= 1.5 * few[1], "one sequence is admitted, which takes binary searches"
