"""Weights that change under a live engine, in place or by `update_weights`: each token is that of its weights."""

import copy
import random

import pytest
import torch
from conftest import PROMPTS, random_pair

from helpers import Engine, EngineConfig, SamplingParams, dequantized
from helpers.fast import kernels
from helpers.fast.fused_executor import FusedExecutor

SETTINGS = {"max_batch_size": 3, "block_size": 4, "max_tokens_per_step": 32}
LIMIT = 14
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


def continuation(pair, prompt: str, generated: list[int]) -> list[int]:
    """Return a request's tokens after those that it has, from a new engine."""
    return continuations(pair, {0: (prompt, generated)})[0]


def continuations(pair, requests: dict[int, tuple[str, list[int]]]) -> dict[int, list[int]]:
    """Return the tokens of several requests, each given as its prompt and the tokens that it has, from a new engine."""
    engine, tokens = Engine(*pair, EngineConfig(prefix_caching=False)), {}
    for request, (prompt, generated) in requests.items():
        engine.add_request(prompt, PARAMS, request, generated={0: generated} if generated else None)
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: output.token_ids for output in engine.step()}
    return tokens


def last_output(engine: Engine):
    """Run an engine to its end and return the last output."""
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return outputs[-1]


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
                engine.add_request(prompt, PARAMS, request_id)
        if step in moments:
            pair = change_weights(step), tokenizer
            unfinished = {request: (prompts[request], known) for request, known in tokens.items() if len(known) < LIMIT}
            expected = continuations(pair, unfinished)
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
        if step in moments:  # the first token after the change already is one of the new weights
            for request, known in tokens.items():
                assert request not in expected or known == expected[request][: len(known)]
        if step > max(moments) + 1 and not engine.has_unfinished_requests():
            break
    added_last = {request: (prompts[request], []) for request in range(len(prompts) - 2, len(prompts))}
    for request, expected_tokens in (continuations(pair, added_last) | expected).items():
        assert tokens[request] == expected_tokens
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
    prompt, prefilled = PROMPTS[-1], []
    for changes in (False, False, True, False):
        if changes:
            change(model, seed=1)
        before = engine.trace.prompt_tokens
        (output,) = engine.generate(prompt, PARAMS)
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
    scores = last_output(engine).prompt_logprobs
    (expected,) = Engine(model, tokenizer).generate(PROMPTS[-1], SamplingParams(0, prompt_logprobs=0))
    for scored, own in zip(scores[1:], expected.prompt_logprobs[1:], strict=True):
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
    (output,) = engine.generate(PROMPTS[-1], PARAMS)
    assert output.token_ids == continuation((model, tokenizer), PROMPTS[-1], [])


def interrupt():
    raise KeyboardInterrupt


# --- update_weights ---------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("settings", RUNNERS.values(), ids=RUNNERS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_under_random_updates_every_token_is_that_of_the_weights_of_its_time(family, settings):
    needs_kernels = settings.get("linear_backend") == "compiled" or settings.get("batch_invariant")
    if needs_kernels and kernels.unavailable():
        pytest.skip("there are no compiled kernels")
    model, tokenizer = own_pair(family)
    draw = random.Random(f"{family} {settings}")
    engine = Engine(model, tokenizer, EngineConfig(**SETTINGS | {"num_blocks": 40} | settings))
    moments = sorted(draw.sample(range(2, 26), 3))

    def update(step: int):
        new = updated(family, moments.index(step) + 1)
        engine.update_weights(new if step % 2 else new.state_dict())
        return reference(new, settings)

    check_weights_of_its_time(engine, tokenizer, draw, moments, update)


@pytest.mark.parametrize("settings", [RUNNERS[name] for name in ("ragged", "padded", "int8")], ids=str)
def test_running_requests_may_finish_with_the_old_weights_while_new_ones_wait(settings):
    model, tokenizer = own_pair("llama")
    engine = Engine(model, tokenizer, EngineConfig(**SETTINGS | {"num_blocks": 40} | settings))
    start = {}  # the number of updates when a request began
    tokens = {}

    def add(prompt: str, number: int) -> None:
        request_id = engine.add_request(prompt, PARAMS)
        start[request_id] = prompt, number
        tokens[request_id] = []

    for prompt in PROMPTS[:5]:  # three rows
        add(prompt, 0)
    for _ in range(4):
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
    running = {sequence.request_id for sequence in engine.scheduler.running}
    for request_id, (prompt, _) in start.items():
        start[request_id] = prompt, 0 if request_id in running or tokens[request_id] else 1
    new = updated("llama", 1)
    engine.update_weights(new, running="finish")
    change(new, 5)  # those that wait are a copy
    for prompt in PROMPTS[5:8]:
        add(prompt, 1)
    assert {number for _, number in start.values()} == {0, 1}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.token_ids
    models = [reference(updated("llama", number), settings) for number in (0, 1)]
    for request_id, (prompt, number) in start.items():
        assert tokens[request_id] == continuation((models[number], tokenizer), prompt, [])


