"""With `batch_invariant=True`, a request's logits are the same bits alone and in company, in whatever chunks.

Each test also shows that its claim does not hold by itself: without the setting, the bits differ.
"""

import copy
import random

import pytest
import torch
import transformers
from conftest import random_pair
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import acceleration, kernels
from helpers.fast.decoder_blocks import FAMILIES as DESCRIBED
from helpers.fast.linear import FastLinear
from tests.support.families import FAMILIES, CountingScheduler, build, skip_unless_ragged, tokenizer

ROPE = "rope_parameters" if transformers.__version__ >= "5" else "rope_scaling"
KNOWN = frozenset().union(*(family.types for family in DESCRIBED))
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    """A Llama whose layers are wide enough that products take another order for other numbers of rows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", vocab_size=len(tokenizer()), hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request.param)).eval()


def observed(model, requests, one_by_one=False, **settings):
    """Return for each request the logits of all its sampled tokens, from an engine with few tokens per iteration."""
    config = EngineConfig(
        execution="ragged", max_batch_size=4, block_size=4, scheduler_cls=CountingScheduler, **settings
    )
    engine = Engine(model, tokenizer(), config)
    seen = {}
    forward = engine.runner.forward

    def spy(plan):
        logits = forward(plan)
        for row, chunk in enumerate(chunk for chunk in plan.chunks if chunk.samples_token):
            seen.setdefault(chunk.sequence.request_id, []).append(logits[row].clone())
        return logits

    engine.runner.forward = spy
    for prompt, tokens in requests:
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        while one_by_one and engine.has_unfinished_requests():
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    return [torch.stack(seen[id]) for id in range(len(requests))], engine.scheduler


def requests_of(sizes):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(1, 200, (prompt,), generator=generator).tolist(), output) for prompt, output in sizes]


@needs_kernels
@pytest.mark.parametrize("threads, products", [(2, {}), (3, {}), (2, {"weights": "int8", "compute": "int8"})])
def test_a_requests_logits_are_the_same_bits_alone_and_in_company(model, threads, products):
    requests = requests_of([(37, 12), (5, 20), (60, 6), (1, 9), (18, 15), (44, 4)])
    torch.set_num_threads(threads)
    try:
        settings = {"batch_invariant": True, **products}
        alone = observed(model, requests, one_by_one=True, **settings)[0]
        # Prompts in chunks of any size, prompts whose beginning is cached, and too little memory for all.
        together, scheduler = observed(
            model, requests * 2, max_tokens_per_step=23, num_blocks=24, prefix_caching=True, **settings
        )
        assert scheduler.num_preempted and scheduler.num_partial_chunks and scheduler.num_cached_tokens
    finally:
        torch.set_num_threads(1)
    for own, first, second in zip(alone, together, together[len(requests) :], strict=False):
        assert torch.equal(own, first) and torch.equal(own, second)


@needs_kernels
@pytest.mark.parametrize("limit, backend", [(2**30, "compiled"), (0, "compiled_unpacked")])
def test_a_large_model_is_invariant_without_copies_of_its_weights(model, monkeypatch, limit, backend):
    monkeypatch.setattr(acceleration, "MAX_COPIED_BYTES", limit)
    engine = Engine(model, tokenizer(), EngineConfig(batch_invariant=True))
    layers = [module for module in engine.runner.model.modules() if isinstance(module, FastLinear)]
    assert layers and {name for layer in layers for name in layer.backends} == {backend}
    requests = requests_of([(37, 12), (5, 20), (60, 6)])
    alone = observed(model, requests, one_by_one=True, batch_invariant=True)[0]
    together, _ = observed(model, requests, batch_invariant=True, max_tokens_per_step=23)
    assert all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_that_runs_ragged_is_invariant_or_refused(family):
    skip_unless_ragged(family)
    model, requests = build(family), requests_of([(23, 6), (5, 8), (31, 3)])
    try:
        alone = observed(model, requests, one_by_one=True, batch_invariant=True)[0]
    except ValueError as error:
        assert "cannot run batch-invariant" in str(error)
        # Before version 5, transformers scaled Gemma's embeddings outside of the embedding.
        refused = ("gemma", "gemma3_text", "opt (350m)", "phi3 (longrope)")
        assert family.config["model_type"] not in KNOWN or family.name in refused
        return
    assert family.config["model_type"] in KNOWN
    together, _ = observed(model, requests, batch_invariant=True, max_tokens_per_step=9)
    assert all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"linear_backend": "pytorch"}, "'pytorch', a row depends on the number of rows.* requires 'compiled' or "),
        ({"execution": "padded"}, "Batch-invariant execution must be ragged, but the configuration says"),
        ({"kernels": False}, "without kernels: leave out kernels=False"),
    ],
)
def test_settings_that_cannot_be_invariant_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        Engine(*random_pair("llama"), EngineConfig(batch_invariant=True, **config))


def test_without_a_compiler_the_setting_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "unavailable", lambda *of: "there is no C++ compiler")
    with pytest.raises(ValueError, match="'compiled' does not work for float32 on cpu here"):
        Engine(*random_pair("llama"), EngineConfig(batch_invariant=True))


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "hidden", "vocabulary", "threads"),
    [("gpt2", 8, 50, 2), ("gpt2", 96, 300, 1), ("llama", 24, 61, 2), ("llama", 72, 200, 2), ("qwen3", 40, 77, 2)],
)
def test_narrow_models_are_invariant_beside_prompts_of_any_length(kind, hidden, vocabulary, threads):
    """PyTorch divides long rows of narrow layers among threads, anywhere within a token."""
    names = {"n_embd": hidden, "n_layer": 2, "n_head": 2, "n_positions": 1024} if kind == "gpt2" else {
        "hidden_size": hidden, "intermediate_size": 3 * hidden + 2, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": hidden // 2, "max_position_embeddings": 1024}  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(hidden)
        config = AutoConfig.for_model(
            kind, vocab_size=vocabulary, initializer_range=0.3, bos_token_id=0, eos_token_id=0, **names
        )
        narrow = AutoModelForCausalLM.from_config(config).eval()
    draw = random.Random(hidden)
    requests = [([draw.randrange(1, vocabulary) for _ in range(length)], 5) for length in (9, 611, 37, 803)]
    torch.set_num_threads(threads)
    try:
        settings = {"batch_invariant": True, "num_blocks": 600}
        alone = observed(narrow, requests, one_by_one=True, max_tokens_per_step=2048, **settings)[0]
        for budget in (2048, 701):
            together, _ = observed(narrow, requests, max_tokens_per_step=budget, **settings)
            assert all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(1)


@needs_kernels
def test_a_model_without_kernels_for_all_of_its_parts_is_refused(model):
    for changed, said in (
        ({"hidden_act": "sigmoid"}, "no kernel computes the activation of block 0"),
        ({ROPE: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "its (positions|blocks)"),
    ):
        config = copy.deepcopy(model.config)
        for name, value in changed.items():
            setattr(config, name, value)
        other = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
        with pytest.raises(ValueError, match=f"cannot run batch-invariant: .*{said}"):
            Engine(other, tokenizer(), EngineConfig(batch_invariant=True))
