"""A simulator plans exactly what an engine plans for the same requests, without a model."""

import pytest
from hypothesis import Phase, given, settings

from helpers import SamplingParams
from helpers.engine import POLICIES
from helpers.simulator import Simulator
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


def test_a_prompt_that_cannot_be_simulated_is_refused_with_the_reason():
    simulator = Simulator(context_length=8)
    with pytest.raises(ValueError, match="give the prompt as token ids, not as the text 'Once'"):
        simulator.generate(["Once"], SamplingParams(2))
    with pytest.raises(ValueError, match="context is 8"):
        simulator.generate([[1] * 8], SamplingParams(2))
