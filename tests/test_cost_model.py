"""The cost model counts what a plan computes, and its fit finds the coefficients that the times were made with."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from helpers.engine import Chunk, EngineConfig, Plan, Sequence
from helpers.simulator import CostModel, SimulatedRunner, Simulator
from helpers.simulator.__main__ import MACHINES
from helpers.simulator.cost_model import FEATURES, estimate, features
from helpers.simulator.fit import fit, held_out, measure, prediction_errors, recording, run_live, spread
from helpers.simulator.timing import Situation, draw_situations, time_rounds

COEFFICIENTS = {"iterations": 0.004, "prefills": 0.001, "tokens": 2e-5, "sequences": 1e-4, "keys": 1e-6, "pairs": 1e-8}


def decode(context: int) -> Chunk:
    sequence = Sequence("", [0] * context, 9)
    sequence.token_ids.append(0)
    sequence.computed = context
    return Chunk(sequence, 1)


def test_a_plan_is_counted_in_six_ways():
    prompt = Sequence("", [0] * 30, 9)
    prompt.computed = 10
    plan = Plan([decode(100), Chunk(prompt, 20)])

    assert features(plan) == (1, 1, 21, 2, 101 + 30, 20 * 10 + 20 * 21 // 2)
    assert features(Plan([decode(100)])) == (1, 0, 1, 1, 101, 0)
    assert features(Plan()) == (0, 0, 0, 0, 0, 0)
    assert CostModel(**COEFFICIENTS)(plan) == pytest.approx(0.004 + 0.001 + 21 * 2e-5 + 2e-4 + 131e-6 + 410e-8)


def test_the_first_tokens_of_an_iteration_can_be_free():
    cost = CostModel(iterations=1.0, tokens=0.5, free_tokens=8)

    assert [cost.of(1, 0, tokens, 1, 0, 0) for tokens in (1, 8, 9, 10)] == [1.0, 1.0, 1.5, 2.0]


def random_counts(number: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    counts = []
    for tokens in (draw.randint(1, 256) for _ in range(number)):
        pairs = draw.choice([0, draw.randint(1, 90000)])
        counts.append((1, pairs > 0, tokens, draw.randint(1, 32), draw.randint(32, 9000), pairs))
    return counts


@pytest.mark.parametrize("free_tokens", [0, 8, 64])
def test_the_fit_recovers_the_coefficients(free_tokens):
    exact = CostModel(**COEFFICIENTS, free_tokens=free_tokens)

    fitted = fit([(counts, exact.of(*counts)) for counts in random_counts(100)])

    assert fitted.free_tokens == free_tokens
    assert dict(zip(FEATURES, fitted.coefficients, strict=True)) == pytest.approx(COEFFICIENTS, rel=1e-6)


def test_no_coefficient_is_negative_even_where_that_would_fit_better():
    measured = [(counts, 0.01 - 1e-5 * counts[2] + 1e-4 * counts[3]) for counts in random_counts(100)]

    fitted = fit(measured)

    assert fitted.tokens == 0.0
    assert fitted.iterations > 0 < fitted.sequences


def test_a_saved_model_is_read_again_with_what_it_describes(tmp_path):
    saved = CostModel(**COEFFICIENTS, about={"machine": "one core"})
    saved.save(tmp_path / "cost.json")

    read = CostModel.load(tmp_path / "cost.json")

    assert read == saved
    assert read.about == {"machine": "one core"}


@pytest.mark.parametrize(
    "content, reason",
    [
        ("[]", "contains no cost model"),
        ("{", "contains no cost model"),
        ('{"seconds": 1}', "seconds"),
        ('{"tokens": -1}', "'tokens' must be a number from 0 to 1e\\+09, not -1"),
        ('{"tokens": "1"}', "must be a number"),
        ('{"tokens": 1, "free_tokens": -1}', "'free_tokens' must be an integer of at least 0, not -1"),
        ("{}", "All coefficients are 0"),
    ],
)
def test_a_file_without_a_cost_model_is_refused_with_the_reason(tmp_path, content, reason):
    (tmp_path / "cost.json").write_text(content)

    with pytest.raises(ValueError, match=reason):
        CostModel.load(tmp_path / "cost.json")


def test_a_model_can_be_written_by_hand(tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps({"iterations": 0.008, "tokens": 5e-5}))

    assert CostModel.load(tmp_path / "gpu.json").of(1, 1, 100, 1, 1, 0) == pytest.approx(0.013)


def test_the_machine_from_data_sheets_is_what_its_data_sheets_say():
    machine = CostModel.load(MACHINES["h100_llama_8b"])

    assert machine == estimate(8.03e9, 2, 2 * 2 * 32 * 1024, 32 * 4096, 3.35e12, 989e12)
    assert "data sheets" in machine.about["source"]
    assert machine.of(1, 1, 1, 1, 0, 0) == pytest.approx(0.0048, rel=0.01)  # 16 GB at 3.35 TB/s


def test_measured_iterations_cover_one_row_and_all_rows_prefills_and_decodes():
    config = EngineConfig(max_batch_size=8, max_tokens_per_step=64, num_blocks=200)
    engine = Simulator(recording(config))

    measured = measure(engine, context=100, iterations=100, repeats=2)

    counts = [counts for counts, _ in measured]
    assert len(counts) == 100
    decodes, prefills = ([one for one in counts if one[1] == prefills] for prefills in (0, 1))
    assert {one[3] for one in decodes} == set(range(1, 9))
    assert max(one[4] / one[3] for one in decodes) > 60 and min(one[4] / one[3] for one in decodes) < 10
    assert {one[2] == 64 for one in prefills} == {True, False}
    assert all(seconds > 0 for _, seconds in measured)
    assert not engine.has_unfinished_requests()


class CountingRunner:
    """A simulated runner with a pool of blocks, which counts the tokens that it computes."""

    def __init__(self, runner: SimulatedRunner):
        self.runner, self.computed = runner, []
        self.pool = SimpleNamespace(layers={0: (torch.zeros(1, 64, 2), torch.zeros(1, 64, 2))})

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def run(self, plan, clock):
        self.computed.append(plan.tokens)
        return self.runner.run(plan, clock)


def test_only_the_timed_iterations_and_a_decode_before_are_computed_and_all_memory_has_been_written_to():
    config = EngineConfig(max_batch_size=4, max_tokens_per_step=32, num_blocks=100)
    engine = Simulator(recording(config))
    engine.runner = runner = CountingRunner(engine.runner)
    situations = [Situation((50, 20)), Situation((50,), (40, 7), earlier=1)]

    timed = time_rounds(engine, situations, rounds=3)

    assert [counts for counts, _ in timed] == [
        (1, 0, 2, 2, 52 + 22, 0),
        (1, 1, 1 + 9 + 7, 3, 53 + 40 + 7, 9 * 31 + 9 * 10 // 2 + 7 * 8 // 2),
    ]
    assert [len(seconds) for _, seconds in timed] == [3, 3]
    assert [tokens for tokens in runner.computed if tokens] == [1] + [2, 2, 1, 17] * 4
    assert all(tensor.all() for tensor in runner.pool.layers[0])
    assert engine.runner is runner


def test_a_situation_is_possible_whatever_the_rows_and_the_context():
    for rows, budget, context in ((1, 1, 20), (2, 2, 1024), (64, 64, 30), (16, 256, 1024)):
        for situation in draw_situations(1000, rows, budget, context):
            assert 1 <= len(situation.contexts + situation.prompts) <= rows
            assert all(1 <= length <= context - 3 - situation.earlier for length in situation.contexts)
            assert all(1 <= length <= context - 2 for length in situation.prompts)


def test_held_out_requests_fit_into_the_seconds_that_a_run_may_take():
    cost, config = CostModel(iterations=0.05), EngineConfig(max_batch_size=4)

    requests, arrivals = held_out(cost, config, 100, load=0.5, count=300, seconds=20)

    assert len(requests) == len(arrivals) < 300
    assert 10 < arrivals[-1] < 30


def test_a_live_run_is_compared_with_its_simulation():
    config = EngineConfig(max_batch_size=2)
    requests, arrivals = [([1, 2, 3], 4), ([4], 3), ([5], 2)], [0.0, 0.0, 0.05]

    runs = [run_live(Simulator(recording(config)), requests, arrivals) for _ in range(2)]

    assert len(runs[0].ttft) == 3 and min(runs[0].ttft) > 0
    assert runs[0].makespan > 0.05
    cost = fit(runs[0].iterations)
    errors = prediction_errors(cost, runs[0], config, requests, arrivals)
    assert 0 <= errors.iteration < 1 and errors.makespan < 1
    assert spread(runs[0], runs[0]) == type(errors)(0.0, 0.0, 0.0, 0.0)
    assert len(runs[0].iterations) == 6
