"""A packed layer is the plain layer, only faster: in every shape and precision, and wherever the operators are missing.

How much faster is nobody's to assert.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPTS, random_pair
from torch import nn
from torch.nn.functional import linear
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from helpers import generate_continuous, kernels, load_model
from helpers.prepacked import CompiledProduct, OneDNNProduct, PackedConv1D, PackedLinear, prepack, product_for

needs_operators = pytest.mark.skipif(
    not product_for(torch.ones(1), compiled=False),
    reason="no oneDNN linear layer on reordered weights",
)
by_both = pytest.mark.parametrize("product", [CompiledProduct, OneDNNProduct], indirect=True)


@pytest.fixture(scope="module", params=["embedded", "gpt2", "llama"])
def pair(request):
    """On the CPU also where there is a GPU: only there are layers packed."""
    model, tokenizer = load_model() if request.param == "embedded" else random_pair(request.param)
    return copy.deepcopy(model).to("cpu"), tokenizer


def shell(model):
    """Modules of its own, the tensors of the original: what an engine hands to `prepack`."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


@pytest.fixture
def product(request):
    if request.param is CompiledProduct and kernels.unavailable():
        pytest.skip(f"no compiled kernels: {kernels.unavailable()}")
    if request.param is OneDNNProduct and not product_for(torch.ones(1), compiled=False):
        pytest.skip("no oneDNN linear layer on reordered weights")
    return request.param


def packed(model, product=OneDNNProduct):
    model = shell(model)
    assert prepack(model, min_bytes=0, compiled=product is CompiledProduct) > 0
    assert all(type(module.product) is product for module in model.modules() if hasattr(module, "product"))
    return model


def layer_of(kind: str, dtype=torch.float32):
    """A layer from 24 to 40 numbers, neither a multiple of a kernel's block, inside the model that prepack expects."""
    torch.manual_seed(0)
    layer = Conv1D(nf=40, nx=24) if kind == "Conv1D" else nn.Linear(24, 40, bias=kind == "Linear with bias")
    nn.init.normal_(layer.weight)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return nn.Sequential(layer).to(dtype)


KINDS = ["Linear with bias", "Linear without bias", "Conv1D"]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@by_both
def test_a_packed_layer_gives_the_plain_layers_output_in_every_shape(kind, dtype, tolerance, product):
    plain = layer_of(kind, dtype)
    fast = packed(plain, product)
    assert type(fast[0]) is (PackedConv1D if kind == "Conv1D" else PackedLinear)
    for rows in (1, 2, 3, 8, 33, 200):
        for shape in [(1, rows, 24), (rows, 1, 24), (rows, 24)]:
            check(fast, plain, torch.randn(shape).to(dtype), tolerance)
        last_tokens = torch.randn(rows, 2, 24).to(dtype)[:, -1:]  # not contiguous
        check(fast, plain, last_tokens, tolerance)
    no_rows = torch.randn(0, 1, 24).to(dtype)
    check(fast, plain, no_rows, tolerance)


def check(fast, plain, x, tolerance):
    torch.testing.assert_close(fast(x), plain(x), rtol=tolerance, atol=tolerance)


@by_both
def test_packing_changes_no_greedy_token(pair, product):
    model, tokenizer = pair
    requests = [(prompt, 5 + 3 * row) for row, prompt in enumerate(PROMPTS[:6])]
    plain = generate_continuous(requests, 4, model, tokenizer).outputs
    fast = generate_continuous(requests, 4, packed(model, product), tokenizer).outputs
    assert [output.token_ids for output in fast] == [output.token_ids for output in plain]


@torch.no_grad()
@by_both
def test_logits_in_bfloat16_are_as_close_as_rounding_allows(pair, product):
    model = pair[0]
    ids = torch.arange(1, 31).view(3, 10)
    exact, half = model(ids).logits, copy.deepcopy(model).to(torch.bfloat16)
    error, packed_error = ((m(ids).logits.float() - exact).abs().max() for m in (half, packed(half, product)))
    assert 0 < packed_error < 2 * error


