"""The lean forward computes what the model computes, and only models that it knows are run through it.

The engines of test_ragged_exactness.py use it, too, for the families listed here.
"""

import pytest
import torch
import transformers
from conftest import PROMPTS, alone, spied
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from helpers import Engine, EngineConfig, SamplingParams, kernels
from helpers.engine import Chunk, Plan, Sequence
from helpers.models import clone_sharing_weights
from helpers.runners import RaggedRunner, attention, lean
from tests.families import FAMILIES, build, by_name, not_ragged_because

pytestmark = pytest.mark.usefixtures("one_thread")
LEAN = {"gpt2", "llama", "llama (3.1)", "mistral", "qwen2", "qwen3"}
OLDEST = transformers.__version__.startswith("4.")
if not OLDEST:
    LEAN.add("gemma")  # transformers 4 scales its embeddings outside of them
COMPILED = [False] if kernels.unavailable() else [False, True]
in_both_ways = pytest.mark.parametrize("compiled", COMPILED, ids=lambda one: "kernels" if one else "PyTorch")


def lean_runner(model, compiled: bool = False) -> RaggedRunner:
    return RaggedRunner(clone_sharing_weights(model), num_blocks=32, block_size=4, compiled=compiled, lean=True)


def two_passes(runner: RaggedRunner) -> list[torch.Tensor]:
    """Return the logits of two passes over three sequences: chunks first, then a decode, a chunk and a prompt."""
    one, other, third = (Sequence(name, list(range(3, 3 + n)), 9) for name, n in [("a", 11), ("b", 20), ("c", 5)])
    tables = {one: [0, 1, 2], other: [7, 5, 3, 9, 11], third: [4, 6]}
    logits = []
    for sizes in ({one: 11, other: 13}, {one: 1, other: 7, third: 5}):
        chunks = [Chunk(sequence, tokens, tables[sequence]) for sequence, tokens in sizes.items()]
        logits.append(runner.forward(Plan(chunks)))
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
        one.token_ids.append(40)
    return logits


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@in_both_ways
def test_the_families_that_are_run_lean_are_those_of_the_list(family, compiled):
    if not family.available or not_ragged_because(family):
        pytest.skip("not ragged with this version of transformers")
    assert (lean_runner(build(family), compiled).lean is not None) == (family.name in LEAN)


