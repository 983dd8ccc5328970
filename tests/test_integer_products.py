"""Products of integers: exact sums, the same bits in any batch, and the tokens of the reference.

Rounding inputs is a step, so the tokens of whole models are compared in float64, where no input lies so near a step
that another order of sums would move it over. In float32, tokens may differ where two are close.
"""

import copy
import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import PROMPTS, alone, random_pair
from test_quantization import layer_of
from torch import nn

from helpers import Engine, EngineConfig, SamplingParams, integer_reference, load_model
from helpers.fast import kernels
from helpers.fast.kernels import compiled
from helpers.fast.quantized_linear import multiply_integers
from helpers.hardware import cpuinfo
from helpers.models import round_inputs
from helpers.models.integer_products import EXACT, MOST_INPUTS, IntegerLinear
from helpers.models.quantization import QuantizedLinear
from tests.support.families import CountingScheduler, count_near_ties

INT8 = {"weights": "int8", "compute": "int8"}
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")
# The instructions for which the kernel has code of its own, and what the processor needs for them.
PROCESSORS = {"native": "", "icelake-server": "avx512_vnni", "alderlake": "avx_vnni", "haswell": "avx2"}


def integer_layer(*args, **kwargs) -> IntegerLinear:
    return round_inputs(QuantizedLinear(layer_of(*args, **kwargs), "int8"))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether numbers are equal, or NaN in both."""
    return actual.dtype is expected.dtype and bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def difficult_rows(rows: int, inputs: int) -> torch.Tensor:
    """Return rows of many magnitudes, the first of which are zeros, NaN, infinite, tiny, huge, equal, and ties."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator) * torch.rand(rows, 1, generator=generator) * 10
    x[:8] = torch.tensor([0.0, 1, 1, 1e-42, 1e30, -3, 1, 1])[: len(x), None] * x[:8].sign()
    x[1:2, 5], x[2:3, 7] = torch.nan, -torch.inf
    x[6:7] = torch.arange(inputs) % 250 - 124.5  # halves of a scale of 1: the even integer is the nearest
    x[6:7, 0] = 127
    return x


# --- one layer --------------------------------------------------------------------------------------------------------


def by_hand(layer: IntegerLinear, x: torch.Tensor) -> np.ndarray:
    """Multiply float32 rows with Python's integers, rounding as the module says."""
    integers, scales = (tensor.numpy() for tensor in layer.integers_and_scales())
    bias = np.zeros(len(integers), np.float32) if layer.bias is None else layer.bias.detach().numpy()
    outputs = []
    for row in x.numpy():
        scale = max(np.abs(row).max() / np.float32(127), np.finfo(np.float32).tiny)
        rounded = [round(float(number / scale)) for number in row]  # Python rounds halves to even integers
        assert max(map(abs, rounded)) <= 127
        sums = [sum(a * int(b) for a, b in zip(rounded, weights, strict=True)) for weights in integers]
        outputs.append(
            [np.float32(total) * scale * own + b for total, (own,), b in zip(sums, scales, bias, strict=True)]
        )
    return np.array(outputs)


@pytest.mark.parametrize("kind", ["Linear", "Linear without bias", "Conv1D"])
@torch.no_grad()
def test_a_layer_rounds_to_the_nearest_integers_and_sums_them_exactly(kind):
    layer, x = integer_layer(64, 35, kind), difficult_rows(12, 64)
    numbers = torch.tensor([row for row in range(12) if row not in (1, 2)])
    expected = torch.from_numpy(by_hand(layer, x[numbers]))
    assert expected.isfinite().all() and expected.abs().max() > 1e30
    assert torch.equal(layer.multiply_integers(x)[numbers], expected)


