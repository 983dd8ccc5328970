"""Weights that change in place under a live engine: from then on, every token is that of an engine made afterwards."""

import copy
import random

import pytest
import torch
from conftest import PROMPTS, random_pair

from helpers import Engine, EngineConfig, SamplingParams

SETTINGS = {"max_batch_size": 3, "block_size": 4, "max_tokens_per_step": 32}
LIMIT = 14


def own_pair(family: str) -> tuple:
    """Return a model that a test may change: the other tests share those of `random_pair`."""
    model, tokenizer = random_pair(family)
    return copy.deepcopy(model), tokenizer


def change(model, seed: int) -> None:
    """Change all weights in place, as an optimizer's step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def continuation(pair, prompt: str, generated: list[int]) -> list[int]:
    """Return a request's tokens after those that it has, from a new engine."""
    engine = Engine(*pair, EngineConfig(prefix_caching=False))
    options = {"generated": {0: generated}} if generated else {}
    engine.add_request(prompt, SamplingParams(LIMIT, ignore_eos=True), **options)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[-1].token_ids


def check_weights_of_its_time(engine, tokenizer, draw, moments: list[int], change_weights) -> None:
    """Check that every token of an engine is that of a new engine with the weights of its time.

    Args:
        engine: an engine without requests.
        draw: chooses the prompts of requests that join at the start and after each change.
        moments: the iterations before which the weights change.
        change_weights: takes an iteration, changes the weights, and returns the model of the reference.
    """
    shared = PROMPTS[-1]  # the longest: its blocks are cached, and come again after each change
    prompts, tokens, expected = {}, {}, {}
    for step in range(200):
        if step in (0, 3, *(moment + 1 for moment in moments)):
            for prompt in (shared, draw.choice(PROMPTS)):
                prompts[request_id := len(prompts)] = prompt
                tokens[request_id] = []
                engine.add_request(prompt, SamplingParams(LIMIT, ignore_eos=True), request_id)
        if step in moments:
            pair = change_weights(step), tokenizer
            expected = {
                request: continuation(pair, prompts[request], known)
                for request, known in tokens.items()
                if len(known) < LIMIT
            }
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
        if step in moments:  # the first token after the change already is one of the new weights
            for request, known in tokens.items():
                assert request not in expected or known == expected[request][: len(known)]
        if step > max(moments) + 1 and not engine.has_unfinished_requests():
            break
    for request, prompt in prompts.items():
        if request in expected:
            assert tokens[request] == expected[request]
        elif len(prompts) - request <= 2:  # added after the last change
            assert tokens[request] == continuation(pair, prompt, [])
    assert engine.block_manager is None or engine.block_manager.used == 0


@pytest.mark.parametrize(
    ("family", "execution", "seed"),
    [
        ("gpt2", "ragged", 0),
        ("gpt2", "padded", 1),
        ("llama", "ragged", 1),
        ("llama", "ragged", 2),
        ("llama", "padded", 0),
    ],
)
def test_every_token_is_that_of_the_weights_of_its_time(family, execution, seed):
    model, tokenizer = own_pair(family)
    draw = random.Random(seed)
    engine = Engine(model, tokenizer, EngineConfig(execution=execution, num_blocks=40, **SETTINGS))

    def change_in_place(step: int):
        change(model, step)
        return copy.deepcopy(model)

    check_weights_of_its_time(engine, tokenizer, draw, sorted(draw.sample(range(1, 30), 3)), change_in_place)


def test_a_cached_prefix_is_used_until_the_weights_change_and_forgotten_then():
    model, tokenizer = own_pair("llama")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", num_blocks=64, **SETTINGS))
    params, prompt = SamplingParams(LIMIT, ignore_eos=True), PROMPTS[-1]
    prefilled = []
    for changes in (False, False, True, False):
        if changes:
            change(model, seed=1)
        before = engine.trace.prompt_tokens
        (output,) = engine.generate(prompt, params)
        assert output.token_ids == continuation((model, tokenizer), prompt, [])
        prefilled.append(engine.trace.prompt_tokens - before)
    assert prefilled[0] == prefilled[2] > prefilled[1] == prefilled[3]
    assert engine.block_manager.used == 0


@pytest.mark.parametrize("execution", ["ragged", "padded"])
def test_all_scores_of_a_prompt_are_those_of_the_same_weights(execution):
    model, tokenizer = own_pair("llama")
    engine = Engine(model, tokenizer, EngineConfig(execution=execution, **SETTINGS | {"max_tokens_per_step": 8}))
    engine.add_request(PROMPTS[-1], SamplingParams(0, prompt_logprobs=0))
    engine.step()
    change(model, seed=1)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (expected,) = Engine(model, tokenizer).generate(PROMPTS[-1], SamplingParams(0, prompt_logprobs=0))
    for scored, own in zip(outputs[-1].prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert scored == pytest.approx(own, abs=1e-3)


def test_a_router_hears_that_cached_blocks_are_gone():
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", num_blocks=64, **SETTINGS))
    engine.generate(PROMPTS[-1], SamplingParams(4))
    known = {digest for digest, registered in engine.block_manager.take_cache_events() if registered}
    change(model, seed=1)
    engine.add_request("a", SamplingParams(1))
    engine.step()
    gone = {digest for digest, registered in engine.block_manager.take_cache_events() if not registered}
    assert known and gone == known
    assert engine.block_manager.cached == 0


def test_an_interrupt_does_not_let_an_engine_take_old_prefixes_for_new_ones():
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(num_blocks=40, **SETTINGS))
    engine.generate(PROMPTS[-1], SamplingParams(2))
    change(model, 1)
    forget, engine._forget_computed = engine._forget_computed, interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[-1], SamplingParams(LIMIT))
    engine._forget_computed = forget
    (output,) = engine.generate(PROMPTS[-1], SamplingParams(LIMIT, ignore_eos=True))
    assert output.token_ids == continuation((model, tokenizer), PROMPTS[-1], [])


def interrupt():
    raise KeyboardInterrupt