def test_samples_of_one_request_all_finish_with_the_old_weights():
    model, tokenizer = own_pair("llama")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", **SETTINGS | {"max_batch_size": 2}))
    params = SamplingParams(LIMIT, ignore_eos=True, temperature=1.0, seed=3, n=3)
    (*expected,) = Engine(*own_pair("llama")).generate(PROMPTS[0], params)
    (*later,) = Engine(updated("llama", 1), tokenizer).generate(PROMPTS[1], params)
    first, outputs = engine.add_request(PROMPTS[0], params), {}
    engine.step()
    engine.update_weights(updated("llama", 1), running="finish")
    second = engine.add_request(PROMPTS[1], params)
    while engine.has_unfinished_requests():
        outputs |= {(output.request_id, output.index): output.token_ids for output in engine.step()}
    for request_id, wanted in ((first, expected), (second, later)):
        assert [outputs[request_id, index] for index in range(3)] == [output.token_ids for output in wanted]


def test_a_preempted_request_finishes_with_the_old_weights_too():
    model, tokenizer = own_pair("llama")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", **SETTINGS))
    engine.add_request(PROMPTS[0], PARAMS)
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    expected = continuation((copy.deepcopy(model), tokenizer), PROMPTS[0], [])
    engine.update_weights(updated("llama", 1), running="finish")
    assert last_output(engine).token_ids == expected


def test_weights_that_count_no_writes_are_updated_too():
    """Those that were made in inference mode have no version, so nothing but the call says that they have changed."""
    with torch.inference_mode():
        model, tokenizer = own_pair("llama")
    assert all(weight.is_inference() for weight in model.parameters())
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", **SETTINGS))
    engine.generate(PROMPTS[-1], PARAMS)
    engine.update_weights(updated("llama", 1))
    (output,) = engine.generate(PROMPTS[-1], PARAMS)
    assert output.token_ids == continuation((updated("llama", 1), tokenizer), PROMPTS[-1], [])


def test_an_update_at_once_takes_the_place_of_one_that_waits():
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", **SETTINGS))
    engine.add_request(PROMPTS[0], PARAMS)
    outputs = engine.step()
    engine.update_weights(updated("gpt2", 1), running="finish")
    waiting = engine.add_request(PROMPTS[1], PARAMS)
    engine.step()
    engine.update_weights(updated("gpt2", 2))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    last = next(output for output in reversed(outputs) if output.request_id == waiting)
    assert last.token_ids == continuation((updated("gpt2", 2), tokenizer), PROMPTS[1], [])
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), updated("gpt2", 2).parameters(), strict=True))


def test_aborting_the_last_old_request_lets_the_new_ones_run():
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", **SETTINGS))
    old = engine.add_request(PROMPTS[0], PARAMS)
    engine.step()
    engine.update_weights(updated("gpt2", 1), running="finish")
    engine.abort_request(old)
    (output,) = engine.generate(PROMPTS[1], PARAMS)
    assert output.token_ids == continuation((updated("gpt2", 1), tokenizer), PROMPTS[1], [])


@pytest.mark.skipif(bool(kernels.unavailable()), reason="there are no compiled kernels")
def test_all_blocks_are_computed_in_one_call_again_after_an_update(monkeypatch):
    calls, compute = [], FusedExecutor.__call__
    monkeypatch.setattr(FusedExecutor, "__call__", lambda *args: calls.append(len(args[1])) or compute(*args))
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(linear_backend="compiled", **SETTINGS))
    engine.generate(PROMPTS[0], PARAMS)
    engine.update_weights(updated("gpt2", 1))
    calls.clear()
    (output,) = engine.generate(PROMPTS[0], PARAMS)
    assert len(calls) == LIMIT - 1, "all passes but the first one, which makes the products of the layers anew"
    assert output.token_ids == continuation((updated("gpt2", 1), tokenizer), PROMPTS[0], [])


# --- what is refused --------------------------------------------------------------------------------------------------


C_ATTN = "transformer.h.0.attn.c_attn.weight"
WRONG = {
    "without a weight": ({C_ATTN: None}, f"There is no new weight '{C_ATTN}'"),
    "another shape": ({C_ATTN: torch.zeros(32, 97)}, r"shape \[32, 97\], but that of GPT2LMHeadModel has \[32, 96\]"),
    "an unknown name": ({"model.norm": torch.zeros(3)}, "GPT2LMHeadModel has no tensor 'model.norm'"),
    "no tensor": ({C_ATTN: [1.0]}, "must be a model or its state_dict"),
}


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(changes, message, weights):
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(weights=weights, **SETTINGS))
    (before,) = engine.generate(PROMPTS[0], PARAMS)
    state = updated("gpt2", 1).state_dict() | changes
    with pytest.raises(ValueError, match=message):
        engine.update_weights({name: tensor for name, tensor in state.items() if tensor is not None})
    assert engine.generate(PROMPTS[0], PARAMS)[0].token_ids == before.token_ids


def test_numbers_without_a_nearest_integer_are_refused():
    model, tokenizer = own_pair("gpt2")
    engine = Engine(model, tokenizer, EngineConfig(weights="int4", **SETTINGS))
    state = updated("gpt2", 1).state_dict()
    state["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
    with pytest.raises(ValueError, match="no nearest integer"):
        engine.update_weights(state)


@pytest.mark.parametrize("weights", [None, 3, "new"], ids=repr)
def test_what_is_no_weights_is_refused(weights):
    engine = Engine(*own_pair("gpt2"), EngineConfig(**SETTINGS))
    with pytest.raises(ValueError, match="must be a model or its state_dict"):
        engine.update_weights(weights)
    with pytest.raises(ValueError, match='"recompute" or "finish", not \'later\''):
        engine.update_weights({}, running="later")


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