@needs_operators
@torch.no_grad()
def test_the_original_model_is_untouched(pair):
    model = pair[0]
    ids = torch.arange(1, 6)[None]
    classes = [type(module) for module in model.modules()]
    weights, logits = copy.deepcopy(model.state_dict()), model(ids).logits
    addresses = {name: weight.data_ptr() for name, weight in model.state_dict().items()}

    fast = packed(model)
    fast(ids)

    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(ids).logits, logits)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])
        assert fast.state_dict()[name].data_ptr() == weight.data_ptr() == addresses[name], "no plain weight is copied"


@needs_operators
@torch.no_grad()
def test_a_head_tied_to_the_embedding_is_packed_and_the_embedding_goes_on_looking_up():
    model = copy.deepcopy(load_model()[0]).to("cpu")
    fast = packed(model)
    assert type(fast.lm_head) is PackedLinear
    assert fast.lm_head.weight is fast.transformer.wte.weight is model.transformer.wte.weight
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(fast.transformer.wte(ids), model.transformer.wte(ids))


@needs_operators
def test_gelu_in_one_pass_is_the_same_gelu():
    plain = nn.Sequential(nn.Linear(24, 40), NewGELUActivation())
    fast = packed(plain)
    assert type(fast[1]) is nn.GELU and type(plain[1]) is NewGELUActivation
    x = torch.linspace(-6, 6, 1000)
    torch.testing.assert_close(fast[1](x), plain[1](x), rtol=0, atol=2e-6)  # the exact GELU differs by up to 5e-4


@needs_operators
def test_prepack_counts_the_layers_that_are_worth_it():
    class Special(nn.Linear):
        """Does more than multiply, for all we know."""

    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(512, 512), Special(512, 512), nn.Embedding(512, 512)])
    assert prepack(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, PackedLinear, Special, nn.Embedding]


@needs_operators
def test_gradients_are_the_plain_layers():
    plain = layer_of("Linear with bias")
    fast = packed(plain)
    x = torch.randn(8, 24, requires_grad=True)
    (expected,), (actual,) = (torch.autograd.grad(model(x).square().sum(), x) for model in (plain, fast))
    assert torch.equal(actual, expected)


@needs_operators
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_changes_after_packing_is_not_answered_from_the_old_copy(kind):
    plain = layer_of(kind)
    fast = packed(plain)
    x = torch.randn(8, 24)
    before = fast(x)
    plain[0].weight.mul_(2)  # somebody trains the original, whose tensors the shell shares
    assert not torch.allclose(fast(x), before)
    assert torch.equal(fast(x), plain(x))


def refuse(weight, rows):
    raise RuntimeError("mkldnn_reorder_linear_weight: this path needs another CPU")


def operators(reorder, multiply):
    return SimpleNamespace(_reorder_linear_weight=reorder, _linear_pointwise=multiply)


BROKEN = {
    "missing": SimpleNamespace(),
    "refuse this CPU": operators(refuse, None),
    "take other arguments": operators(lambda weight: weight, None),
    "give something else": operators(lambda weight, rows: weight, lambda x, *others: torch.zeros_like(x)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_without_working_operators_the_model_stays_as_it_is(monkeypatch, how):
    monkeypatch.setattr(torch.ops, "mkldnn", BROKEN[how])
    model = copy.deepcopy(load_model()[0]).to("cpu")
    before = str(model)
    assert prepack(model, min_bytes=0, compiled=False) == 0
    assert str(model) == before, "not even the GELU may change"


@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"dtype": torch.float16}, {"device": "meta"}])
def test_other_dtypes_and_devices_are_left_alone(monkeypatch, options):
    able = operators(lambda weight, rows: weight, lambda x, weight, bias, *others: linear(x, weight, bias))
    monkeypatch.setattr(torch.ops, "mkldnn", able)  # in any dtype, which real operators are not
    model = nn.Sequential(nn.Linear(24, 40, **options))
    assert prepack(model, min_bytes=0) == 0
    assert type(model[0]) is nn.Linear


def test_weights_made_in_inference_mode_are_left_alone():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(24, 40))
    assert prepack(model, min_bytes=0) == 0  # nothing would tell when such a weight changes
