"""A packed layer computes what the original layer computes: in every shape and precision, and with any product.

No test asserts how much faster it is.
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
from helpers.models import clone_sharing_weights
from helpers.runners.linear import CompiledProduct, OneDNNProduct, PackedLinear, prepack, product_for

pytestmark = pytest.mark.usefixtures("one_thread")
needs_operators = pytest.mark.skipif(
    not product_for(torch.ones(1), compiled=False),
    reason="no oneDNN linear layer on reordered weights",
)
by_both = pytest.mark.parametrize("product", [CompiledProduct, OneDNNProduct], indirect=True)


@pytest.fixture(scope="module", params=["embedded", "gpt2", "llama"])
def pair(request):
    """A model on the CPU, even if there is a GPU: layers are packed only there."""
    model, tokenizer = load_model() if request.param == "embedded" else random_pair(request.param)
    return copy.deepcopy(model).to("cpu"), tokenizer


@pytest.fixture
def product(request):
    if request.param is CompiledProduct and kernels.unavailable():
        pytest.skip(f"no compiled kernels: {kernels.unavailable()}")
    if request.param is OneDNNProduct and not product_for(torch.ones(1), compiled=False):
        pytest.skip("no oneDNN linear layer on reordered weights")
    return request.param


def packed(model, product=OneDNNProduct):
    """Return a clone of the model with all of its linear layers packed."""
    clone = clone_sharing_weights(model)
    assert prepack(clone, min_bytes=0, compiled=product is CompiledProduct) > 0
    assert all(type(module.product) is product for module in clone.modules() if isinstance(module, PackedLinear))
    return clone


def layer_of(kind: str, dtype=torch.float32):
    """Return a layer of 24 inputs and 40 outputs, neither a multiple of a kernel's block, inside a model."""
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
def test_a_packed_layer_computes_the_original_layers_output_in_every_shape(kind, dtype, tolerance, product):
    original = layer_of(kind, dtype)
    fast = packed(original, product)
    assert type(fast[0]) is PackedLinear and fast[0].layer.weight is original[0].weight
    for rows in (1, 2, 3, 8, 33, 200):
        for shape in [(1, rows, 24), (rows, 1, 24), (rows, 24)]:
            check(fast, original, torch.randn(shape).to(dtype), tolerance)
        last_tokens = torch.randn(rows, 2, 24).to(dtype)[:, -1:]  # not contiguous
        check(fast, original, last_tokens, tolerance)
    no_rows = torch.randn(0, 1, 24).to(dtype)
    check(fast, original, no_rows, tolerance)


def check(fast, original, x, tolerance):
    torch.testing.assert_close(fast(x), original(x), rtol=tolerance, atol=tolerance)


@by_both
def test_packing_changes_no_greedy_token(pair, product):
    model, tokenizer = pair
    requests = [(prompt, 5 + 3 * row) for row, prompt in enumerate(PROMPTS[:6])]
    expected = generate_continuous(requests, 4, model, tokenizer).outputs
    actual = generate_continuous(requests, 4, packed(model, product), tokenizer).outputs
    assert [output.token_ids for output in actual] == [output.token_ids for output in expected]


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
def test_the_original_model_stays_unchanged(pair):
    model = pair[0]
    ids = torch.arange(1, 6)[None]
    modules = dict(model.named_modules())
    weights, logits = copy.deepcopy(model.state_dict()), model(ids).logits
    addresses = {name: weight.data_ptr() for name, weight in model.state_dict().items()}

    fast = packed(model)
    fast(ids)

    assert dict(model.named_modules()) == modules
    assert torch.equal(model(ids).logits, logits)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]) and weight.data_ptr() == addresses[name]
    own = {parameter.data_ptr() for parameter in fast.parameters()}
    assert own == {parameter.data_ptr() for parameter in model.parameters()}, "a packed model copies no original weight"


@needs_operators
@torch.no_grad()
def test_a_head_tied_to_the_embedding_is_packed_and_the_embedding_stays():
    model = copy.deepcopy(load_model()[0]).to("cpu")
    fast = packed(model)
    assert type(fast.lm_head) is PackedLinear
    assert type(fast.transformer.wte) is nn.Embedding
    assert fast.lm_head.weight is fast.transformer.wte.weight is model.transformer.wte.weight
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(fast.transformer.wte(ids), model.transformer.wte(ids))