def test_a_model_of_another_type_is_called_as_usual_even_if_a_short_trial_finds_no_difference():
    """OLMo clips large queries, which the trial's short texts do not have."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = AutoConfig.for_model("olmo", num_hidden_layers=2, clip_qkv=10.0, max_position_embeddings=64, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()

    assert lean_runner(model).lean is None


@pytest.mark.parametrize("name", sorted(LEAN))
@in_both_ways
def test_a_lean_pass_gives_the_model_s_logits(name, compiled):
    runner = lean_runner(build(by_name(name)), compiled)
    actual = two_passes(runner)
    runner.lean = None
    for one, expected in zip(actual, two_passes(runner), strict=True):
        assert one.shape == expected.shape
        assert (one - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@in_both_ways
def test_in_bfloat16_a_lean_pass_is_as_close_to_float32_as_the_model_is(name, compiled):
    exact = lean_runner(build(by_name(name)))
    exact.lean = None
    runner = lean_runner(build(by_name(name), torch.bfloat16), compiled)
    assert runner.lean is not None
    actual = two_passes(runner)
    runner.lean = None
    for one, usual, expected in zip(actual, two_passes(runner), two_passes(exact), strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - expected).abs().mean() <= 1.3 * (usual - expected).abs().mean()


def gpt2(**settings) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 60, "initializer_range": 0.5}
    sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **settings)).eval()


def test_what_a_layer_asks_of_attention_is_noted_on_the_trial():
    if not OLDEST:  # transformers 4 passes no scaling on
        runner = lean_runner(gpt2(scale_attn_by_inverse_layer_idx=True))
        assert len({settings.scaling for settings in runner.lean.settings}) == 3
    windows = [settings.window for settings in lean_runner(build(by_name("qwen2"))).lean.settings]
    assert windows == [None, 8]


class OtherNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Adapted(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.adapter = layer, nn.Linear(32, 96)

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


def with_new_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


UNKNOWN = {
    "a norm of another class": lambda model: setattr(model.transformer.h[1], "ln_1", OtherNorm(32)),
    "a block with one more module": lambda model: model.transformer.h[2].add_module("adapter", nn.Linear(32, 32)),
    "a block without its norm": lambda model: setattr(model.transformer.h[1], "ln_2", None),
    "a layer with an attribute that means something": lambda model: setattr(model.transformer.h[0].mlp, "scale", 2.0),
    "a block with a forward of its own": lambda model: with_new_forward(model.transformer.h[0]),
    "a base with a forward of its own": lambda model: with_new_forward(model.transformer),
    "a model in training": lambda model: model.train(),
    "a head with one more module": lambda model: model.add_module("value_head", nn.Linear(32, 1)),
}


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_a_model_that_differs_from_the_known_ones_is_called_as_usual(unknown):
    model = gpt2()
    assert lean_runner(model).lean is not None
    UNKNOWN[unknown](model)
    assert lean_runner(model).lean is None


def test_layers_that_replace_the_linear_ones_are_called(monkeypatch):
    model = gpt2()
    model.transformer.h[1].attn.c_attn = Adapted(model.transformer.h[1].attn.c_attn)
    runner = lean_runner(model)
    actual = two_passes(runner)
    runner.lean = None
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(actual, two_passes(runner), strict=True))


def test_a_model_whose_logits_are_not_reproduced_is_called_as_usual(monkeypatch):
    model = build(by_name("llama"))
    monkeypatch.setattr(lean, "rotate", lambda x, cos, sin: x * cos)
    assert lean_runner(model).lean is None


def test_a_trial_that_raises_is_not_an_error(monkeypatch):
    def fail(*_):
        raise RuntimeError("another shape")

    monkeypatch.setattr(lean, "rotate", fail)
    assert lean_runner(build(by_name("llama"))).lean is None


# --- hooks ------------------------------------------------------------------------------------------------------------

HOOKED = {
    "the model": lambda model: model,
    "a block": lambda model: model.transformer.h[1],
    "a norm": lambda model: model.transformer.h[1].ln_2,
}


@pytest.mark.parametrize("module", HOOKED)
def test_a_hook_is_called_although_the_model_is_known(module):
    runner, calls = lean_runner(gpt2()), []
    expected = two_passes(runner)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        hook = getattr(HOOKED[module](runner.model), register)(lambda *_: calls.append(1))
        actual = two_passes(runner)
        hook.remove()
        assert len(calls) == 2
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(actual, expected, strict=True))
        two_passes(runner)
        assert len(calls) == 2, "the hook is gone"
        calls.clear()


def test_a_model_with_a_hook_is_called_as_usual():
    model = gpt2()
    model.transformer.h[0].register_forward_hook(lambda *_: None)
    assert lean_runner(model).lean is None


def test_a_hook_for_all_modules_is_called():
    runner, calls = lean_runner(gpt2()), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    two_passes(runner)
    hook.remove()
    assert calls.count("GPT2Block") == 2 * 3


# --- what is computed -------------------------------------------------------------------------------------------------


@in_both_ways
def test_a_lean_pass_computes_the_head_only_where_a_token_is_sampled(compiled, monkeypatch):
    runner, calls = lean_runner(gpt2(), compiled), []
    monkeypatch.setattr(runner.model.lm_head, "forward", spied(runner.model.lm_head.forward, calls))
    two_passes(runner)
    sequence = Sequence("d", list(range(9)), 9)
    assert runner.forward(Plan([Chunk(sequence, 4, [0, 1, 2])])).shape == (0, 60)
    assert [len(x) for (x,) in calls] == [1, 3, 0]


@in_both_ways
def test_a_lean_pass_calls_no_module_of_transformers(compiled, monkeypatch):
    runner, calls = lean_runner(gpt2(), compiled), []
    forward = runner.model.transformer.forward
    monkeypatch.setattr(
        runner.model.transformer, "forward", lambda *args, **kw: calls.append(1) or forward(*args, **kw)
    )
    two_passes(runner)
    assert not calls
    runner.lean = None
    two_passes(runner)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@in_both_ways
def test_a_lean_pass_changes_no_weight(name, compiled):
    model = build(by_name(name))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    two_passes(lean_runner(model, compiled))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("kernel_wins", [False, True])
@pytest.mark.parametrize("is_lean", [False, True])
def test_an_engine_gives_the_model_s_tokens_whichever_way_is_chosen(random_pairs, kernel_wins, is_lean, monkeypatch):
    """The attention of chunks is chosen by measurement, so a test must force both choices."""
    monkeypatch.setattr(attention, "kernel_wins_chunks", lambda query, keys: kernel_wins)
    model, tokenizer = random_pairs
    engine = Engine(model, tokenizer, EngineConfig(execution="ragged", max_tokens_per_step=20, block_size=4))
    assert engine.runner.lean is not None
    if not is_lean:
        engine.runner.lean = None
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=20))
    assert [output.token_ids for output in outputs] == [alone(model, tokenizer, prompt, 20) for prompt in PROMPTS]
