"""A replaced layer computes what the original layer computes: in every shape and precision, and with every backend.

No test asserts how much faster it is. test_linear_choice.py tests how backends are chosen, and test_ragged_exactness.py
that they change no token while requests arrive, leave and are preempted.
"""

import pytest
import torch
from conftest import random_pair
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers import Engine, EngineConfig
from helpers.fast import kernels
from helpers.fast.linear import FastLinear, choose_linear_backends, unchanged_layers
from helpers.fast.linear_backends import BACKENDS, available_backends
from helpers.fast.linear_choice import ROWS
from helpers.models import clone_sharing_weights

FAST = [name for name in BACKENDS if name != "pytorch"]
by_all = pytest.mark.parametrize("backend", FAST, indirect=True)
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")


@pytest.fixture
def backend(request):
    if request.param not in available_backends(torch.float32):
        pytest.skip(f"{request.param} is not available here")
    return request.param


def fast(model, backend="compiled"):
    """Return a clone of the model in which this backend computes all linear layers."""
    clone = clone_sharing_weights(model)
    assert choose_linear_backends(clone, backend) > 0
    assert not unchanged_layers(clone)
    assert all(module.backends == [backend] * len(ROWS) for module in clone.modules() if isinstance(module, FastLinear))
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
@by_all
def test_a_replaced_layer_computes_the_original_layers_output_in_every_shape(kind, dtype, tolerance, backend):
    if backend not in available_backends(dtype):
        pytest.skip(f"{backend} does not compute {dtype} here")
    original = layer_of(kind, dtype)
    replaced = fast(original, backend)
    assert type(replaced[0]) is FastLinear and replaced[0].layer.weight is original[0].weight
    for rows in (1, 2, 3, 8, 33, 200, 300):
        for shape in [(1, rows, 24), (rows, 1, 24), (rows, 24)]:
            check(replaced, original, torch.randn(shape).to(dtype), tolerance)
        last_tokens = torch.randn(rows, 2, 24).to(dtype)[:, -1:]  # not contiguous
        check(replaced, original, last_tokens, tolerance)
    no_rows = torch.randn(0, 1, 24).to(dtype)
    check(replaced, original, no_rows, tolerance)


def check(replaced, original, x, tolerance):
    torch.testing.assert_close(replaced(x), original(x), rtol=tolerance, atol=tolerance)


@torch.no_grad()
@needs_kernels
def test_the_backend_follows_the_number_of_rows(monkeypatch):
    """The backend of 8 rows, say, is used from 6 to 11 rows: the nearest measured number counts, by ratio."""
    names = [f"for {rows} rows" for rows in ROWS]
    called = []
    for name in names:
        recorder = lambda layer, name=name: lambda x: called.append(name) or layer(x)  # noqa: E731
        monkeypatch.setitem(BACKENDS, name, recorder)
    layer = FastLinear(layer_of("Conv1D")[0], names)
    for rows in (0, 1, 2, 3, 5, 6, 11, 12, 31, 33, 127, 129, 256, 1000, 5000):
        layer(torch.zeros(1, rows, 24))
    used = [1, 1, 1, 4, 4, 8, 8, 16, 16, 64, 64, 256, 256, 1024, 1024]
    assert called == [f"for {rows} rows" for rows in used]


Special, Quantized = type("Special", (nn.Linear,), {}), type("Quantized", (nn.Parameter,), {})
UNCHANGED = {
    "a subclass, which may do more than multiply": lambda layer: setattr(layer, "__class__", Special),
    "a weight of another class, maybe quantized": lambda layer: setattr(layer, "weight", Quantized(layer.weight)),
    "a hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "a hook before it": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
}


@needs_kernels
@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED)
def test_a_linear_layer_with_anything_special_stays_as_it_is(change):
    model = nn.ModuleList([nn.Linear(16, 16), nn.Linear(512, 512), nn.Embedding(512, 512)])
    change(model[1])
    expected = type(model[1])
    assert choose_linear_backends(model, "compiled") == 1
    assert [type(layer) for layer in model] == [FastLinear, expected, nn.Embedding]
    assert unchanged_layers(model) == ["1"]


CHANGES = {
    "written to": lambda layer: layer.weight.mul_(2),  # as training the original does, whose tensors the clone shares
    "moved": lambda layer: setattr(layer.weight, "data", torch.randn(40, 24)),
    "exchanged": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(40, 24))),
    "exchanged, of the bias": lambda layer: setattr(layer, "bias", nn.Parameter(torch.randn(40))),
    "cast": lambda layer: layer.double(),  # for which the backend may not be made
}


@torch.no_grad()
@by_all
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parameter_that_has_been_changed_is_followed(backend, change):
    layer = layer_of("Linear with bias")[0]
    replaced = FastLinear(layer, [backend] * len(ROWS))
    replaced(torch.randn(8, 24))
    change(layer)
    x = torch.randn(3, 24, dtype=layer.weight.dtype)
    torch.testing.assert_close(replaced(x), layer(x))


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "unavailable", lambda *of: "there is no C++ compiler")


@pytest.mark.parametrize("options", [{"dtype": torch.float64}, {"dtype": torch.float16}, {"device": "meta"}])
def test_layers_of_other_dtypes_and_devices_stay_as_they_are(options):
    model = nn.Sequential(nn.Linear(2000, 2000, **options))
    assert choose_linear_backends(model) == 0
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match=r"'compiled' does not work for float.. on (cpu|meta) here: .* 'pytorch'"):
        choose_linear_backends(model, "compiled")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mkl", "There is no linear backend 'mkl': choose one of 'auto', 'pytorch', 'compiled', "),
        ("compiled", "'compiled' does not work for float32 on cpu here: choose one of 'auto', 'py"),
    ],
)
def test_an_unknown_or_unavailable_backend_is_an_error_that_lists_the_others(no_kernels, name, message):
    with pytest.raises(ValueError, match=message):
        Engine(*random_pair("llama"), EngineConfig(linear_backend=name))


@by_all
@pytest.mark.parametrize("execution", ["ragged", "padded"])
def test_the_configured_backend_computes_all_layers_of_an_engine(backend, execution):
    engine = Engine(*random_pair("gpt2"), EngineConfig(linear_backend=backend, execution=execution))
    layers = [module for module in engine.runner.model.modules() if isinstance(module, FastLinear)]
    assert len(layers) == 9 and all(set(layer.backends) == {backend} for layer in layers)
