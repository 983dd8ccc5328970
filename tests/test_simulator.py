"""A simulator plans exactly what an engine plans for the same requests, without a model.

A workload is a script by iterations: requests arrive and are aborted before numbered iterations. So both engines see
the same script, however long an iteration takes.
"""

import itertools
from collections.abc import Callable
from functools import cache
from operator import add
from typing import NamedTuple

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.engine import POLICIES, EngineCore, Scheduler
from helpers.models import eos_token_ids
from helpers.simulator import CostModel, Simulator, simulate

PREFIX = [17, 250, 33, 9, 301, 77, 120, 45, 260]  # two blocks and a token
LAST = 15  # the last iteration before which a request arrives
NEVER = 10**6


class Request(NamedTuple):
    """A request that arrives before an iteration, and is aborted when it has had as many as `patience`."""

    iteration: int
    prompt: list[int]
    max_tokens: int
    priority: int
    ignore_eos: bool
    patience: int


Workload = tuple[dict, list[Request]]  # the settings of an engine, and its requests


class OneTooFew:
    """A proposer that guesses that each token is the one before, less 1: it is sometimes right by accident."""

    def propose(self, token_ids, k):
        return [max(0, token_ids[-1] - 1)] * (k - 1)


@st.composite
def workloads(draw, policies=tuple(POLICIES)) -> Workload:
    """Draw settings and requests that an engine with these settings accepts."""
    token_ids = st.integers(1, 400) | st.integers(1, 3)  # few different ones, too, so that n-grams are found
    own = st.lists(token_ids, min_size=1, max_size=12)
    strategy = st.builds(
        Request,
        iteration=st.integers(0, LAST),
        prompt=st.builds(add, st.sampled_from([[], [], PREFIX[:8], PREFIX]), own),
        max_tokens=st.integers(1, 16),
        priority=st.integers(-2, 2),
        ignore_eos=st.booleans(),
        patience=st.just(NEVER) | st.just(NEVER) | st.integers(0, 20),
    )
    requests = draw(st.lists(strategy, min_size=1, max_size=12))
    rows, chunked = draw(st.integers(1, 5)), draw(st.booleans())
    need = max(-(-(len(request.prompt) + request.max_tokens) // 4) for request in requests)
    options = {
        "max_batch_size": rows,
        "max_tokens_per_step": draw(st.integers(rows, 24) if chunked else st.integers(40, 60)),
        "num_blocks": draw(st.integers(need, need + 4)),
        "block_size": 4,
        "policy": draw(st.sampled_from(policies)),
        "mixed_batches": draw(st.booleans()),
        "chunked_prefill": chunked,
        "prefix_caching": draw(st.booleans()),
        "speculative": draw(st.sampled_from([None, None, "ngram", OneTooFew()])),
        "num_speculative_tokens": 3,
    }
    return options, requests


def run(make_engine: Callable[[EngineConfig], EngineCore], workload: Workload) -> tuple[list, dict]:
    """Run a workload to its end; return what was planned in each iteration, and the outputs by request."""
    options, requests = workload
    plans, outputs = [], {}

    class Recording(Scheduler):
        def schedule(self):
            plan = super().schedule()
            for chunk in plan.chunks:
                work = chunk.sequence.label, chunk.start, chunk.tokens, chunk.samples_token
                plans.append((*work, [*chunk.draft_token_ids], [*chunk.block_table]))
            left = [[sequence.label for sequence in group] for group in (plan.preempted, plan.released)]
            plans.append((*left, list(plan.block_copies)))
            return plan

    engine = make_engine(EngineConfig(**options, scheduler_cls=Recording))
    for iteration in itertools.count():
        for number, request in enumerate(requests):
            if request.iteration == iteration:
                params = SamplingParams(request.max_tokens, ignore_eos=request.ignore_eos)
                engine.add_request(request.prompt, params, number, request.priority)
            if request.iteration + request.patience == iteration:
                engine.abort_request(number)
        for output in engine.step():
            outputs[output.request_id] = output.token_ids, output.finish_reason
        if iteration > LAST and not engine.has_unfinished_requests():
            return plans, outputs
        assert iteration < 3000, "a sequence waits forever"


@cache
def eos() -> frozenset[int]:
    return frozenset(eos_token_ids(*load_model()))


def check_plans(workload: Workload) -> None:
    """Run a workload on the embedded model, and then on a simulator that generates the same tokens."""
    real, following = run(lambda config: Engine(*load_model(), config), workload), {}
    for number, (token_ids, _) in real[1].items():
        known = tuple(workload[1][number].prompt)
        for token_id in token_ids:
            assert following.setdefault(known, token_id) == token_id, "the model is not deterministic"
            known += (token_id,)

    def make_simulator(config: EngineConfig) -> Simulator:
        return Simulator(config, next_token=lambda token_ids: following[tuple(token_ids)], eos_token_ids=eos())

    assert run(make_simulator, workload) == real


@pytest.mark.parametrize("policy", POLICIES)
def test_a_simulator_plans_what_an_engine_with_a_model_plans(policy):
    check = given(workloads(policies=(policy,)))(check_plans)
    settings(max_examples=6, phases=[Phase.generate])(check)()


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


@pytest.mark.parametrize("seconds", [CostModel(0.3, tokens=0.01, keys=1e-3), lambda plan: 0.3 + 0.01 * plan.tokens])
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
@example(({"speculative": OneTooFew()}, [Request(0, [5], 16, 0, True, NEVER)]), False)  # all of its drafts are right
@given(workloads(), st.booleans())
def test_the_trace_of_simulate_is_that_of_a_simulator_with_texts_and_outputs(seconds, workload, has_blocks):
    options, requests = workload
    config = EngineConfig(**options | ({} if has_blocks else {"num_blocks": None}))
    requests = sorted((2.0 * request.iteration, request.prompt, request.max_tokens) for request in requests)
    simulator = Simulator(config, seconds)
    for number, (arrival, prompt, length) in enumerate(requests):
        simulator.run_until(arrival)
        simulator.add_request(prompt, SamplingParams(length, ignore_eos=True), number)
    simulator.run_until()
    trace = simulate([request[1:] for request in requests], config, [request[0] for request in requests], seconds)
    assert trace.passes == simulator.trace.passes
    assert len(trace.token_times) == len(requests)


@pytest.mark.parametrize("cls, expected", [(None, range(16)), (type("Own", (Scheduler,), {}), [320])])
def test_iterations_that_only_decode_are_planned_one_by_one_only_by_a_scheduler_of_ones_own(monkeypatch, cls, expected):
    calls, schedule = [], Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: calls.append(self) or schedule(self))
    config = EngineConfig(scheduler_cls=cls)
    trace = simulate([([1] * 5, 200), ([1] * 7, 300)], config, [0.0, 20.0], CostModel(iterations=1.0))
    assert trace.steps == 320 and len(calls) in expected


def test_requests_that_cannot_be_simulated_are_refused_before_any_runs():
    with pytest.raises(ValueError, match="2 requests, but 1 arrivals: give one for each"):
        simulate([([1], 2), ([2], 2)], arrivals=[0.0])
    with pytest.raises(ValueError, match="3 blocks of 16 tokens, and this engine has 2"):
        simulate([([1], 2), ([1] * 40, 2)], EngineConfig(num_blocks=2))
    with pytest.raises(ValueError, match="give the prompt as token ids, not as the text 'Once'"):
        Simulator().generate(["Once"], SamplingParams(2))
