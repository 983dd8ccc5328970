"""Workloads are what their names say, and the same for the same seed."""

import pytest

from helpers import load_model, workloads


def test_the_race_has_a_long_request_in_every_eight():
    budgets = [request.max_tokens for request in workloads.race()]
    assert len(budgets) == 32
    assert budgets.count(100) == 4
    assert [i for i, budget in enumerate(budgets) if budget == 100] == [0, 8, 16, 24]
    assert sum(budgets) == 680


@pytest.mark.parametrize("workload", [workloads.mixed, workloads.budgets, workloads.pages])
def test_a_seed_gives_the_same_requests_again_and_another_seed_others(workload):
    assert workload(20, seed=1) == workload(20, seed=1)
    assert workload(20, seed=1) != workload(20, seed=2)


@pytest.mark.parametrize("workload", [workloads.mixed, workloads.budgets])
def test_prompts_are_unequal_and_requests_fit_into_the_context(workload):
    model, tokenizer = load_model()
    requests = workload(64)
    lengths = [len(tokenizer(request.prompt)["input_ids"]) for request in requests]
    assert len({request.prompt for request in requests}) == 64
    assert max(lengths) >= 2 * min(lengths)
    assert all(n + request.max_tokens <= model.config.n_positions for n, request in zip(lengths, requests, strict=True))


def test_pages_are_long_end_with_a_sentence_and_leave_room_for_the_output():
    model, tokenizer = load_model()
    requests = workloads.pages(20)
    lengths = [len(tokenizer(request.prompt)["input_ids"]) for request in requests]
    assert len({request.prompt for request in requests}) == 20
    assert all(request.prompt.endswith(".") for request in requests)
    assert min(lengths) > 340
    assert len(set(lengths)) > 5
    assert max(lengths) + 20 <= model.config.n_positions


def test_budgets_stay_within_their_bounds():
    drawn = [request.max_tokens for request in workloads.budgets(200, low=8, high=12)]
    assert set(drawn) == {8, 9, 10, 11, 12}


def test_one_beginning_is_common_to_all_prompts_and_their_endings_differ():
    tokenizer = load_model()[1]
    requests = workloads.one_beginning(20)
    rows = [tokenizer(request.prompt)["input_ids"] for request in requests]
    common = next(position for position, tokens in enumerate(zip(*rows, strict=False)) if len(set(tokens)) > 1)
    assert len({request.prompt for request in requests}) == 20
    assert common > 100
    assert all(len(row) - common < 10 for row in rows)
    assert workloads.one_beginning() == workloads.one_beginning()
    assert workloads.one_beginning(seed=7) != workloads.one_beginning()


def test_a_story_is_told_and_then_begun_again():
    for request in workloads.told_again():
        opening, _, rest = request.prompt.partition(" Soon ")
        assert rest.endswith(opening)