class TwoParents(nn.Module):
    """One linear layer in two modules, and under two names in the second one."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(24, 24)
        self.first, self.second = nn.Sequential(layer), nn.ModuleDict({"one": layer, "other": layer})

    def forward(self, x):
        return self.second["other"](self.second["one"](self.first(x)))


@needs_operators
@torch.no_grad()
def test_a_layer_with_several_parents_is_replaced_by_one_packed_layer_in_all_of_them():
    model = clone_sharing_weights(original := TwoParents())
    assert prepack(model, min_bytes=0) == 1
    assert type(model.first[0]) is PackedLinear
    assert model.first[0] is model.second["one"] is model.second["other"]
    x = torch.randn(3, 24)
    check(model, original, x, 1e-5)


@needs_operators
def test_gelu_in_one_pass_is_the_same_gelu():
    original = nn.Sequential(nn.Linear(24, 40), NewGELUActivation())
    fast = packed(original)
    assert type(fast[1]) is nn.GELU and type(original[1]) is NewGELUActivation
    x = torch.linspace(-6, 6, 1000)
    torch.testing.assert_close(fast[1](x), original[1](x), rtol=0, atol=2e-6)  # the exact GELU differs by up to 5e-4


@needs_operators
def test_prepack_replaces_only_layers_that_are_large_enough_and_of_a_known_class():
    class Special(nn.Linear):
        """A subclass may do more than multiply."""

    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(512, 512), Special(512, 512), nn.Embedding(512, 512)])
    assert prepack(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, PackedLinear, Special, nn.Embedding]


@needs_operators
def test_gradients_are_those_of_the_original_layer():
    original = layer_of("Linear with bias")
    fast = packed(original)
    x = torch.randn(8, 24, requires_grad=True)
    (expected,), (actual,) = (torch.autograd.grad(model(x).square().sum(), x) for model in (original, fast))
    assert torch.equal(actual, expected)


@needs_operators
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_once_a_weight_has_changed_its_packed_copy_is_no_longer_used(kind):
    original = layer_of(kind)
    fast = packed(original)
    x = torch.randn(8, 24)
    before = fast(x)
    original[0].weight.mul_(2)  # as training the original does, whose tensors the clone shares
    assert not torch.allclose(fast(x), before)
    assert torch.equal(fast(x), original(x))


def refuse(weight, rows):
    raise RuntimeError("mkldnn_reorder_linear_weight: this path needs another CPU")


def operators(reorder, multiply):
    return SimpleNamespace(_reorder_linear_weight=reorder, _linear_pointwise=multiply)


BROKEN = {
    "are missing": SimpleNamespace(),
    "refuse this CPU": operators(refuse, None),
    "take other arguments": operators(lambda weight: weight, None),
    "compute something else": operators(lambda weight, rows: weight, lambda x, *others: torch.zeros_like(x)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_if_the_operators_do_not_work_the_model_stays_as_it_is(monkeypatch, how):
    monkeypatch.setattr(torch.ops, "mkldnn", BROKEN[how])
    model = copy.deepcopy(load_model()[0]).to("cpu")
    before = str(model)
    assert prepack(model, min_bytes=0, compiled=False) == 0
    assert str(model) == before, "the activations stay, too"


@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"dtype": torch.float16}, {"device": "meta"}])
def test_layers_of_other_dtypes_and_devices_stay_as_they_are(monkeypatch, options):
    # Unlike the real operators, these work in any dtype.
    any_dtype = operators(lambda weight, rows: weight, lambda x, weight, bias, *others: linear(x, weight, bias))
    monkeypatch.setattr(torch.ops, "mkldnn", any_dtype)
    model = nn.Sequential(nn.Linear(24, 40, **options))
    assert prepack(model, min_bytes=0) == 0
    assert type(model[0]) is nn.Linear


def test_layers_whose_weights_were_made_in_inference_mode_stay_as_they_are():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(24, 40))
    assert prepack(model, min_bytes=0) == 0  # such a weight does not show that it has changed


@needs_operators
def test_a_layer_with_a_hook_stays_as_it_is():
    calls = []
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
    model[0].register_forward_hook(lambda *_: calls.append("after"))
    model[1].register_forward_pre_hook(lambda *_: calls.append("before"))
    assert prepack(model, min_bytes=0) == 0
    with torch.no_grad():
        model(torch.randn(2, 24))
    assert calls == ["after", "before"]


@needs_operators
def test_a_packed_layer_has_the_attributes_of_the_original():
    original = layer_of("Linear with bias")
    fast = packed(original)[0]
    assert fast.weight is original[0].weight and fast.bias is original[0].bias
    assert (fast.in_features, fast.out_features) == (24, 40)
    with pytest.raises(AttributeError):
        _ = fast.no_such_attribute
