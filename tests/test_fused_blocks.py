"""One call for all blocks of GPT-2 gives the bits that many calls give, and is made only where it may be.

test_ragged_exactness.py covers it, too, while requests arrive, leave and are preempted in random order.
"""

import copy

import pytest
import torch
from conftest import PROMPTS, random_pair
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from helpers import Engine, EngineConfig, SamplingParams, kernels
from helpers.runners import lean, linear
from helpers.runners.fused_blocks import FEW_ROWS, MAX_ROWS, FusedBlocks
from helpers.runners.linear_choice import ROWS

pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable()), reason=f"there are no compiled kernels: {kernels.unavailable()}"
)
LENGTHS = [3, 9, 14, 6, 11] * 7  # of the outputs


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of rows of each call for all blocks."""
    calls, compute = [], FusedBlocks.__call__

    def call(blocks, hidden, row):
        calls.append(len(hidden))
        return compute(blocks, hidden, row)

    monkeypatch.setattr(FusedBlocks, "__call__", call)
    return calls


def make_engine(change=lambda model: None, **settings) -> Engine:
    model, tokenizer = copy.deepcopy(random_pair("gpt2"))
    change(model)
    return Engine(model, tokenizer, EngineConfig(**{"max_batch_size": 3, "linear_backend": "compiled"} | settings))


def run(engine: Engine, monkeypatch) -> list[torch.Tensor]:
    """Generate outputs of unequal lengths from unequal prompts, and return the logits of every pass."""
    logits, forward = [], engine.runner.forward

    def noted(plan):
        logits.append(forward(plan))
        return logits[-1]

    with monkeypatch.context() as context:
        context.setattr(engine.runner, "forward", noted)
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in LENGTHS]
        engine.generate((PROMPTS * len(LENGTHS))[: len(LENGTHS)], params)
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"max_batch_size": 32}, {"max_tokens_per_step": 4}, {"speculative": "ngram"}], ids=str
)
def test_one_call_gives_the_bits_of_many_calls(dtype, threads, settings, calls, monkeypatch, always_drafts):
    """Two heads, so the third thread has none; drafts see the keys of the rows before them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = run(make_engine(dtype=dtype, block_size=4, **settings), monkeypatch)
        num_calls = len(calls)
        monkeypatch.setattr(FusedBlocks, "can_compute", lambda blocks, rows: False)
        expected = run(make_engine(dtype=dtype, block_size=4, **settings), monkeypatch)
    finally:
        torch.set_num_threads(before)
    assert num_calls > 5 and len(calls) == num_calls
    if "max_batch_size" in settings:
        assert (max(calls) > FEW_ROWS) == (threads < 3), "more than a few rows need equal shares of the two heads"
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def test_all_blocks_are_computed_in_one_call_while_all_rows_decode(calls, monkeypatch):
    engine = make_engine(prefix_caching=False)
    calls.clear()
    run(engine, monkeypatch)
    work = [[step.work for step in one.row_steps if step.work != "empty"] for one in engine.trace.passes]
    assert calls == [len(rows) for rows in work if set(rows) == {"decode"}]


def replace_gelu(model) -> None:
    for block in model.transformer.h:
        block.mlp.act = nn.GELU()


def replace_a_layer(model) -> None:
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *_: None)


def resize_an_mlp(model) -> None:
    mlp, inner = model.transformer.h[1].mlp, 6
    mlp.c_fc, mlp.c_proj = Conv1D(inner, 32), Conv1D(32, inner)


def make_a_norm_an_rms_norm(model) -> None:
    model.transformer.h[1].ln_2 = LlamaRMSNorm(32)


NOT_FUSED = {
    "another backend": {"linear_backend": "pytorch"},
    "no kernels": {"kernels": False},
    "quantized weights": {"weights": "int8", "linear_backend": "auto"},
    "another activation": {"change": replace_gelu},
    "MLPs of unequal sizes": {"change": resize_an_mlp},
    "another norm": {"change": make_a_norm_an_rms_norm},
    "a layer that is not replaced": {"change": replace_a_layer},
}


@pytest.mark.parametrize("settings", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_model_with_other_operations_is_computed_in_many_calls(settings, calls, monkeypatch):
    engine = make_engine(**settings)
    run(engine, monkeypatch)
    assert not calls
    assert engine.runner.lean is not None or settings.get("change") is replace_a_layer


def test_heads_of_an_odd_size_are_computed_in_many_calls(calls):
    _, tokenizer = random_pair("gpt2")
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=6, n_head=2, n_layer=2)
    engine = Engine(GPT2LMHeadModel(config).eval(), tokenizer, EngineConfig(linear_backend="compiled"))
    engine.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.runner.lean is not None and not calls


def remove_biases_of_norms(model) -> None:
    for block in model.transformer.h:
        block.ln_1.bias = None


