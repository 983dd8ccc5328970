"""One call for all blocks gives the bits that many calls give, and is made only where it may be.

test_ragged_exactness.py covers it, too, while requests arrive, leave and are preempted in random order.
"""

import copy

import pytest
import torch
from conftest import PROMPTS, random_pair
from test_executor import RECOGNIZED, has_executor, make_runner, two_passes
from torch import nn

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import attention, kernels, linear
from helpers.fast.fused_executor import FusedExecutor
from helpers.fast.linear import choose_linear_backends
from helpers.models import clone_sharing_weights, quantize, round_inputs
from tests.support.families import build, by_name

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(bool(kernels.unavailable()), reason=f"there are no compiled kernels: {kernels.unavailable()}"),
]
DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS = [{"weights": "int8"}, {"weights": "int4"}, {"weights": "int8", "compute": "int8"}]
LENGTHS = [3, 9, 14, 6, 11] * 3  # of the outputs


@pytest.fixture(autouse=True)
def kernel_wins_chunks(monkeypatch):
    """Let the kernel compute the attention of chunks, too, so that one call can compute any row."""
    monkeypatch.setattr(attention, "_measure", lambda *_: True)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of rows of each call for all blocks."""
    calls, compute = [], FusedExecutor.__call__

    def call(blocks, hidden, *args):
        calls.append(len(hidden))
        return compute(blocks, hidden, *args)

    monkeypatch.setattr(FusedExecutor, "__call__", call)
    return calls


def make_engine(change=lambda model: None, family="gpt2", **settings) -> Engine:
    model, tokenizer = copy.deepcopy(random_pair(family))
    change(model)
    return Engine(model, tokenizer, EngineConfig(**{"max_batch_size": 3, "linear_backend": "compiled"} | settings))


def run(engine: Engine, monkeypatch, fused: bool = True, prompts: list = PROMPTS) -> list[torch.Tensor]:
    """Generate outputs of unequal lengths from unequal prompts, and return the logits of every pass."""
    logits, forward = [], engine.runner.forward

    def noted(plan):
        logits.append(forward(plan))
        return logits[-1]

    with monkeypatch.context() as context:
        context.setattr(engine.runner, "forward", noted)
        if not fused:
            context.setattr(FusedExecutor, "can_compute", lambda *_: False)
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in LENGTHS]
        engine.generate((prompts * len(params))[: len(params)], params)
    return logits


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(dtype, "floats") for dtype in DTYPES] + list(zip(DTYPES * 2, ["int4", "int8", "int8 by int8"], strict=False)),
    ids=str,
)
@pytest.mark.parametrize("name", sorted(RECOGNIZED))
def test_one_call_gives_the_bits_of_many_calls_in_every_family(name, dtype, weights, calls, monkeypatch):
    """Chunks and decodes share rows; some of three threads have no heads."""
    model = clone_sharing_weights(build(by_name(name), dtype))
    if weights != "floats":
        quantize(model, weights[:4])
    if weights == "int8 by int8":
        round_inputs(model)
    choose_linear_backends(model, "compiled")
    runner = make_runner(model, compiled=True)
    two_passes(runner)  # this writes the first keys, which cannot be done in one call
    calls.clear()
    with monkeypatch.context() as context:
        context.setattr(FusedExecutor, "can_compute", lambda *_: False)
        expected = two_passes(runner)
    assert not calls
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        assert are_equal(two_passes(runner), expected)
    assert calls == [24, 13] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"max_batch_size": 32}, {"max_tokens_per_step": 4}, {"speculative": "ngram"}, {"kv_cache": "int8"}),
        *({**weights, "max_batch_size": rows} for weights in WEIGHTS for rows in (3, 32)),
    ],
    ids=str,
)
def test_one_call_gives_the_bits_of_many_calls_in_an_engine(dtype, settings, calls, monkeypatch, always_drafts):
    """Drafts see the keys of the rows before them."""
    engine = make_engine(dtype=dtype, block_size=4, **settings)
    calls.clear()
    actual = run(engine, monkeypatch)
    assert len(calls) == len(actual) - 1, "all passes but that which writes the first keys"
    assert are_equal(actual, run(make_engine(dtype=dtype, block_size=4, **settings), monkeypatch, fused=False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_chunk_goes_through_the_mlp_in_parts(dtype, calls, monkeypatch):
    """2,048 rows take four."""

    def lengthen(model):
        model.config.max_position_embeddings = 2048

    def logits_of_a_long_prompt(fused):
        engine = make_engine(lengthen, "llama", dtype=dtype, max_tokens_per_step=2048)
        run(engine, monkeypatch, fused)  # this writes the first keys, which cannot be done in one call
        return run(engine, monkeypatch, fused, [list(range(1, 101)) * 11])

    actual = logits_of_a_long_prompt(fused=True)
    assert max(calls) == 2048
    assert are_equal(actual, logits_of_a_long_prompt(fused=False))


# --- where it may be made ---------------------------------------------------------------------------------------------


def use_another_activation(model) -> None:
    for block in model.transformer.h:
        block.mlp.act = nn.GELU()


def replace_a_layer(model) -> None:
    model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *_: None)


NOT_FUSED = {
    "another backend": {"linear_backend": "pytorch"},
    "no kernels": {"kernels": False},
    "an activation without a kernel": {"change": use_another_activation},
    "a layer that is not replaced": {"change": replace_a_layer},
}


@pytest.mark.parametrize("settings", NOT_FUSED.values(), ids=NOT_FUSED)
def test_a_model_with_other_operations_is_computed_in_many_calls(settings, calls, monkeypatch):
    engine = make_engine(**settings)
    run(engine, monkeypatch)
    assert not calls
    assert has_executor(engine.runner) or settings.get("change") is replace_a_layer


@pytest.mark.parametrize("slots", [[10**9], [-(10**9)], []], ids=str)
def test_a_slot_that_does_not_exist_is_an_error(slots, calls):
    """A student's function may return it."""
    engine = make_engine()
    usual = engine.runner.slot_mapping
    engine.runner.slot_mapping = lambda table, size, start, end: slots if start else usual(table, size, start, end)
    calls.clear()
    with pytest.warns(UserWarning, match="IndexError"):
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(calls) <= 1, "the prompt's"


