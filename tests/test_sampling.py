"""Sampling parameters: each one has its meaning, and affects no other request.

transformers' own `generate` is the judge of what a parameter does to the scores. That a seeded request gets the same
tokens in any company is test_engine_exactness.py.
"""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import PROMPTS, CountingModel, letter_tokenizer, random_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import Engine, EngineConfig, SamplingParams
from helpers.engine import Chunk, Sequence
from helpers.features.token_rules import TokenRules
from helpers.features.token_rules.logits import TokenScores
from helpers.runners.sampling import BatchSampler, draw, draw_from_top, probabilities_of, random_number

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 10**9},  # more than there are tokens
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
]


def name_of(params):
    return ", ".join(f"{name}={value}" for name, value in params.items())


def choose(logits, token_ids=(1,), prompt_tokens=1, **params):
    """Return what a sampler chooses after these tokens of a request."""
    sequence = Sequence("r", list(token_ids[:prompt_tokens]), 10**6, params=SamplingParams(**params))
    sequence.token_ids += token_ids[prompt_tokens:]
    sequence.computed = len(token_ids) - 1
    (chosen,) = BatchSampler().sample([Chunk(sequence, 1)], logits[None])[sequence]
    return chosen


# --- what a parameter does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_tokens_are_drawn_from_the_distribution_that_generate_draws_from(setting):
    model, tokenizer = random_pair("gpt2")
    all_settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0} | setting
    inputs = tokenizer(PROMPTS[3], return_tensors="pt").to(model.device)
    output = model.generate(
        **inputs,
        **all_settings,
        do_sample=True,
        max_new_tokens=6,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    params = SamplingParams(**{"temperature": 1.0} | setting)
    rule = TokenScores(params, 1, TokenRules())
    ids, generator, moved = output.sequences[0].tolist(), random.Random(0), False
    for step, (raw, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        changed = raw[0].float().cpu().clone()
        rule.change(ids[: inputs["input_ids"].size(1) + step], changed)
        expected = scores[0].float().softmax(dim=-1).cpu().numpy()
        (shares,) = probabilities_of(changed[None], [params])
        numbers = iter(generator.random, None)
        drawn = [draw_from_top(shares.copy(), params.top_p, numbers) for _ in range(1000)]
        found = np.bincount(drawn, minlength=len(expected)) / 1000
        assert not found[expected == 0].any(), "an excluded token was drawn"
        # Five standard deviations of a frequency, and room for the rarest tokens.
        assert (np.abs(found - expected) < 5 * np.sqrt(expected / 1000) + 0.003).all()
        moved |= not np.allclose(expected, raw[0].softmax(dim=-1).cpu(), atol=1e-3)
    assert moved or setting == {"top_k": 10**9}, "a parameter that changes nothing proves nothing"


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
    st.floats(0.01, 1),
    st.randoms(use_true_random=False),
)
def test_a_draw_from_the_top_takes_every_token_of_the_smallest_set_and_no_other(weights, top_p, draw):
    shares = np.array(weights, dtype=np.float32) / sum(weights)
    better = [sum(other for other in weights if other > weight) / sum(weights) for weight in weights]
    if any(abs(mass - top_p) < 1e-5 for mass in better):
        return  # rounding decides
    expected = {token for token, weight in enumerate(weights) if weight and (better[token] < top_p or top_p == 1)}
    first = {
        draw_from_top(3 * shares, top_p, iter([number, *[draw.random() for _ in range(60)]]))
        for number in np.cumsum(shares) - shares / 2
    }
    assert first <= expected
    assert expected == first, "each token is drawn where the first number falls into its share"


def test_the_first_and_the_last_number_fall_on_tokens_that_are_possible():
    for size in (1, 255, 256, 257, 1000):
        shares = np.zeros(size, dtype=np.float32)
        shares[size // 2] = 0.3
        assert {draw(shares, number) for number in (0.0, 0.5, 1 - 2**-53)} == {size // 2}


def test_very_small_temperatures_take_the_best_token_without_overflow():
    logits = torch.tensor([1e4, -1e4, 1.0002e4])
    for temperature in (1e-30, 1e-3, 0.01):
        assert choose(logits, temperature=temperature).token_id == 2


# --- seeds ----------------------------------------------------------------------------------------------------------

# All 257 tokens are about equally likely, so two draws of 12 tokens are practically never equal.
HOT = SamplingParams(max_tokens=12, temperature=50.0, ignore_eos=True)


def test_outputs_without_a_seed_differ(random_pairs):
    engine = Engine(*random_pairs)
    token_ids = []
    for _ in range(3):
        torch.manual_seed(1)  # torch's own seed must not make them equal
        token_ids += [tuple(output.token_ids) for output in engine.generate("The fox", replace(HOT, n=2))]
    assert len(set(token_ids)) == 6


def test_an_engine_leaves_torchs_own_random_generator_alone(embedded):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Engine(*embedded).generate(PROMPTS[:2], SamplingParams(max_tokens=3, temperature=1.0, seed=1))
    assert torch.rand(2).tolist() == expected.tolist()


def test_a_draw_depends_on_the_seed_the_output_and_the_place_alone():
    numbers = {random_number(*key) for key in itertools.product(range(5), repeat=3)}
    assert len(numbers) == 5**3 and all(0 <= number < 1 for number in numbers)
    logits = torch.zeros(500)
    assert choose(logits, [1, 1, 9], temperature=1.0, seed=3) == choose(logits, [1, 1, 8], temperature=1.0, seed=3)


# --- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 1.2, "top_k": 5, "seed": 3}, {"repetition_penalty": 1.6}], ids=name_of
)
@pytest.mark.parametrize("execution", ["padded", "auto"])
def test_logprobs_are_those_of_a_plain_forward_pass(random_pairs, setting, execution):
    model, tokenizer = random_pairs
    prompts, asked = [PROMPTS[3], PROMPTS[0], PROMPTS[1]], [4, 0, None]
    params = [SamplingParams(max_tokens=10, logprobs=k, **setting) for k in asked]
    outputs = Engine(model, tokenizer, EngineConfig(execution=execution)).generate(prompts, params)
    assert outputs[2].logprobs is None
    for output, k in zip(outputs[:2], asked[:2], strict=True):
        prompt = tokenizer(output.prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids], device=model.device)).logits[0]
        expected = logits[len(prompt) - 1 : -1].float().log_softmax(dim=-1).cpu()
        assert len(output.logprobs) == len(output.token_ids)
        for scores, token, row in zip(output.logprobs, output.token_ids, expected, strict=True):
            assert next(iter(scores)) == token, "the token itself comes first"
            assert set(scores) == {token, *row.topk(k).indices.tolist()}
            for id, value in scores.items():
                assert math.isclose(value, row[id].item(), abs_tol=1e-3)


