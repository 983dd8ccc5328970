"""With `batch_invariant=True`, a request's logits are the same bits alone and in company, in whatever chunks.

Each test also shows that its claim does not hold by itself: without the setting, the bits differ.
"""

import pytest
import torch
import transformers
from conftest import random_pair
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.fast import acceleration, kernels
from helpers.fast.batch_invariant import why_not_invariant
from helpers.fast.linear import FastLinear, choose_linear_backends
from helpers.models import clone_sharing_weights
from tests.support.families import FAMILIES, CountingScheduler, build, not_ragged_because, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")
# Experts multiply all rows that are routed to them at once. The test's Gemma 3n and 4 have a layer of 16 numbers, which
# is too narrow for PyTorch's elementwise operators.
MAY_BE_REFUSED = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3n_text", "gemma4_text"}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    """A Llama whose layers are wide enough that products take another order for other numbers of rows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=len(tokenizer()),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request.param)).eval()


def observed(model, requests, **settings):
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
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)) for prompt, tokens in requests
    ]
    while engine.has_unfinished_requests():
        engine.step()
    return [torch.stack(seen[id]) for id in ids], engine.scheduler


def requests_of(sizes):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(1, 200, (prompt,), generator=generator).tolist(), output) for prompt, output in sizes]


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_requests_logits_are_the_same_bits_alone_and_in_company(model, threads):
    requests = requests_of([(37, 12), (5, 20), (60, 6), (1, 9), (18, 15), (44, 4)])
    torch.set_num_threads(threads)
    try:
        alone = [observed(model, [request], batch_invariant=True)[0][0] for request in requests]
        # Prompts in chunks of any size, prompts whose beginning is cached, and too little memory for all.
        together, scheduler = observed(
            model, requests * 2, batch_invariant=True, max_tokens_per_step=23, num_blocks=24, prefix_caching=True
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
    alone = [observed(model, [request], batch_invariant=True)[0][0] for request in requests]
    together, _ = observed(model, requests, batch_invariant=True, max_tokens_per_step=23)
    assert all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_large_model_with_quantized_weights_is_invariant(monkeypatch, weights):
    monkeypatch.setattr(acceleration, "MAX_COPIED_BYTES", 0)
    model, _ = load_model(weights=weights)
    requests = requests_of([(37, 6), (5, 9)])
    alone = [observed(model, [request], batch_invariant=True)[0][0] for request in requests]
    together, _ = observed(model, requests, batch_invariant=True, max_tokens_per_step=23)
    assert all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))


@needs_kernels
def test_without_the_setting_company_changes_bits(model):
    if model.dtype != torch.float32:
        pytest.skip("rounding to bfloat16 hides most differences")
    requests = requests_of([(37, 12), (5, 20), (60, 6), (1, 9)])
    settings = {"kernels": False, "linear_backend": "pytorch"}
    alone = [observed(model, [request], **settings)[0][0] for request in requests]
    together, _ = observed(model, requests, max_tokens_per_step=23, **settings)
    assert not all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_that_runs_ragged_is_invariant_or_refused(family):
    if not family.available:
        pytest.skip(f"transformers {transformers.__version__} does not know {family.config['model_type']}")
    if reason := not_ragged_because(family):
        pytest.skip(f"runs padded: {reason}")
    model, requests = build(family), requests_of([(23, 6), (5, 8), (31, 3)])
    try:
        alone = [observed(model, [request], batch_invariant=True)[0][0] for request in requests]
    except ValueError as error:
        assert "cannot run batch-invariant" in str(error) and family.name in MAY_BE_REFUSED
        return
    together, _ = observed(model, requests, batch_invariant=True, max_tokens_per_step=9)
    assert all(torch.equal(own, other) for own, other in zip(alone, together, strict=True))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["pytorch", "onednn", "onednn_packed"])
def test_a_backend_whose_rows_depend_on_their_number_is_refused(backend):
    with pytest.raises(ValueError, match=f"'{backend}', a row depends on the number of rows.* requires 'compiled' or "):
        Engine(*random_pair("llama"), EngineConfig(batch_invariant=True, linear_backend=backend))


def test_without_a_compiler_the_setting_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "unavailable", lambda *of: "there is no C++ compiler")
    with pytest.raises(ValueError, match="'compiled' does not work for float32 on cpu here"):
        Engine(*random_pair("llama"), EngineConfig(batch_invariant=True))


def test_padded_execution_is_refused():
    with pytest.raises(ValueError, match="Batch-invariant execution must be ragged, but the configuration says"):
        Engine(*random_pair("llama"), EngineConfig(batch_invariant=True, execution="padded"))


@needs_kernels
def test_a_linear_layer_of_an_unknown_class_is_refused():
    class Special(torch.nn.Linear):
        """A subclass may do more than multiply."""

    model, tokenizer = random_pair("llama")
    model = clone_sharing_weights(model)
    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Special
    with pytest.raises(ValueError, match=r"its layer model\.layers\.0\.mlp\.up_proj is not a plain linear layer"):
        Engine(model, tokenizer, EngineConfig(batch_invariant=True))


@needs_kernels
def test_the_trial_finds_products_that_depend_on_the_number_of_rows(model):
    """This is what refuses mixtures of experts, whose products are not in linear layers."""
    clone = clone_sharing_weights(model)
    if model.dtype == torch.float32:
        assert why_not_invariant(clone) is not None
    choose_linear_backends(clone, "compiled")
    assert why_not_invariant(clone) is None
