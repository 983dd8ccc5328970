"""An engine with a quantized KV cache gives the tokens of an ordinary model whose cache rounds on write.

test_fused_executor.py shows that one call for all blocks writes the same integers, and test_tensor_parallel.py that a
split model does. A number between two integers may become either, so requests with near ties are left out.
"""

import functools

import pytest
import torch
import transformers
from conftest import LONGEST, PROMPTS, random_pair, spied
from test_beam_search import by_transformers, check_beams
from test_kernels import SIZES, Cache
from test_speculation import WrongAtTheEnd
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import Engine, EngineConfig, RoundedKVCache, SamplingParams
from helpers.fast import kernels
from helpers.features.quantized_kv_cache.pool import QuantizedKVPool, QuantizedVectors
from helpers.features.quantized_kv_cache.rounding import quantize_vectors, rounded
from helpers.runners import ragged_or_padded
from tests.support.engine_machine import EVENTS, GREEDY, EngineMachine, run_machine
from tests.support.families import LEAD, by_name, generate, lead, reference, serve_ragged, skip_unless_ragged, tokenizer

needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")
# Learned and rotary positions, grouped and single KV heads, windows, norms of heads, bounded scores, sinks.
NAMES = ["gpt2", "gpt_bigcode", "llama", "mistral", "qwen3", "gemma2", "gemma3n_text", "gpt_oss"]


def alone(model, tokenizer, prompt: str, max_tokens: int) -> list[int]:
    """Return the token ids that `model.generate` gives a prompt by itself, with a cache that rounds."""
    return rounded_output(model, tokenizer, prompt)[:max_tokens]


@functools.cache
def rounded_output(model, tokenizer, prompt: str) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    settings = {"do_sample": False, "max_new_tokens": LONGEST, "pad_token_id": tokenizer.pad_token_id}
    output = model.generate(**inputs, **settings, past_key_values=RoundedKVCache())
    return output[0, inputs["input_ids"].size(1) :].tolist()


def make_engine(pair, **settings) -> Engine:
    settings = {"kv_cache": "int8", "max_batch_size": 4, "block_size": 4, "max_tokens_per_step": 11} | settings
    return Engine(*pair, EngineConfig(**settings))


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_the_largest_number_becomes_127_and_ties_go_to_even_integers():
    vectors = torch.tensor([[127.0, -0.5, 1.5, 2.5, -126.6], [0.0] * 5, [-4e-30, 1e-30, 0, 0, 0]])
    integers, scales = quantize_vectors(vectors)
    assert integers.tolist() == [[127, 0, 2, 2, -127], [0] * 5, [-127, 32, 0, 0, 0]]
    assert scales[0] == 1 and torch.equal(rounded(vectors)[1], torch.zeros(5))


def test_the_reference_is_a_cache_that_holds_rounded_vectors():
    model, _ = random_pair("llama")
    ids, caches = torch.arange(1, 8)[None], [transformers.DynamicCache(), RoundedKVCache()]
    for cache in caches:
        model(ids[:, :4], past_key_values=cache)
        model(ids[:, 4:], past_key_values=cache)
    usual, ours = (cache.layers[0] for cache in caches)  # the first layer's keys depend on no rounding
    for name in ("keys", "values"):
        assert torch.equal(getattr(ours, name), rounded(getattr(usual, name)))
        assert not torch.equal(getattr(ours, name), getattr(usual, name))


# --- tokens -----------------------------------------------------------------------------------------------------------


@functools.cache
def rounded_reference(name: str) -> list[tuple]:
    """Return the requests of a family's reference, each with what `generate` gives it from a rounded cache."""
    plain = reference(by_name(name))
    return [(request, *generate(plain.model, request, past_key_values=RoundedKVCache())) for request in plain.requests]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_fast", [False, True], ids=["PyTorch", "fast"])
def test_chunks_preemptions_and_sharing_give_the_tokens_of_the_reference(name, is_fast):
    skip_unless_ragged(by_name(name))
    plain = reference(by_name(name))
    results = rounded_reference(name)
    clear = [(request, tokens) for request, tokens, logits in results if lead(logits) > 2 * LEAD]
    requests, expected = (list(column) * 2 for column in zip(*clear, strict=True))
    settings = {} if is_fast else {"kernels": False, "linear_backend": "pytorch"}
    tokens, engine = serve_ragged(plain.model, requests, seed=0, kv_cache="int8", **settings)
    assert tokens == expected and len(clear) >= 5
    assert [tokens for _, tokens, _ in results] != plain.tokens, "rounding changes nothing here"
    events = engine.scheduler
    assert events.num_preempted > 3 and events.num_partial_chunks > 10 and events.num_cached_tokens > 20


