"""The table of published figures is up to date, and the systems that it compares behave as their papers say."""

import math
from pathlib import Path

import pytest

from benchmarks.figures import __main__ as program
from benchmarks.figures import anyscale, distserve, orca, sarathi, vllm
from benchmarks.figures.replica import highest_rate, make_sequences, poisson, run, serve
from helpers.engine import EngineConfig

README = Path(program.__file__).with_name("README.md")


@pytest.mark.parametrize("paper", program.PAPERS)
def test_the_readme_has_the_figures_of_a_new_run(paper):
    lines = program.table({paper: program.PAPERS[paper].figures()}).splitlines()

    assert "\n".join(lines[2:]) in README.read_text(encoding="utf-8")
    assert all(line in README.read_text(encoding="utf-8") for line in lines[:2])


# --- a replica in simulated time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "arrivals", "times"),
    [
        ([3, 1], [0.0, 1.5], [[1.0, 2.0, 3.0], [3.0]]),  # the first iteration after its arrival
        ([1, 1], [0.0, 10.0], [[1.0], [11.0]]),  # an idle replica waits
    ],
)
def test_a_request_is_scheduled_in_the_first_iteration_after_its_arrival(outputs, arrivals, times):
    served = serve(make_sequences([3, 3], outputs, arrivals), EngineConfig(max_batch_size=2))

    assert [timed.token_times for timed in served] == times


def test_poisson_arrivals_have_the_stated_rate_and_another_rate_only_scales_them():
    slow, fast = poisson(50, 2.0), poisson(50, 8.0)

    assert slow[0] == 0 and math.isclose(slow[-1], 49 / 2)
    assert all(math.isclose(one, 4 * other) for one, other in zip(slow, fast, strict=True))


def test_the_highest_rate_that_meets_a_limit_is_found_within_a_few_percent():
    assert 0.95 * 5 < highest_rate(lambda rate: rate <= 5, 1, 16) <= 5


# --- what the papers compare ----------------------------------------------------------------------------------------


def test_a_static_batch_takes_as_many_iterations_as_its_longest_output_and_memory_limits_how_many_run_at_once():
    assert anyscale.iterations([5, 1, 2, 7, 3, 1], "static", rows=4) == 7 + 3
    assert anyscale.iterations([5, 1, 2, 7, 3, 1], "fcfs", rows=4) == 7
    assert anyscale.iterations([32] * 8, "fcfs", 256, tokens=8 * 544) == 32
    assert anyscale.iterations([32] * 8, "fcfs", 256, tokens=2 * 544) == 4 * 32


def test_fastertransformer_computes_prompts_together_up_to_the_shortest_and_then_token_by_token():
    scheduler = orca.FasterTransformer(EngineConfig(max_batch_size=2, max_tokens_per_step=100, policy="static"))
    sequences = make_sequences([5, 3, 4], [2, 1, 1])

    plans = [[chunk.tokens for chunk in plan.chunks] for plan in run(sequences, scheduler)]

    assert plans == [[3, 3], [1], [1], [1], [4]]
    assert scheduler.batches == [sequences[:2], sequences[2:]]


def test_a_request_of_a_static_batch_is_returned_with_the_longest_one():
    static = orca.latencies(make_sequences([3, 3], [1, 5]), 2, is_static=True)
    continuous = orca.latencies(make_sequences([3, 3], [1, 5]), 2, is_static=False)

    assert static[0] == pytest.approx(5 * static[1])
    assert continuous == pytest.approx([1.03, 5.05 / 5])  # 6 tokens, then 4 times 1


def test_a_buddy_allocator_splits_pieces_and_joins_them_again():
    memory = vllm.BuddyMemory(24, lambda sequence: sequence.prompt_tokens)
    whole = set(memory._free)
    sequences = make_sequences([3, 5, 8, 4, 1], [1] * 5)

    allocated = [memory.allocate(sequence, sequence.prompt_tokens) for sequence in sequences]

    assert whole == {(0, 16), (16, 8)}
    assert allocated == [True, True, True, True, False]  # 4 + 8 + 8 + 4 slots
    assert memory.allocate(sequences[0], 1), "what it has reserved is its own"
    taken = [set(range(start, start + size)) for start, size in memory._held.values()]
    assert sum(map(len, taken)) == len(set().union(*taken)) == 24, "pieces overlap"
    for sequence in sequences[:4]:
        memory.free(sequence)
    assert memory._free == whole


def test_a_reservation_is_made_once_and_holds_all_tokens_of_a_sequence():
    for name, reserved in vllm.RESERVATIONS.items():
        for sequence in vllm.requests(50):
            longest = sequence.prompt_tokens + sequence.max_tokens
            assert longest <= reserved(sequence) <= vllm.LONGEST, name


def test_with_chunks_no_more_tokens_than_the_budget_are_computed_between_two_tokens(monkeypatch):
    monkeypatch.setattr(sarathi, "REQUESTS", 20)

    assert sarathi.measure(sarathi.SETTINGS["both"]).stall <= sarathi.BUDGET
    assert sarathi.measure(sarathi.SETTINGS["mixed"]).stall > sarathi.BUDGET


def test_a_prefill_delays_the_decodes_of_the_same_gpu_but_not_those_of_another():
    alone, crowded = [0.0], [0.0, 0.5, 0.6, 0.7]

    def last_of_the_first(result):
        return next(one.last_token for one in result.requests if one.arrival == 0.0)

    prefill = distserve.COST.iterations + distserve.PROMPT * distserve.COST.tokens
    one = [last_of_the_first(distserve.on_one_replica(arrivals)) for arrivals in (alone, crowded)]
    two = [last_of_the_first(distserve.on_separate_replicas(arrivals, 1)) for arrivals in (alone, crowded)]
    assert one[1] > one[0] + 3 * prefill
    assert two[1] < two[0] + prefill
