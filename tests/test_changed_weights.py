"""Weights that change under a live engine, in place or by `update_weights`: each token is that of its weights."""

import copy
import functools
import random

import pytest
import torch
from conftest import PROMPTS, random_pair

from helpers import Engine, EngineConfig, SamplingParams, dequantized
from helpers.fast import kernels

SETTINGS = {"max_batch_size": 3, "block_size": 4, "max_tokens_per_step": 32}
LIMIT = 14
LONGEST_PROMPT = max(PROMPTS, key=len)  # its blocks are cached, and come again after each change
PARAMS = SamplingParams(LIMIT, ignore_eos=True)


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


def new_engine(model, tokenizer) -> Engine:
    return Engine(model, tokenizer, EngineConfig(prefix_caching=False))


def continuation(pair, prompt: str, generated: list[int]) -> list[int]:
    """Return a request's tokens after those that it has, from a new engine."""
    return continuations(new_engine(*pair), {0: (prompt, generated)})[0]


def continuations(engine: Engine, requests: dict[int, tuple[str, list[int]]]) -> dict[int, list[int]]:
    """Return the tokens of several requests, each given as its prompt and the tokens that it has."""
    tokens = {}
    for request, (prompt, generated) in requests.items():
        engine.add_request(prompt, PARAMS, request, generated={0: generated} if generated else None)
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: output.token_ids for output in engine.step()}
    return tokens