class RoundedMachine(EngineMachine):
    params, spare_blocks, greedy_alone = GREEDY, (0, 1), staticmethod(alone)

    def draw_settings(self, draw, longest):
        return super().draw_settings(draw, longest) | {"execution": "ragged", "kv_cache": "int8"}


def test_whatever_happens_every_greedy_request_gets_the_tokens_of_the_reference():
    events = run_machine("Rounded", 12, 20, RoundedMachine, names=("llama",))
    assert all(events[name] > 5 for name in EVENTS), events


def test_drafts_change_no_token(always_drafts):
    pair, params = random_pair("llama"), SamplingParams(max_tokens=12)
    expected = [output.token_ids for output in make_engine(pair).generate(PROMPTS[:6], params)]
    texts = [pair[1](prompt)["input_ids"] + tokens for prompt, tokens in zip(PROMPTS[:6], expected, strict=True)]
    engine = make_engine(pair, speculative=WrongAtTheEnd(texts), max_tokens_per_step=20)
    assert [output.token_ids for output in engine.generate(PROMPTS[:6], params)] == expected
    assert 5 < engine.trace.accepted_tokens < engine.trace.drafted_tokens


def test_beams_are_those_of_transformers_with_the_same_cache():
    pair = random_pair("gpt2")
    expected = by_transformers(*pair, PROMPTS[1], 3, 12, past_key_values=RoundedKVCache())
    check_beams(make_engine(pair).beam_search(PROMPTS[1], 3, 12), expected)


def test_samples_copy_integers_and_scales(random_pairs, monkeypatch):
    copies, params = [], SamplingParams(max_tokens=9, temperature=1.0, n=3, seed=5, ignore_eos=True)
    monkeypatch.setattr(QuantizedKVPool, "copy_block", spied(QuantizedKVPool.copy_block, copies))
    shared = make_engine(random_pairs).generate(PROMPTS[:1], params)
    assert copies
    single = [SamplingParams(max_tokens=9, temperature=1.0, seed=5 + n, ignore_eos=True) for n in range(3)]
    separate = make_engine(random_pairs, prefix_caching=False).generate(PROMPTS[:1] * 3, single)
    assert [output.token_ids for output in shared] == [output.token_ids for output in separate]


# --- the kernel -------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("dim", [6, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 9])
def test_the_kernel_computes_attention_to_the_rounded_vectors(dtype, tolerance, dim, heads, kv_heads, window):
    """Decodes and chunks; a slot without a token has a scale that is not a number."""
    cache = Cache(SIZES, kv_heads, dim, 16, dtype)
    query, stored = torch.randn(heads, cache.total, dim).to(dtype), []
    for vectors in (cache.keys, cache.values):
        stored.append(QuantizedVectors(*vectors.shape, vectors))
        stored[-1].index_copy_(1, torch.arange(vectors.shape[1]), vectors)
    cache.keys, cache.values = stored
    actual = cache.attend(query, window)
    cache.keys, cache.values = (quantized[:] for quantized in stored)
    assert (actual.float() - cache.attend(query, window).float()).abs().max() < tolerance


# --- memory and refusals ----------------------------------------------------------------------------------------------


def small_llama(head_dim: int):
    sizes = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer()), head_dim=head_dim, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize(("head_dim", "least"), [(128, 1.93), (16, 1.59)])
def test_the_same_bytes_hold_more_tokens_than_in_bfloat16(head_dim, least, monkeypatch):
    """A scale has 4 bytes, so what it costs depends on the head dimension."""
    monkeypatch.setattr(ragged_or_padded, "MAX_KV_BYTES", 2**20)
    tokens, model = {}, small_llama(head_dim)
    for kv_cache in ("auto", "int8"):
        engine = Engine(model, tokenizer(), EngineConfig(kv_cache=kv_cache, block_size=4))
        engine.generate(["What comes up"], SamplingParams(max_tokens=2))
        taken = sum(tensor.nbytes for tensor in engine.runner.pool.tensors())
        assert 0.98 * 2**20 < taken <= 2**20
        tokens[kv_cache] = engine.block_manager.num_blocks * 4
    assert tokens["int8"] / tokens["auto"] >= least


def test_a_model_that_caches_other_vectors_than_its_attention_reads_is_refused():
    """transformers 4 expands DeepSeek's latent vectors first, and can serve as a reference."""
    model = reference(by_name("deepseek_v3")).model
    if transformers.__version__.startswith("4."):
        make_engine((model, tokenizer()))
    else:
        with pytest.raises(ValueError, match=r"caches keys of 1 heads of 16 .*reads 4 of 24.* Use kv_cache=\"auto\""):
            make_engine((model, tokenizer()))


def test_a_model_that_runs_padded_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="requires ragged execution, but its layers do not use transformers'"):
        make_engine((reference(by_name("bloom")).model, tokenizer()))
