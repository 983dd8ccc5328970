"""A simulator plans exactly what an engine plans for the same requests, without a model."""

import random

import pytest

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.engine import POLICIES, Scheduler
from helpers.simulator import Simulator


def run(make_engine, settings, requests):
    """Run requests (prompt, max_tokens, arrival) to the end; return the plans and the outputs' lengths."""
    plans = []

    class Recording(Scheduler):
        def schedule(self):
            plan = super().schedule()
            chunks = [(one.sequence.request_id, one.start, one.tokens, list(one.block_table)) for one in plan.chunks]
            plans.append((chunks, [sequence.request_id for sequence in plan.preempted], list(plan.block_copies)))
            return plan

    engine = make_engine(EngineConfig(**settings, scheduler_cls=Recording))
    prompts, limits, arrivals = zip(*requests, strict=True)
    outputs = engine.generate(list(prompts), [SamplingParams(limit, ignore_eos=True) for limit in limits], arrivals)
    return plans, [len(output.token_ids) for output in outputs]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_simulator_plans_what_an_engine_with_a_model_plans(policy, seed):
    draw = random.Random(seed)
    shared = [draw.randint(1, 400) for _ in range(9)]
    requests = [
        (shared[: draw.choice([0, 9])] + [draw.randint(1, 400) for _ in range(draw.randint(1, 30))],
         draw.randint(1, 20), draw.randint(0, 25))
        for _ in range(14)
    ]  # fmt: skip
    settings = {
        "max_batch_size": draw.randint(1, 5),
        "max_tokens_per_step": draw.randint(8, 60),
        "num_blocks": 16,
        "block_size": 4,
        "policy": policy,
        "mixed_batches": draw.random() < 0.7,
        "chunked_prefill": True,
        "prefix_caching": draw.random() < 0.7,
    }

    simulated = run(Simulator, settings, requests)

    assert simulated == run(lambda config: Engine(*load_model(), config), settings, requests)
    assert simulated[1] == [limit for _, limit, _ in requests]


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
