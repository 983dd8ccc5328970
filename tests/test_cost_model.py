"""The cost model counts what a plan computes, and reads and writes its coefficients."""

import pytest

from helpers.engine import Chunk, Plan, Sequence
from helpers.simulator import CostModel
from helpers.simulator.cost_model import MACHINES, estimate, features

COEFFICIENTS = {"iterations": 0.004, "tokens": 2e-5, "keys": 1e-6, "pairs": 1e-8}


def decode(context: int) -> Chunk:
    sequence = Sequence("", [0] * context, 9)
    sequence.token_ids.append(0)
    sequence.computed = context
    return Chunk(sequence, 1)


def test_a_plan_is_counted_in_four_ways():
    prompt = Sequence("", [0] * 30, 9)
    prompt.computed = 10
    plan = Plan([decode(100), Chunk(prompt, 20)])
    assert features(plan) == (1, 21, 101 + 30, 20 * 10 + 20 * 21 // 2)
    assert features(Plan([decode(100)])) == (1, 1, 101, 0)
    assert features(Plan()) == (0, 0, 0, 0)
    assert CostModel(**COEFFICIENTS)(plan) == pytest.approx(0.004 + 21 * 2e-5 + 131e-6 + 410e-8)


def test_a_saved_model_is_read_again_with_what_it_describes(tmp_path):
    saved = CostModel(**COEFFICIENTS, about={"machine": "one core"})
    saved.save(tmp_path / "cost.json")
    read = CostModel.load(tmp_path / "cost.json")
    assert read == saved
    assert read.about == {"machine": "one core"}


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "contains no cost model"),
        ("[" * 100_000, "contains no cost model"),
        ('{"tokens": 1, "about": 5}', "'about' must be an object, not 5"),
        (f'{{"tokens": 1{"0" * 400}}}', "'tokens' must be a number"),
        ('{"tokens": 1e308}', "'tokens' must be a number"),
        ('{"seconds": 1}', "seconds"),
        ('{"tokens": -1}', "'tokens' must be a number from 0 to 1e\\+09, not -1"),
        ("{}", "All coefficients are 0"),
    ],
)
def test_a_file_without_a_cost_model_is_refused_with_the_reason(tmp_path, content, reason):
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ValueError, match=reason):
        CostModel.load(tmp_path / "cost.json")


def test_the_machine_from_data_sheets_is_what_its_data_sheets_say():
    machine = CostModel.load(MACHINES["h100_llama_8b"])
    assert machine == estimate(8.03e9, 2, 2 * 2 * 32 * 1024, 32 * 4096, 3.35e12, 989e12)
    assert "data sheets" in machine.about["source"]
    assert machine.of(1, 1, 1, 0) == pytest.approx(0.0048, rel=0.01)  # 16 GB at 3.35 TB/s