# --- where an output ends -------------------------------------------------------------------------------------------


def letters_engine(context=40, **config):
    return Engine(CountingModel(context), letter_tokenizer(), EngineConfig(**config))


def test_with_ignore_eos_an_output_continues_to_max_tokens():
    engine = letters_engine()
    with_eos, without = engine.generate(["fg", "abc"], [SamplingParams(20), SamplingParams(20, ignore_eos=True)])
    assert (with_eos.token_ids, with_eos.text, with_eos.finish_reason) == ([8, 9, 0], "hi", "stop")
    assert without.token_ids == [(4 + n) % 10 for n in range(20)]
    assert (without.text, without.finish_reason) == ("defghiabcdefghiabc", "length")  # EOS has no text


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        (["hx", "ef"], "d", 3),
        ("bc", "defghi", 7),  # the prompt is not searched
        ("hij", "defghi", 7),  # held back, then shown: EOS follows
    ],
)
def test_a_stop_string_ends_an_output_and_is_not_part_of_it(stop, text, tokens):
    engine = letters_engine(max_batch_size=2)
    params = [SamplingParams(12, stop=stop), SamplingParams(3)]
    outputs = list(engine.stream("abc", params[0]))
    assert outputs[-1].text == text == "".join(output.new_text for output in outputs)
    assert len(outputs[-1].token_ids) == tokens
    assert outputs[-1].finish_reason == "stop"
    assert all(text.startswith(output.text) for output in outputs), "shown text must not be withdrawn"
    in_a_batch = engine.generate(["abc", "ab"], params)
    assert (in_a_batch[0].text, in_a_batch[1].text) == (text, "cde")
