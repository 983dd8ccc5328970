"""Ragged execution, piece by piece: what a query attends to, where keys are, what a forward pass reads and writes.

test_ragged_exactness.py shows that it changes no token, on any family.
"""

import logging
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import PROMPTS, random_pair
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import Engine, EngineConfig, SamplingParams
from helpers.engine import Chunk, Sequence
from helpers.fast.linear_backends import available_backends
from helpers.models import clone_sharing_weights
from helpers.runners import PaddedRunner, RaggedRunner, why_not_ragged
from helpers.runners.attention import AttentionMetadata, AttentionSettings, QuerySegment, attend_one, attend_row
from tests.support.families import build, by_name, tokenizer

RAGGED = {"execution": "ragged", "block_size": 4}


@pytest.fixture(scope="module")
def llama():
    return random_pair("llama")


def expected(model, *texts: list[int]) -> torch.Tensor:
    """Return the logits that the model gives after each text, alone."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([text], device=model.device)).logits[0, -1:] for text in texts])


# --- what a query attends to ------------------------------------------------------------------------------------------


def reference_attention(query, key, value, window, scaling, softcap, sinks) -> torch.Tensor:
    """Compute attention number by number, from its definition."""
    heads, tokens, dim = query.shape
    output = torch.zeros(heads, tokens, value.shape[2], dtype=torch.float64)
    for head in range(heads):
        kv_head = head * key.shape[0] // heads
        for token in range(tokens):
            weights, position = {}, key.shape[1] - tokens + token
            for slot in range(position + 1):
                if window is None or slot > position - window:
                    score = (query[head, token] @ key[kv_head, slot]) * (dim**-0.5 if scaling is None else scaling)
                    weights[slot] = (score if softcap is None else softcap * (score / softcap).tanh()).exp()
            total = sum(weights.values()) + (0 if sinks is None else sinks[head].exp())
            for slot, weight in weights.items():
                output[head, token] += weight / total * value[kv_head, slot]
    return output


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    ("scaling", "window", "tokens"),
    [(None, None, 3), (0.3, 4, 3), (0.3, 4, 1), (None, None, 7), (0.3, 4, 7), (0.3, 7, 7)],
)
def test_attention_of_a_sequence_is_what_its_definition_says(kv_heads, with_sinks, softcap, scaling, window, tokens):
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((4, tokens, 8), (kv_heads, 7, 8), (kv_heads, 7, 6))
    )
    sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
    settings = AttentionSettings(scaling, window, softcap, sinks)
    mask = QuerySegment(0, tokens, 7 - tokens, []).mask(settings, query)
    actual = attend_one(query, key, value, mask, settings)
    assert torch.allclose(actual, reference_attention(query, key, value, window, scaling, softcap, sinks), atol=1e-6)


# --- what a pass computes ---------------------------------------------------------------------------------------------


def test_every_iteration_is_one_forward_pass_over_all_its_tokens_without_padding(llama):
    engine, shapes = Engine(*llama, EngineConfig(**RAGGED, max_batch_size=3, max_tokens_per_step=20)), []
    hook = engine.runner.model.register_forward_hook(
        lambda _module, _args, kwargs, _output: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    engine.generate(PROMPTS[:6], SamplingParams(max_tokens=8), arrivals=[0, 0, 1, 2, 5, 5])
    hook.remove()
    trace = engine.trace
    assert shapes == [(1, iteration.tokens) for iteration in trace.passes]
    assert trace.steps == trace.forward_passes
    assert trace.prompt_padding == 0
    works = [{row.work for row in iteration.row_steps} for iteration in trace.passes]
    assert any({"prefill", "decode"} <= work for work in works)


# --- the original model -----------------------------------------------------------------------------------------------


def test_an_engine_leaves_its_model_unchanged(random_pairs):
    """Although a clone has other attention and other linear layers, it shares the weights."""
    model = random_pairs[0]
    before, modules = expected(model, [1, 2, 3, 4]), dict(model.named_modules())
    implementation, pad = model.config._attn_implementation, model.config.pad_token_id
    weights = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    backend = "compiled" if "compiled" in available_backends(torch.float32) else "auto"
    engine = Engine(*random_pairs, EngineConfig(**RAGGED, linear_backend=backend))
    engine.generate(PROMPTS[:2], SamplingParams(max_tokens=5))
    assert model.config._attn_implementation == implementation != "ragged"
    assert model.config.pad_token_id == pad
    assert engine.runner.model.config._attn_implementation == "ragged"
    assert dict(model.named_modules()) == modules
    assert torch.equal(expected(model, [1, 2, 3, 4]), before)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == weights[name][0] and torch.equal(tensor, weights[name][1])
    own = {parameter.data_ptr() for parameter in engine.runner.model.parameters()}
    assert own == {parameter.data_ptr() for parameter in model.parameters()}, "an engine has no other parameters"


# --- which models run ragged ------------------------------------------------------------------------------------------

NO_INTERFACE = "its layers do not use transformers' attention interface"
OTHER_MASK = "layer 0 does not attend to all earlier tokens, as it announces"
OLDEST = transformers.__version__.startswith("4.")
REASONS = {
    "gpt2": None,
    "llama": None,
    "mistral": None,  # its layers pass their window
    "gemma2": None,  # and the soft cap; every other layer has no window
    "gpt_oss": None,  # and the attention sinks
    "opt": "layer 0 has a mask of its own" if OLDEST else None,
    "gptj": NO_INTERFACE,
    "gpt_neo": NO_INTERFACE,
    "bloom": NO_INTERFACE,  # ALiBi
    "falcon": NO_INTERFACE,
    "llama4_text": OTHER_MASK,  # it attends in chunks
}


@pytest.mark.parametrize("name", REASONS)
def test_a_model_runs_ragged_or_there_is_a_reason(name):
    model = build(by_name(name))
    implementation = model.config._attn_implementation
    assert why_not_ragged(model) == REASONS[name]
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_a_window_that_only_the_mask_shows_is_found_however_long_it_is(model_type):
    # Short probes alone would find nothing, and texts longer than the window would get wrong tokens.
    sizes = {"vocab_size": 50, "max_position_embeddings": 10_000}
    experts = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
    grouped = {name: value for name, value in by_name("llama").config.items() if name != "model_type"}
    config = AutoConfig.for_model(model_type, **grouped | sizes | experts | windows)
    reason = why_not_ragged(AutoModelForCausalLM.from_config(config).eval())
    assert reason == (NO_INTERFACE if OLDEST else OTHER_MASK)


def test_a_model_that_does_not_come_from_transformers_runs_padded(letters):
    assert why_not_ragged(letters[0]) == "it is not a transformers model"
    assert isinstance(Engine(*letters).runner, PaddedRunner)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_a_long_prompt_reads_no_keys_that_all_its_queries_hide(llama, window):
    """Its segments end where their keys end, and together they are attention over all keys by the definition."""
    runner, table = RaggedRunner(clone_sharing_weights(llama[0]), 50, block_size=16), [*range(7), *range(9, 50)]
    sequence = Sequence("a", [1] * 700, 9)
    sequence.computed = 70
    segments = runner.segments(Chunk(sequence, 590, table), column=5)
    numbers = [(segment.start, segment.tokens, segment.past) for segment in segments]
    assert numbers == [(5, 256, 70), (261, 256, 326), (517, 78, 582)]

    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, length, 8, generator=generator) for length in (600, 800, 800))
    row, settings = AttentionMetadata(runner.pool, segments, torch.arange(0)), AttentionSettings(window=window)
    runner.pool.layers[0] = keys, values
    output = attend_row(row, 0, query, keys[:, :0], values[:, :0], settings)
    slots = [block * 16 + offset for block in table for offset in range(16)][:660]
    for position in (0, 1, 255, 256, 300, 589):
        own = slots[: 70 + position + 1]
        expected = reference_attention(query[:, [5 + position]], keys[:, own], values[:, own], window, None, None, None)
        assert torch.allclose(output[5 + position], expected[:, 0].float(), atol=1e-5)


WRONG = {
    "a query attends to the token behind it": lambda right: right.roll(1, dims=1) | right,
    "every query attends to every key": lambda right: torch.ones_like(right),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_trial_finds_a_wrong_mask(wrong, monkeypatch):
    right_mask = QuerySegment.mask

    def mask(self, settings, query):
        right = right_mask(self, replace(settings, softcap=1.0), query)  # with a softcap, chunks always need a mask
        if right is None:
            right = query.new_zeros(self.tokens, self.past + self.tokens)
        return torch.zeros_like(right).masked_fill(~WRONG[wrong](right == 0), float("-inf"))

    monkeypatch.setattr(QuerySegment, "mask", mask)
    assert "its logits differ by" in why_not_ragged(build(by_name("llama")))


# --- in the engine ----------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_run_ragged_runs_padded_and_the_reason_is_logged_unless_ragged_is_demanded(caplog):
    pair = build(by_name("gptj")), tokenizer()
    with caplog.at_level(logging.INFO):
        engine = Engine(*pair, EngineConfig(execution="auto"))
    assert isinstance(engine.runner, PaddedRunner) and engine.runner.name == "padded"
    assert engine.runner.not_ragged_because == NO_INTERFACE
    (message,) = caplog.messages
    assert message.startswith("GPTJForCausalLM runs padded") and NO_INTERFACE in message
    error = f'GPTJForCausalLM cannot run ragged: {NO_INTERFACE}. Use execution="padded" or "auto".'
    with pytest.raises(ValueError, match=error):
        Engine(*pair, EngineConfig(execution="ragged"))


def test_a_request_that_the_pool_can_never_hold_is_refused(llama):
    engine = Engine(*llama, EngineConfig(**RAGGED, num_blocks=5))
    prompt = [1] * 13
    with pytest.raises(ValueError, match=r"13 prompt tokens and 9 new ones need 6 blocks of 4 tokens, .* has 5 in all"):
        engine.add_request(prompt, SamplingParams(max_tokens=9))
    assert not engine.has_unfinished_requests()
    # 20 of these 21 tokens are computed.
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8 and output.error is None


def test_by_default_there_are_blocks_for_all_rows_at_their_longest(llama):
    blocks = Engine(*llama, EngineConfig(execution="ragged", max_batch_size=3)).block_manager
    assert (blocks.num_blocks, blocks.block_size) == (3 * 128 // 16, 16)


def test_a_cached_prefix_is_not_computed_again(llama):
    engine = Engine(*llama, EngineConfig(**RAGGED))
    shared = list(range(10, 23))  # three full blocks and one more token
    engine.generate([[*shared, 40, 41]], SamplingParams(max_tokens=1))
    assert engine.trace.prompt_tokens == 15
    (output,) = engine.generate([[*shared, 50, 51, 52]], SamplingParams(max_tokens=1))
    assert engine.trace.prompt_tokens == 15 + 4
    without = Engine(*llama, EngineConfig(**RAGGED, prefix_caching=False))
    without.generate([shared] * 2, SamplingParams(max_tokens=1), arrivals=[0, 1])
    assert without.trace.prompt_tokens == 26
    assert output.token_ids == expected(llama[0], [*shared, 50, 51, 52]).argmax(dim=-1).tolist()


def test_the_prompt_of_several_samples_is_computed_once(llama):
    engine = Engine(*llama, EngineConfig(**RAGGED, prefix_caching=False))
    prompt = list(range(10, 24))
    engine.generate([prompt], SamplingParams(max_tokens=2, temperature=1.0, seed=1, n=3, ignore_eos=True))
    assert engine.trace.prompt_tokens == 14 + 1 + 1  # the other samples compute only its last token