RUNNERS = {
    "ragged": {"execution": "ragged"},
    "plain": {"execution": "ragged", "kernels": False, "linear_backend": "pytorch"},
    "padded": {"execution": "padded"},
    "packed": {"linear_backend": "compiled"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "copied": {"dtype": torch.float64},
    "invariant": {"batch_invariant": True},
    "drafts": {"speculative": "ngram"},
}


def updated(family: str, number: int) -> torch.nn.Module:
    """Return a model with the weights after a number of updates."""
    model, _ = own_pair(family)
    for seed in range(1, number + 1):
        change(model, seed)
    return model


def reference(model, settings: dict):
    """Return the model whose tokens an engine with these settings gives."""
    if "weights" in settings:
        return dequantized(model, settings["weights"])
    return copy.deepcopy(model).to(settings.get("dtype", torch.float32))


ACTIONS = ["add"] * 6 + ["abort", "preempt", "in place", "recompute", "finish"] * 2 + ["none"] * 10


@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_however_weights_change_every_token_is_that_of_the_weights_that_its_request_should_have(family, settings):
    """Weights change in place, for all requests at once, or for new requests once the old ones have finished."""
    if (settings.get("linear_backend") == "compiled" or "batch_invariant" in settings) and kernels.unavailable():
        pytest.skip("there are no compiled kernels")
    model, tokenizer = own_pair(family)
    draw, newest = random.Random(f"{family} {settings}"), 0
    engine = Engine(model, tokenizer, EngineConfig(**SETTINGS | {"num_blocks": 40} | settings))
    prompts, tokens, expected, ended, aborted = {}, {}, {}, set(), set()

    @functools.cache
    def engine_of(number: int) -> Engine:
        return new_engine(reference(updated(family, number), settings), tokenizer)

    def expect(requests) -> None:
        known = {request: (prompts[request], tokens[request]) for request in requests}
        expected.update(continuations(engine_of(newest), known))

    def step() -> None:
        for output in engine.step():
            request, tokens[output.request_id] = output.request_id, output.token_ids
            assert output.token_ids == expected[request][: len(output.token_ids)]
            if output.finish_reason is not None:
                ended.add(request)

    for action in ["add", "add", *draw.sample(ACTIONS, len(ACTIONS))]:
        unfinished = prompts.keys() - ended - aborted
        running = {sequence.request_id for sequence in engine.scheduler.running}
        if action == "add":
            request = len(prompts)
            prompts[request], tokens[request] = draw.choice([LONGEST_PROMPT, *PROMPTS]), []
            expect([request])
            engine.add_request(prompts[request], PARAMS, request)
        elif action == "abort" and unfinished:
            aborted.add(request := draw.choice(sorted(unfinished)))
            engine.abort_request(request)
        elif action == "preempt":
            engine.forget_keys()
        elif action == "in place" and engine._pending_update is None and not {"weights", "dtype"} & settings.keys():
            newest += 1
            change(model, newest)
            expect(unfinished)
        elif action in ("recompute", "finish"):
            newest += 1
            new = updated(family, newest)
            begun = {
                request for request in unfinished if action == "finish" and (request in running or tokens[request])
            }
            engine.update_weights(new if newest % 2 else new.state_dict(), running=action)
            expect(unfinished - begun)
            if begun:
                change(new, 99)  # those that wait are a copy
        step()
    while engine.has_unfinished_requests():
        step()
    assert all(tokens[request] == expected[request] for request in prompts.keys() - aborted)
    assert engine.block_manager is None or engine.block_manager.used == 0


def test_a_cached_prefix_is_used_until_the_weights_change_and_forgotten_then():
    """A router hears which blocks are gone."""
    model, tokenizer = own_pair("llama")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", num_blocks=64, **SETTINGS))
    prefilled, known = [], set()
    for changes in (False, False, True, False):
        if changes:
            change(model, seed=1)
        before = engine.trace.prompt_tokens
        (output,) = engine.generate(LONGEST_PROMPT, PARAMS)
        assert output.token_ids == continuation((model, tokenizer), LONGEST_PROMPT, [])
        prefilled.append(engine.trace.prompt_tokens - before)
        events = engine.block_manager.take_cache_events()
        assert {digest for digest, is_registered in events if not is_registered} == (known if changes else set())
        known |= {digest for digest, is_registered in events if is_registered}
    assert prefilled[0] == prefilled[2] > prefilled[1] == prefilled[3]
    assert known and engine.block_manager.used == 0


def test_all_scores_of_a_prompt_are_those_of_the_same_weights():
    model, tokenizer = own_pair("llama")
    engine, params = Engine(model, tokenizer, EngineConfig(max_tokens_per_step=8)), SamplingParams(0, prompt_logprobs=0)
    engine.add_request(LONGEST_PROMPT, params)
    engine.step()
    change(model, seed=1)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    (expected,) = Engine(model, tokenizer).generate(LONGEST_PROMPT, params)
    for scored, own in zip(outputs[-1].prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert scored == pytest.approx(own, abs=1e-3)


def test_samples_of_one_request_all_finish_with_the_old_weights():
    engine = Engine(*own_pair("llama"), EngineConfig(execution="ragged", max_batch_size=2))
    params = SamplingParams(LIMIT, ignore_eos=True, temperature=1.0, seed=3, n=3)
    expected, outputs = Engine(*own_pair("llama")).generate(PROMPTS[0], params), {}
    engine.add_request(PROMPTS[0], params)
    engine.step()
    engine.update_weights(updated("llama", 1), running="finish")
    while engine.has_unfinished_requests():
        outputs |= {output.index: output.token_ids for output in engine.step()}
    assert [outputs[index] for index in range(3)] == [output.token_ids for output in expected]


# --- what is refused --------------------------------------------------------------------------------------------------


C_ATTN = "transformer.h.0.attn.c_attn.weight"
WRONG = {
    "without a weight": ({C_ATTN: None}, f"There is no new weight '{C_ATTN}'"),
    "another shape": ({C_ATTN: torch.zeros(32, 97)}, r"shape \[32, 97\], but that of GPT2LMHeadModel has \[32, 96\]"),
    "an unknown name": ({"model.norm": torch.zeros(3)}, "GPT2LMHeadModel has no tensor 'model.norm'"),
    "no tensor": ({C_ATTN: [1.0]}, "must be a model or its state_dict"),
}
NOT_A_NUMBER = {"transformer.h.1.mlp.c_fc.weight": torch.full((32, 128), torch.nan)}, "no nearest integer"


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [*((None, *wrong) for wrong in WRONG.values()), ("int4", *NOT_A_NUMBER)],
    ids=repr,
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(changes, message, weights):
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(weights=weights, **SETTINGS))
    (before,) = engine.generate(PROMPTS[0], PARAMS)
    state = updated("gpt2", 1).state_dict() | changes
    with pytest.raises(ValueError, match=message):
        engine.update_weights({name: tensor for name, tensor in state.items() if tensor is not None})
    assert engine.generate(PROMPTS[0], PARAMS)[0].token_ids == before.token_ids


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_tied_head_may_be_left_out_and_must_not_differ(embedded, weights):
    model, tokenizer = copy.deepcopy(embedded[0]), embedded[1]
    engine = Engine(model, tokenizer, EngineConfig(weights=weights, **SETTINGS))
    new = copy.deepcopy(model)
    change(new, 1)
    state = new.state_dict()
    engine.update_weights({name: tensor for name, tensor in state.items() if name != "lm_head.weight"})
    (expected,) = Engine(new, tokenizer, EngineConfig(weights=weights, **SETTINGS)).generate(PROMPTS[0], PARAMS)
    assert engine.generate(PROMPTS[0], PARAMS)[0].token_ids == expected.token_ids
    assert torch.equal(model.lm_head.weight, new.lm_head.weight)
    if weights is None:  # a quantized head is a tensor of its own
        with pytest.raises(ValueError, match="are one tensor of GPT2LMHeadModel: give equal weights"):
            engine.update_weights(state | {"lm_head.weight": torch.zeros_like(state["lm_head.weight"])})
