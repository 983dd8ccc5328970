"""Workloads are the same for the same seed, and fit into the embedded model's context."""

import pytest

from helpers import load_model, workloads


@pytest.mark.parametrize("workload", [workloads.mixed, workloads.budgets, workloads.pages, workloads.one_beginning])
def test_a_seed_gives_the_same_requests_again_and_another_seed_others(workload):
    assert workload(16, seed=1) == workload(16, seed=1)
    assert workload(16, seed=1) != workload(16, seed=2)


@pytest.mark.parametrize("workload", [workloads.mixed, workloads.budgets, workloads.pages])
def test_prompts_are_unequal_and_requests_fit_into_the_context(workload):
    model, tokenizer = load_model()
    requests = workload(64)
    lengths = [len(tokenizer(request.prompt)["input_ids"]) for request in requests]
    assert len({request.prompt for request in requests}) == 64
    assert len(set(lengths)) > 5
    assert workload is not workloads.pages or min(lengths) > 340
    assert all(n + request.max_tokens <= model.config.n_positions for n, request in zip(lengths, requests, strict=True))
