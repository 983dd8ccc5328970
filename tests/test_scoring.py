"""Prompt log-probabilities are those of a plain forward pass, whatever else the engine does meanwhile."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS, random_pair

from helpers import Engine, EngineConfig, SamplingParams

SCORE, GREEDY = SamplingParams(0, prompt_logprobs=3), SamplingParams(1)


def plain_logprobs(model, tokenizer, prompt):
    """Return log-probabilities [prompt tokens - 1, vocabulary]: row t is for token t + 1."""
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=model.device)).logits[0, :-1]
    return ids, logits.float().log_softmax(dim=-1).cpu()


def assert_scored(pair, output, num_best):
    ids, expected = plain_logprobs(*pair, output.prompt)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
    for token_id, scored, row in zip(ids[1:], output.prompt_logprobs[1:], expected, strict=True):
        assert next(iter(scored)) == token_id, "the token itself comes first"
        best = row.topk(num_best).indices.tolist()
        assert list(scored) == list(dict.fromkeys([token_id, *best]))
        for id, value in scored.items():
            assert math.isclose(value, row[id].item(), abs_tol=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"execution": "padded"},
        {"max_tokens_per_step": 9, "max_batch_size": 3},
        {"max_tokens_per_step": 9, "max_batch_size": 4, "execution": "padded"},
        {"max_batch_size": 3, "block_size": 4, "prefix_caching": False, "mixed_batches": False},
        {"max_tokens_per_step": 16, "speculative": "ngram"},
        {"kernels": False, "policy": "shortest_first", "max_batch_size": 2},
    ],
    ids=str,
)
def test_scores_are_those_of_a_plain_forward_pass_in_any_company(random_pairs, config):
    prompts = [PROMPTS[3], PROMPTS[1], PROMPTS[1], PROMPTS[8], PROMPTS[1] + "!", PROMPTS[9]]
    params = [
        SCORE,
        SamplingParams(12),
        SamplingParams(12, prompt_logprobs=1),
        SamplingParams(6, prompt_logprobs=0, logprobs=2),
        replace(SCORE, prompt_logprobs=5),
        SamplingParams(5, prompt_logprobs=2, temperature=1.0, seed=1, n=2),
    ]
    outputs = Engine(*random_pairs, EngineConfig(**config)).generate(prompts, params, arrivals=[0, 0, 1, 3, 6, 6])
    assert [len(output.token_ids) for output in outputs][::4] == [0, 0]
    assert outputs[0].finish_reason == "length" and outputs[0].text == "" and outputs[0].token_times == []
    assert outputs[1].prompt_logprobs is None and outputs[1].token_ids == outputs[2].token_ids
    for output, num_best in zip([outputs[0], *outputs[2:]], [3, 1, 0, 5, 2, 2], strict=True):
        assert_scored(random_pairs, output, num_best)
    assert len(outputs[3].logprobs) == 6 and outputs[5].prompt_logprobs == outputs[6].prompt_logprobs


def test_a_prompt_to_score_is_computed_although_it_is_cached_and_its_own_tokens_are_cached_for_others(embedded):
    engine = Engine(*embedded, EngineConfig(block_size=4))
    prompt = " ".join(["There was once a poor miller called Jonas, and he had a cat."] * 3)
    length = len(embedded[1](prompt)["input_ids"])
    computed = []
    for params in (GREEDY, GREEDY, replace(GREEDY, prompt_logprobs=0), SCORE, GREEDY):
        engine.trace.passes.clear()
        (output,) = engine.generate(prompt, params)
        if output.prompt_logprobs:
            assert_scored(embedded, output, params.prompt_logprobs)
        computed.append(sum(forward_pass.tokens for forward_pass in engine.trace.passes))
    assert computed[0] == computed[2] == computed[3] == length and max(computed[1], computed[4]) <= 4


def test_a_prompt_that_is_preempted_while_it_is_scored_is_scored_completely(random_pairs):
    config = EngineConfig(max_batch_size=2, max_tokens_per_step=8, block_size=2, num_blocks=24)
    engine = Engine(*random_pairs, config)
    preempted, schedule = [], engine.scheduler.schedule

    def watched():
        plan = schedule()
        notes = [sequence.request.notes for sequence in plan.preempted]
        preempted.extend(len(note["prompt_logprobs"]) for note in notes if "prompt_logprobs" in note)
        return plan

    engine.scheduler.schedule = watched
    prompts = [PROMPTS[9], PROMPTS[8]]
    first, second = engine.generate(
        prompts, [SamplingParams(30, ignore_eos=True), SamplingParams(3, prompt_logprobs=2)], arrivals=[0, 12]
    )
    assert any(1 < scored < 33 for scored in preempted), "preempted in the middle of its prompt"
    assert_scored(random_pairs, second, 2)
    assert second.token_ids == Engine(*random_pairs).generate(prompts[1], SamplingParams(3))[0].token_ids
    assert len(first.token_ids) == 30 and engine.block_manager.used == 0


def test_a_prompt_may_fill_the_context_if_nothing_follows_and_may_be_one_token():
    pair = random_pair("llama")
    long, short = Engine(*pair).generate([[5, 6] * 64, [7]], SCORE)
    assert len(long.prompt_logprobs) == 128 and short.prompt_logprobs == [None]
    assert short.finish_reason == "length" and short.token_ids == []
    with pytest.raises(ValueError, match="context is 128"):
        Engine(*pair).generate([[5, 6] * 64], SamplingParams(1, prompt_logprobs=3))