@pytest.mark.parametrize("product", [IntegerLinear.multiply_integers, multiply_integers])
@torch.no_grad()
def test_sums_that_float32_cannot_hold_are_exact(product):
    """Half of the products cancel the other half, all but one, after sums of up to 2^25."""
    if product is multiply_integers and kernels.unavailable():
        pytest.skip("no compiled kernels")
    inputs = 4 * EXACT + 1
    layer = nn.Linear(inputs, 32, bias=False)
    layer.weight.fill_(127)
    layer = round_inputs(QuantizedLinear(layer, "int8"))
    signs = torch.where(torch.arange(inputs) <= inputs // 2, 127.0, -127.0)
    assert product(layer, signs[None]).unique().item() == 127**2
    assert product(layer, torch.full((1, inputs), 127.0)).unique().item() == np.float32(inputs * 127**2)


@pytest.fixture(scope="module", params=PROCESSORS)
def library_for(request, tmp_path_factory) -> ctypes.CDLL:
    """The kernel for a processor that this one can stand in for."""
    if problem := kernels.unavailable():
        pytest.skip(problem)
    if PROCESSORS[request.param] not in cpuinfo().get("flags", ""):
        pytest.skip(f"no {PROCESSORS[request.param]}")
    flags = [flag.replace("native", request.param) for flag in compiled.FLAGS]
    source, library = compiled.SOURCES / "integer_linear.cpp", tmp_path_factory.mktemp("kernel") / "kernel.so"
    subprocess.run([shutil.which("g++") or "c++", *flags, *compiled.LINK_FLAGS, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def kernel_for(library_for, monkeypatch):
    """Let the kernel be the one of `library_for`."""

    def function(name, dtype, arguments):
        found = getattr(library_for, f"{name}_{compiled.DTYPES[dtype]}")
        found.argtypes, found.restype = arguments, None
        return found

    monkeypatch.setattr("helpers.fast.kernels.quantized.function", function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_kernel_gives_pytorchs_bits_and_no_row_depends_on_the_others(kernel_for, dtype):
    """Sizes that are multiples of 64 may be multiplied by tiles, the others not.

    300 rows of 4,096 inputs do not fit in a second-level cache.
    """
    sizes = [(40, 70, "Linear"), (128, 65, "Conv1D"), (4096, 33, "Linear"), (1216, 33, "Linear without bias")]
    for inputs, outputs, kind in sizes:
        layer, x = integer_layer(inputs, outputs, kind, dtype), difficult_rows(300, inputs).to(dtype)
        expected = layer.multiply_integers(x)
        assert expected[1:3].isnan().all() and expected[3:].isfinite().all()
        assert torch.equal(expected[0], torch.zeros_like(expected[0]) if layer.bias is None else layer.bias)
        for rows in (1, 3, 17, 33, 300):
            for own in (slice(rows), slice(300 - rows, 300)):
                assert same_bits(multiply_integers(layer, x[own]), expected[own]), (inputs, rows)
                assert same_bits(layer.multiply_integers(x[own]), expected[own]), (inputs, rows)
        shape = 2, 5, inputs
        assert same_bits(layer(x[:20:2].view(shape)), expected[:20:2].view(2, 5, outputs))
    assert layer(x[:0]).shape == (0, outputs)
    with pytest.raises(ValueError, match="has 1216 inputs, but x has 1215"):
        multiply_integers(layer, x[:, 1:])


@needs_kernels
@torch.no_grad()
def test_products_with_other_libraries_in_between_stay_the_same():
    """oneDNN has tiles of its own, where the processor has them."""
    x, other = torch.randn(64, 128), nn.Linear(128, 256).bfloat16()
    layer = integer_layer(128, 64)
    expected, others = layer.multiply_integers(x), other(x.bfloat16())
    for _ in range(3):
        assert torch.equal(multiply_integers(layer, x), expected)
        assert torch.equal(other(x.bfloat16()), others)


# --- models -----------------------------------------------------------------------------------------------------------


def in_float64(model):
    """Return a copy of the model in float64."""
    return copy.deepcopy(model).double()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def doubles(request):
    """A random model in float64, its reference, and their tokenizer."""
    model, own = random_pair(request.param)
    model = in_float64(model)
    return model, integer_reference(model), own


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 16, "scheduler_cls": CountingScheduler, "max_tokens_per_step": 9},
        {"mixed_batches": False, "policy": "longest_first"},
        {"execution": "padded"},
        {"speculative": "ngram", "max_tokens_per_step": 23},
        {"max_batch_size": 17, "prefix_caching": False},
    ],
    ids=str,
)
def test_requests_that_arrive_at_random_get_the_references_tokens(doubles, settings, always_drafts):
    model, reference, own = doubles
    config = EngineConfig(**{"max_batch_size": 3, "block_size": 8, **INT8} | settings)
    engine, sizes = Engine(model, own, config), [(7 * n) % 31 + 1 for n in range(2 * len(PROMPTS))]
    outputs = engine.generate(
        PROMPTS * 2,
        [SamplingParams(max_tokens=size) for size in sizes],
        arrivals=[5 * n % 37 for n in range(len(sizes))],
    )
    expected = [alone(reference, own, prompt, size) for prompt, size in zip(PROMPTS * 2, sizes, strict=True)]
    assert [output.token_ids for output in outputs] == expected
    if "scheduler_cls" in settings:
        assert engine.scheduler.num_preempted > 3 and engine.scheduler.num_partial_chunks > 3
    assert expected != [alone(model, own, prompt, size) for prompt, size in zip(PROMPTS * 2, sizes, strict=True)]


MARGIN = 0.03  # of the logits' range: what one integer that is rounded the other way may move


@pytest.mark.parametrize("settings", [{}, {"linear_backend": "compiled"}, {"execution": "padded"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float32_tokens_are_the_references_best_or_near_it(settings, dtype):
    """The embedded model, by the executors and kernels that this machine has."""
    if "linear_backend" in settings and kernels.unavailable():
        pytest.skip("no compiled kernels")
    model, own = load_model(device="cpu")
    reference = integer_reference(model)
    engine = Engine(model, own, EngineConfig(max_batch_size=3, dtype=dtype, **INT8, **settings))
    outputs = [output.token_ids for output in engine.generate(PROMPTS, SamplingParams(max_tokens=24))]
    differ = [count_near_ties(reference, *pair, MARGIN) for pair in zip(PROMPTS, outputs, strict=True)]
    assert sum(map(len, outputs)) > 90 and sum(differ) <= 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"compute": "int8"}, 'compute="int8" needs weights="int8", not None: set both'),
        ({"compute": "int8", "weights": "int4"}, "needs weights=\"int8\", not 'int4'"),
        ({"compute": "int4", "weights": "int8"}, "compute must be \"int8\" or None, not 'int4'"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize("rounding", [lambda model: (model, INT8), lambda model: (integer_reference(model), {})])
def test_a_model_that_rounds_inputs_is_not_split(rounding):
    model, own = random_pair("llama")
    model, settings = rounding(model)
    with pytest.raises(ValueError, match='would each round a part of them: leave out compute="int8"'):
        Engine(model, own, EngineConfig(tensor_parallel_size=2, **settings))


def test_layers_with_other_integers_or_too_many_inputs_are_refused_by_name():
    grouped = QuantizedLinear.from_integers(
        torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 2), 8, None, torch.float32
    )
    wide = QuantizedLinear(nn.Linear(MOST_INPUTS + 1, 32), "int8")
    for layer in (grouped, wide, QuantizedLinear(layer_of(64, 32), "int4")):
        with pytest.raises(
            ValueError, match=r"1 cannot multiply integers: it has . bits, . scales .* Leave out compute"
        ):
            round_inputs(nn.Sequential(nn.ReLU(), layer))
