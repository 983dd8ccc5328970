"""The cost model counts what a plan computes, and its fit finds the coefficients that the times were made with."""

import random
import statistics
from dataclasses import asdict

import pytest

from helpers.engine import Chunk, EngineConfig, Plan, Sequence
from helpers.simulator import CostModel, Simulator
from helpers.simulator import fit as fit_module
from helpers.simulator.__main__ import MACHINES
from helpers.simulator.cost_model import FEATURES, estimate, features
from helpers.simulator.fit import fit, held_out, measure, prediction_errors, run_live, timing_config

COEFFICIENTS = {"iterations": 0.004, "prefills": 0.001, "tokens": 2e-5, "sequences": 1e-4, "keys": 1e-6, "pairs": 1e-8}
SMALL = EngineConfig(max_batch_size=8, max_tokens_per_step=64)


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


def test_each_adapter_of_an_iteration_is_read_once():
    chunks = [decode(100) for _ in range(4)]
    for chunk, adapter in zip(chunks, ["a", "b", "a"], strict=False):
        chunk.sequence.request.notes["adapters"] = adapter
    assert CostModel(iterations=1, adapters=0.25)(Plan(chunks)) == 1 + 2 * 0.25
    assert estimate(1e9, 2, 1, 1, 1e12, 1e12, adapter_bytes=4e9).adapters == 4e-3


def test_the_first_tokens_of_an_iteration_can_be_free():
    cost = CostModel(iterations=1.0, tokens=0.5, free_tokens=8)
    assert [cost.seconds_for(1, 0, tokens, 1, 0, 0) for tokens in (1, 8, 9, 10)] == [1.0, 1.0, 1.5, 2.0]


def test_a_split_model_is_read_and_computed_in_shares_and_pays_for_its_sums():
    whole = CostModel(**COEFFICIENTS, adapters=0.2, free_tokens=8, sums=65, sum_bytes=8192.0, about={"model": "one"})
    assert whole.split(1, 1e-5, 1e9) == whole
    split = whole.split(4, 1e-5, 1e9)
    link = 65 * 8192 * 2 * 3 / 4 / 1e9  # seconds per token: a ring of 4 sends each byte 1.5 times
    each = 0.004 / 4 + 65e-5 + 2 * 1e-4 + 300 * 1e-6 / 4
    assert split.seconds_for(1, 0, 8, 2, 300, 0) == pytest.approx(each + 8 * link)
    with_prefill = each + 0.001 + 12 * 2e-5 / 4 + 20 * link + 500 * 1e-8 / 4
    assert split.seconds_for(1, 1, 20, 2, 300, 500) == pytest.approx(with_prefill)
    assert (split.adapters, split.about) == (0.05, {"model": "one"})


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
    fitted = fit([(counts, exact.seconds_for(*counts)) for counts in random_counts(100)])
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
        ("{", "contains no cost model"),
        ("[" * 100_000, "contains no cost model"),
        (f'{{"tokens": 1{"0" * 400}}}', "'tokens' must be a number"),
        ('{"seconds": 1}', "seconds"),
        ('{"tokens": -1}', "'tokens' must be a number from 0 to 1e\\+09, not -1"),
        ('{"tokens": 1, "free_tokens": -1}', "'free_tokens' must be an integer from 0 to 1e\\+09, not -1"),
        ("{}", "All coefficients are 0"),
    ],
)
def test_a_file_without_a_cost_model_is_refused_with_the_reason(tmp_path, content, reason):
    (tmp_path / "cost.json").write_text(content)
    with pytest.raises(ValueError, match=reason):
        CostModel.load(tmp_path / "cost.json")


def test_the_machine_from_data_sheets_is_what_its_data_sheets_say():
    machine = CostModel.load(MACHINES["h100_llama_8b"])
    assert machine == estimate(8.03e9, 2, 2 * 2 * 32 * 1024, 32 * 4096, 3.35e12, 989e12, 0, 2 * 32 + 1, 2 * 4096)
    assert "data sheets" in machine.about["source"]
    assert machine.seconds_for(1, 1, 1, 1, 0, 0) == pytest.approx(0.0048, rel=0.01)  # 16 GB at 3.35 TB/s


class SimulatedTime:
    """Replaces the module `time` by the clock of a simulator, on which an iteration takes what a cost model says."""

    def __init__(self, simulator: Simulator):
        self.runner = simulator.runner

    def perf_counter(self) -> float:
        return self.runner.time

    def sleep(self, seconds: float) -> None:
        self.runner.time += seconds + 1e-12  # the sum may be rounded down, but the pause must not be too short


@pytest.fixture
def engine(monkeypatch) -> Simulator:
    simulator = Simulator(timing_config(SMALL), CostModel(**COEFFICIENTS))
    monkeypatch.setattr(fit_module, "time", SimulatedTime(simulator))
    return simulator


def test_a_machine_that_takes_the_time_of_a_cost_model_is_fitted_and_predicted_exactly(engine):
    cost = fit(measure(engine, context=400, count=50))
    assert dict(zip(FEATURES, cost.coefficients, strict=True)) == pytest.approx(COEFFICIENTS, rel=1e-6)
    requests, arrivals = held_out(cost, SMALL, 400, load=0.8, count=50)
    live = run_live(engine, requests, arrivals)
    errors = prediction_errors(cost, live, SMALL, requests, arrivals)
    assert max(asdict(errors).values()) < 1e-6


@pytest.mark.parametrize(
    "disturb", [lambda draw: draw.choice([1, 1, 1, 1, 2]), lambda draw: draw.lognormvariate(0, 0.3)]
)
def test_disturbed_iterations_hardly_change_the_fit(disturb):
    exact, draw = CostModel(**COEFFICIENTS, free_tokens=8), random.Random(0)
    measured = random_counts(500)
    times = [exact.seconds_for(*counts) * draw.uniform(0.98, 1.02) * disturb(draw) for counts in measured]
    fitted = fit(list(zip(measured, times, strict=True)))
    errors = [fitted.seconds_for(*counts) / exact.seconds_for(*counts) - 1 for counts in random_counts(2000)]
    assert abs(statistics.median(errors)) < 0.02
