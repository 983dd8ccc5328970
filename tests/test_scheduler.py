"""The scheduler alone, without a model: plans for made-up sequences, which cost nothing to run.

Hypothesis invents arrivals, lengths, budgets and memories that are too small for all sequences. `Simulation` checks in
every iteration what each plan must respect. What a policy prefers is test_policies.py.
"""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.engine import POLICIES, FirstComeFirstServed
from tests.simulation import Simulation, TokenMemory

SWITCHES = [(mixed, chunked) for mixed in (True, False) for chunked in (True, False)]


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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_for_which_there_is_no_memory_is_not_overtaken_by_one_that_fits(policy):
    memory = TokenMemory(10)
    simulation = Simulation(policy, rows=3, memory=memory)
    memory.allocated["not a sequence"] = 5
    simulation.add(6, 3, "large"), simulation.add(2, 3, "small")
    assert simulation.step().chunks == [] and len(simulation.scheduler.waiting) == 2
    del memory.allocated["not a sequence"]
    assert [sequence.request_id for sequence in simulation.step().sequences] == ["large", "small"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_exceeds_the_token_budget_is_not_overtaken_by_one_that_fits(policy):
    simulation = Simulation(policy, rows=3, tokens=8, chunked=False)
    simulation.add(5, 3, "a"), simulation.add(6, 3, "b"), simulation.add(1, 3, "c")
    sequences = simulation.step().sequences  # 3 tokens are left: too few for b
    assert [sequence.request_id for sequence in sequences] == ["a"]
    assert [sequence.request_id for sequence in simulation.scheduler.waiting] == ["b", "c"]


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


@pytest.mark.parametrize("which", ["a running sequence", "a sequence twice"])
def test_a_policy_must_admit_waiting_sequences_once_each(which):
    class Wrong(FirstComeFirstServed):
        def order(self, waiting, running):
            return [*running[:1], *waiting] if which == "a running sequence" else [*waiting, *waiting]

    simulation = Simulation(Wrong(), rows=4)
    sequence = simulation.add(3, 9, "one")
    if which == "a running sequence":
        scheduler = simulation.scheduler
        scheduler.waiting.remove(sequence), scheduler.running.append(sequence)
        simulation.add(3, 9, "two")
    with pytest.raises(ValueError, match="The policy admits sequence 'one', which is not waiting"):
        simulation.scheduler.schedule()