def use_linear_layers_without_bias(model) -> None:
    for block in model.transformer.h:
        for path in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            old = block.get_submodule(path)
            new = nn.Linear(old.nx, old.nf, bias=False)
            new.weight = nn.Parameter(old.weight.detach().T)
            block.set_submodule(path, new)


@pytest.mark.parametrize("change", [remove_biases_of_norms, use_linear_layers_without_bias])
def test_layers_without_bias_are_computed_in_one_call(change, calls, monkeypatch):
    actual, num_calls = run(make_engine(change), monkeypatch), len(calls)
    monkeypatch.setattr(FusedBlocks, "can_compute", lambda blocks, rows: False)
    assert num_calls and all(map(torch.equal, actual, run(make_engine(change), monkeypatch)))


@pytest.mark.parametrize("slots", [[10**9], [-(10**9)], []], ids=str)
def test_a_slot_that_does_not_exist_is_an_error(slots, calls):
    """A student's function may return it."""
    engine = make_engine()
    usual = engine.runner.slot_mapping
    engine.runner.slot_mapping = lambda table, size, start, end: slots if start else usual(table, size, start, end)
    calls.clear()
    with pytest.warns(UserWarning, match="IndexError"):
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert not calls


def test_the_copy_of_an_engine_has_addresses_of_its_own(calls, monkeypatch):
    engine = make_engine(prefix_caching=False)
    expected = run(engine, monkeypatch)
    other = copy.deepcopy(engine)
    calls.clear()
    with torch.no_grad():  # of the original only
        for parameter in engine.runner.model.transformer.h.parameters():
            parameter.zero_()
    assert all(map(torch.equal, run(other, monkeypatch), expected)) and calls


BACKENDS = [  # for each number in ROWS
    (["onednn_packed", "compiled", "onednn_packed"] + 3 * ["pytorch"], True),
    (["onednn_packed", "onednn_packed", "onednn_packed"] + 3 * ["compiled"], False),
]


@pytest.mark.parametrize("backends, is_fused", BACKENDS)
def test_in_each_layer_the_kernel_has_to_win_for_a_few_rows(backends, is_fused, calls, monkeypatch):
    monkeypatch.setattr(linear, "_choose", lambda layers, *_: [backends] * len(layers))
    run(make_engine(), monkeypatch)
    assert bool(calls) == is_fused


def test_many_rows_are_computed_in_many_calls(calls, monkeypatch):
    engine = make_engine(max_batch_size=MAX_ROWS + 1)
    calls.clear()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.generate(["A"] * (MAX_ROWS + 1), params)
    assert not calls
    engine.generate(["A"] * MAX_ROWS, params)
    assert calls == [MAX_ROWS] * 5, "a prompt of one token is computed like a decode"


@pytest.mark.parametrize("backend, limit", [("compiled", MAX_ROWS), ("onednn_packed", FEW_ROWS)])
def test_more_than_a_few_rows_need_the_kernel_to_win_in_all_layers(backend, limit, calls, monkeypatch):
    for_few = ["compiled"] * ROWS.index(16)
    one = for_few + [backend] * (len(ROWS) - len(for_few))
    monkeypatch.setattr(linear, "_choose", lambda layers, *_: [one] + [["compiled"] * len(ROWS)] * (len(layers) - 1))
    engine = make_engine(max_batch_size=16)
    calls.clear()
    for rows in (FEW_ROWS, 16):
        engine.generate(PROMPTS[:1] * rows, SamplingParams(max_tokens=2, ignore_eos=True))
    assert calls == [rows for rows in (FEW_ROWS, 16) if rows <= limit]


def write_a_weight(block) -> None:
    block.mlp.c_fc.weight.mul_(2)


def move_a_weight(block) -> None:
    block.attn.c_proj.weight.data = block.attn.c_proj.weight * 2


def write_a_norm(block) -> None:
    block.ln_1.bias.add_(0.5)


def replace_a_weight(block) -> None:
    block.mlp.c_fc.layer.weight = nn.Parameter(block.mlp.c_fc.weight * 2)


def replace_a_bias(block) -> None:
    block.mlp.c_fc.layer.bias = nn.Parameter(block.mlp.c_fc.bias + 0.5)


CHANGES = [write_a_weight, move_a_weight, replace_a_weight, replace_a_bias, write_a_norm]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_weights_is_followed(change, calls, monkeypatch):
    engine = make_engine()
    before = run(engine, monkeypatch)
    with torch.no_grad():
        change(engine.runner.model.transformer.h[1])
    actual = run(engine, monkeypatch)
    assert not torch.equal(actual[-1], before[-1])
    monkeypatch.setattr(lean.GPT2Forward, "fused_blocks", lambda *_: None)
    assert all(map(torch.equal, actual, run(engine, monkeypatch)))
