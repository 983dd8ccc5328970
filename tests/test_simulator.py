"""A simulator plans exactly what an engine plans for the same requests, without a model."""

import random

import pytest
from hypothesis import Phase, given, settings

from helpers import EngineConfig, SamplingParams
from helpers.engine import POLICIES, Scheduler
from helpers.simulator import CostModel, Simulator, simulate
from tests.plan_equality import run_engine, run_simulator, workloads


def check_plans(workload):
    real = run_engine(workload)
    assert run_simulator(workload, real.outputs) == real


@pytest.mark.parametrize("policy", POLICIES)
def test_a_simulator_plans_what_an_engine_with_a_model_plans(policy):
    @settings(max_examples=6, phases=[Phase.generate])
    @given(workloads(policies=(policy,)))
    def check(workload):
        check_plans(workload)

    check()


@pytest.mark.slow
@settings(max_examples=150, phases=[Phase.generate])
@given(workloads())
def test_a_simulator_plans_what_an_engine_plans_for_150_workloads(workload):
    check_plans(workload)


def test_a_trace_of_requests_with_lengths_has_their_tokens_on_the_clock_of_their_arrivals():
    config = EngineConfig(max_batch_size=2)
    trace = simulate([([5, 6, 7], 3), ([8], 2), ([9, 9], 1)], config, arrivals=[10.0, 0.0, 1.5])
    assert trace.token_times == {1: [1.0, 2.0], 2: [3.0], 0: [11.0, 12.0, 13.0]}
    assert trace.prompt_tokens == 6


def random_requests(draw: random.Random) -> tuple[list[tuple[list[int], int]], EngineConfig, list[float]]:
    """Return requests, a configuration with room for each of them, and arrivals."""
    requests = [
        ([draw.randint(0, 3) for _ in range(draw.randint(1, 30))], draw.randint(1, 20))
        for _ in range(draw.randint(1, 9))
    ]
    config = EngineConfig(
        max_batch_size=draw.randint(1, 5),
        max_tokens_per_step=draw.randint(50, 80),
        num_blocks=draw.choice([None, 13, 30]),
        block_size=4,
        policy=draw.choice(list(POLICIES)),
        mixed_batches=draw.random() < 0.7,
        chunked_prefill=draw.random() < 0.7,
        prefix_caching=draw.random() < 0.5,
        speculative=draw.choice([None, "ngram"]),
    )
    return requests, config, sorted(draw.choice([0.0, draw.uniform(0, 30)]) for _ in requests)


@pytest.mark.parametrize("seed", range(50))
def test_the_trace_of_simulate_is_that_of_a_simulator_with_texts_and_outputs(seed):
    requests, config, arrivals = random_requests(random.Random(seed))
    seconds = CostModel(0.3, tokens=0.01, keys=1e-3) if seed % 2 else lambda plan: 0.3 + 0.01 * plan.tokens
    simulator = Simulator(config, seconds)
    for number, ((prompt, length), arrival) in enumerate(zip(requests, arrivals, strict=True)):
        simulator.run_until(arrival)
        simulator.add_request(prompt, SamplingParams(length, ignore_eos=True), number)
    simulator.run_until()
    trace = simulate(requests, config, arrivals, seconds)
    assert trace.passes == simulator.trace.passes
    assert len(trace.token_times) == len(requests)


def test_iterations_that_only_decode_are_planned_one_by_one_only_by_a_scheduler_of_ones_own():
    def planned(scheduler_cls, monkeypatch) -> int:
        calls, schedule = [], Scheduler.schedule
        monkeypatch.setattr(Scheduler, "schedule", lambda self: calls.append(self) or schedule(self))
        config = EngineConfig(scheduler_cls=scheduler_cls)
        trace = simulate([([1] * 5, 200), ([1] * 7, 300)], config, [0.0, 20.0], CostModel(iterations=1.0))
        assert trace.steps == 320
        return len(calls)

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert planned(None, monkeypatch) < 16
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert planned(type("Own", (Scheduler,), {}), monkeypatch) == 320


def test_an_error_of_the_cost_function_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        simulate([([1], 2)], seconds=lambda plan: 1 / 0)


def test_requests_that_cannot_be_simulated_are_refused_before_any_runs():
    with pytest.raises(ValueError, match="2 requests, but 1 arrivals: give one for each"):
        simulate([([1], 2), ([2], 2)], arrivals=[0.0])
    with pytest.raises(ValueError, match="3 blocks of 16 tokens, and this engine has 2"):
        simulate([([1], 2), ([1] * 40, 2)], EngineConfig(num_blocks=2))
    simulator = Simulator(context_length=8)
    with pytest.raises(ValueError, match="give the prompt as token ids, not as the text 'Once'"):
        simulator.generate(["Once"], SamplingParams(2))
    with pytest.raises(ValueError, match="context is 8"):
        simulator.generate([[1] * 8], SamplingParams(2))