@pytest.mark.parametrize("dtype", DTYPES)
def test_beyond_these_rows_the_blocks_are_computed_in_many_calls(dtype, calls, monkeypatch):
    """In float32, rounding changes no token."""
    for name in ("MIN_LAYER_BYTES", "MIN_MODEL_BYTES"):
        monkeypatch.setattr(linear, name, 0)
    chosen = ["compiled"] * 3 + ["pytorch"] * 4
    monkeypatch.setattr(linear, "_choose", lambda layers, *_: [chosen] * len(layers))
    engine = make_engine(linear_backend="auto", max_batch_size=16, dtype=dtype)
    calls.clear()
    logits = run(engine, monkeypatch)
    assert calls and max(calls) <= 11 < max(map(len, logits)), "with 16 rows, another product is faster"
    if dtype is torch.float32:
        expected = run(make_engine(linear_backend="pytorch", max_batch_size=16), monkeypatch)
        assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(logits, expected, strict=True))


# --- copies and changes -----------------------------------------------------------------------------------------------


CHANGES = {
    "a weight is written": lambda block: block.mlp.c_fc.weight.mul_(2),
    "a weight moves": lambda block: setattr(block.attn.c_proj.weight, "data", block.attn.c_proj.weight * 2),
    "a weight is replaced": lambda block: setattr(
        block.mlp.c_fc.layer, "weight", nn.Parameter(block.mlp.c_fc.weight * 2)
    ),
    "a norm moves": lambda block: setattr(block.ln_2.weight, "data", block.ln_2.weight * 2),
}


INTEGERS_CHANGE = {
    "integers are written": lambda block: block.mlp.c_fc.words.zero_(),
    "integers are replaced": lambda block: setattr(block.mlp.c_fc.layer, "words", block.mlp.c_fc.words * 0),
}


@pytest.mark.parametrize(
    ("weights", "change"),
    [(None, change) for change in CHANGES.values()] + [("int8", change) for change in INTEGERS_CHANGE.values()],
    ids=[*CHANGES, *INTEGERS_CHANGE],
)
def test_a_change_of_the_weights_is_followed(weights, change, calls, monkeypatch):
    engine = make_engine(weights=weights)
    before = run(engine, monkeypatch)
    with torch.no_grad():
        change(engine.runner.model.transformer.h[1])
    run(engine, monkeypatch)  # some changes make the engine forget its cached prefixes, which the others reuse
    calls.clear()
    actual = run(engine, monkeypatch)
    assert len(calls) == len(actual), "all passes are computed in one call again"
    assert not torch.equal(actual[-1], before[-1])
    assert are_equal(actual, run(engine, monkeypatch, fused=False))
