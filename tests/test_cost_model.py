"""The cost model counts what a plan computes, and its fit finds the weights that the times were made with."""

import json
import random

import pytest

from helpers.engine import Chunk, EngineConfig, Plan, Sequence
from helpers.simulator import CostModel, Simulator
from helpers.simulator.__main__ import MACHINES
from helpers.simulator.cost_model import FEATURES, estimate, features
from helpers.simulator.fit import fit, measure, prediction_errors, recording, run_live, spread

WEIGHTS = {"iterations": 0.004, "tiles": 0.001, "tokens": 2e-5, "sequences": 1e-4, "keys": 1e-6, "pairs": 1e-8}


def decode(context: int) -> Chunk:
    sequence = Sequence("", [0] * context, 9)
    sequence.token_ids.append(0)
    sequence.computed = context
    return Chunk(sequence, 1)


def test_a_plan_is_counted_in_six_ways():
    prompt = Sequence("", [0] * 30, 9)
    prompt.computed = 10
    plan = Plan([decode(100), Chunk(prompt, 20)])

    assert features(plan) == (1, 2, 21, 2, 101 + 30, 20 * 10 + 20 * 21 // 2)
    assert features(Plan()) == (0, 0, 0, 0, 0, 0)
    assert CostModel(**WEIGHTS)(plan) == pytest.approx(0.004 + 2 * 0.001 + 21 * 2e-5 + 2e-4 + 131e-6 + 410e-8)


def random_counts(number: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    counts = []
    for tokens in (draw.randint(1, 256) for _ in range(number)):
        pairs = draw.choice([0, draw.randint(1, 90000)])
        counts.append((1, -(-tokens // 16), tokens, draw.randint(1, 32), draw.randint(32, 9000), pairs))
    return counts


def test_the_fit_recovers_the_weights():
    exact = CostModel(**WEIGHTS)

    fitted = fit([(counts, exact.of(*counts)) for counts in random_counts(100)])

    assert dict(zip(FEATURES, fitted.weights, strict=True)) == pytest.approx(WEIGHTS, rel=1e-6)


def test_no_weight_is_negative_even_where_that_would_fit_better():
    measured = [(counts, 0.01 - 1e-5 * counts[2] + 1e-4 * counts[3]) for counts in random_counts(100)]

    fitted = fit(measured)

    assert fitted.tokens == 0.0 == fitted.tiles
    assert fitted.iterations > 0 < fitted.sequences


def test_a_saved_model_is_read_again_with_what_it_describes(tmp_path):
    saved = CostModel(**WEIGHTS, about={"machine": "one core"})
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
        ("{}", "All weights are 0"),
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
    assert {1, 8} <= {one[3] for one in counts}
    assert any(one[5] for one in counts) and any(not one[5] for one in counts)
    assert max(one[2] for one in counts) == 64
    assert all(seconds > 0 for _, seconds in measured)
    assert not engine.has_unfinished_requests()


def test_a_live_run_is_compared_with_its_simulation():
    config = EngineConfig(max_batch_size=2)
    requests, arrivals = [([1, 2, 3], 4), ([4], 3), ([5], 2)], [0.0, 0.0, 0.05]

    runs = [run_live(Simulator(recording(config)), requests, arrivals) for _ in range(2)]

    assert len(runs[0].ttft) == 3 and min(runs[0].ttft) > 0
    assert runs[0].makespan > 0.05
    cost = fit(runs[0].iterations)
    errors = prediction_errors(cost, runs[0], config, requests, arrivals)
    assert 0 <= errors.iteration < 1 and errors.makespan < 1
    assert spread(runs[0], runs[0]) == type(errors)(0.0, 0.0, 0.0)
    assert len(runs[0].iterations) == 6
