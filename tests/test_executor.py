"""An executor computes what the model computes, and only models that it recognizes are run through it.

The engines of test_ragged_exactness.py use it, too, for the families listed here.
"""

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from helpers.engine import Chunk, Plan, Sequence
from helpers.fast import kernels, plain_executor
from helpers.fast.attention import attend_with_kernel
from helpers.fast.executor import Executor
from helpers.fast.recognition import find_executor
from helpers.models import clone_sharing_weights
from helpers.runners import RaggedRunner
from tests.support.families import FAMILIES, build, by_name, skip_unless_ragged

RECOGNIZED = {"gpt2", "llama", "llama (3.1)", "mistral", "phi3", "phi3 (longrope)", "qwen2", "qwen3", "starcoder2"}
RECOGNIZED |= {"gpt_neox", "opt", "phi"}
OLDEST = transformers.__version__.startswith("4.")
if not OLDEST:
    # transformers 4 scales Gemma's embeddings outside of them, and has two modules for Gemma 3's positions.
    RECOGNIZED |= {"gemma", "gemma3_text"}
COMPILED = [False] if kernels.unavailable() else [False, True]
in_both_ways = pytest.mark.parametrize("compiled", COMPILED, ids=lambda compiled: "kernels" if compiled else "PyTorch")


def make_runner(model, compiled: bool = False) -> RaggedRunner:
    """Return a runner that has an executor if its model is recognized."""
    runner = RaggedRunner(clone_sharing_weights(model), num_blocks=32, block_size=4)
    runner.kernel = attend_with_kernel if compiled else None
    runner.call_model = find_executor(runner) or runner.call_model
    return runner


def has_executor(runner: RaggedRunner) -> bool:
    return isinstance(runner.call_model, Executor)


def call_as_usual(runner: RaggedRunner) -> None:
    runner.call_model = runner._call_model


def two_passes(runner: RaggedRunner) -> list[torch.Tensor]:
    """Return the logits of two passes over three sequences: chunks first, then a decode, a chunk and a prompt."""
    first, second, third = (Sequence(name, list(range(3, 3 + n)), 9) for name, n in [("a", 11), ("b", 20), ("c", 5)])
    tables = {first: [0, 1, 2], second: [7, 5, 3, 9, 11], third: [4, 6]}
    logits = []
    for sizes in ({first: 11, second: 13}, {first: 1, second: 7, third: 5}):
        chunks = [Chunk(sequence, tokens, tables[sequence]) for sequence, tokens in sizes.items()]
        logits.append(runner.forward(Plan(chunks)))
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
        first.token_ids.append(40)
    return logits


# --- which models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_families_with_an_executor_are_those_of_the_list(family):
    skip_unless_ragged(family)
    assert has_executor(make_runner(build(family), COMPILED[-1])) == (family.name in RECOGNIZED)


@pytest.mark.parametrize("name", sorted(RECOGNIZED))
@in_both_ways
def test_an_executor_gives_the_model_s_logits(name, compiled):
    runner = make_runner(build(by_name(name)), compiled)
    assert has_executor(runner)
    actual = two_passes(runner)
    call_as_usual(runner)
    for logits, expected in zip(actual, two_passes(runner), strict=True):
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())


@in_both_ways
def test_in_bfloat16_an_executor_is_as_close_to_float32_as_the_model_is(compiled):
    """A single pass may be a third closer or farther by chance."""
    ratios = []
    for name in ("gpt2", "llama", "mistral", "qwen2"):
        exact = make_runner(build(by_name(name)))
        call_as_usual(exact)
        runner = make_runner(build(by_name(name), torch.bfloat16), compiled)
        assert has_executor(runner)
        actual = two_passes(runner)
        call_as_usual(runner)
        for logits, usual, expected in zip(actual, two_passes(runner), two_passes(exact), strict=True):
            assert logits.dtype == torch.bfloat16
            ratios.append((logits - expected).abs().mean() / (usual - expected).abs().mean())
    assert sum(ratios) / len(ratios) < 1.1


def gpt2(**settings) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 60, "initializer_range": 0.5}
    sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **settings)).eval()


class OtherNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


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
    assert has_executor(make_runner(model))
    UNKNOWN[unknown](model)
    assert not has_executor(make_runner(model))


def test_a_model_with_a_bound_for_its_logits_is_called_as_usual():
    model = build(by_name("gemma3_text"))
    model.config.final_logit_softcapping = 30.0
    assert not has_executor(make_runner(model))


def raise_an_error(*_):
    raise RuntimeError("another shape")


@pytest.mark.parametrize("rotate", [lambda x, cos, sin: x * cos[:, None], raise_an_error])
def test_a_model_whose_logits_are_not_reproduced_on_the_trial_is_called_as_usual(rotate, monkeypatch, caplog):
    monkeypatch.setattr(plain_executor, "rotate", rotate)
    assert not has_executor(make_runner(build(by_name("llama"))))
    assert ("another shape" if rotate is raise_an_error else "other logits") in caplog.text


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_a_hook_is_called_although_the_model_is_known():
    runner, calls = make_runner(gpt2()), []
    expected = two_passes(runner)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        hook = getattr(runner.model.transformer.h[1], register)(lambda *_: calls.append(1))
        actual = two_passes(runner)
        hook.remove()
        assert len(calls) == 2
        assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(actual, expected, strict=True))
        two_passes(runner)
        assert len(calls) == 2, "the hook is gone"
        calls.clear()
