"""A simulator plans exactly what an engine plans for the same requests, without a model."""

import pytest
from hypothesis import Phase, given, settings

from helpers import EngineConfig, SamplingParams
from helpers.engine import POLICIES
from helpers.simulator import Simulator, simulate
from tests.plan_equality import run_engine, run_simulator, workloads


def check_plans(workload):
    real = run_engine(workload)
    assert run_simulator(workload, real.outputs) == real


@pytest.mark.parametrize("policy", POLICIES)
def test_a_simulator_plans_what_an_engine_with_a_model_plans(policy):
    @settings(derandomize=True, deadline=None, max_examples=6, phases=[Phase.generate])
    @given(workloads(policies=(policy,)))
    def check(workload):
        check_plans(workload)

    check()


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=1000, phases=[Phase.generate])
@given(workloads())
def test_a_simulator_plans_what_an_engine_plans_for_a_thousand_workloads(workload):
    check_plans(workload)


def test_a_trace_of_requests_with_lengths_has_their_tokens_on_the_clock_of_their_arrivals():
    config = EngineConfig(max_batch_size=2)

    trace = simulate([([5, 6, 7], 3), ([8], 2), ([9, 9], 1)], config, arrivals=[10.0, 0.0, 1.5])

    assert trace.token_times == {1: [1.0, 2.0], 2: [3.0], 0: [11.0, 12.0, 13.0]}
    assert trace.prompt_tokens == 6


def test_requests_that_cannot_be_simulated_are_refused_before_any_runs():
    with pytest.raises(ValueError, match="2 requests, but 1 arrivals: give one for each"):
        simulate([([1], 2), ([2], 2)], arrivals=[0.0])
    with pytest.raises(ValueError, match="3 blocks of 16 tokens, and this engine has 2"):
        simulate([([1], 2), ([1] * 40, 2)], EngineConfig(num_blocks=2))


def test_time_passes_as_the_cost_function_says():
    simulator = Simulator(EngineConfig(max_batch_size=2), seconds=lambda plan: 0.5 + plan.tokens)

    simulator.generate([[1, 2, 3], [4]], SamplingParams(2))

    assert [(one.start, one.seconds) for one in simulator.trace.passes] == [(0.0, 4.5), (4.5, 2.5)]
    assert simulator.now() == 7.0


def test_a_simulator_refuses_text_and_requests_beyond_the_context():
    simulator = Simulator(context_length=8)

    with pytest.raises(ValueError, match="give the prompt as token ids, not as the text 'Once'"):
        simulator.generate(["Once"], SamplingParams(2))
    with pytest.raises(ValueError, match="8"):
        simulator.generate([[1] * 8], SamplingParams(2))
