"""Weights of 8 and 4 bits: what rounding may change, and that an engine generates the dequantized model's tokens.

No test asserts how much faster this is. benchmarks/quantization.py reports speed and what it costs in quality.
"""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers import (
    Engine,
    EngineConfig,
    Request,
    SamplingParams,
    dequantized,
    generate_continuous,
    integer_reference,
    load_model,
)
from helpers.fast import kernels, linear
from helpers.fast.linear import choose_linear_backends
from helpers.fast.linear_choice import shape_of
from helpers.fast.quantized_linear import multiply_dequantized, multiply_quantized
from helpers.models import quantize, require_exact_batching, round_inputs
from helpers.models.quantization import FORMATS, GROUP, QuantizedLinear, round_to_integers
from tests.support.families import (
    BF16_MARGIN,
    FAMILIES,
    LEAD,
    SIZES,
    build,
    count_near_ties,
    prompts,
    serve_in_company,
    skip_unless_known,
)

in_both_formats = pytest.mark.parametrize("weights", FORMATS)
in_all_ways = pytest.mark.parametrize(
    ("weights", "change"),
    [*((weights, lambda module: module) for weights in FORMATS), ("int8", round_inputs)],
    ids=[*FORMATS, "int8 by int8"],
)
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")
PRODUCTS = [QuantizedLinear.multiply_dequantized] + [multiply_quantized, multiply_dequantized] * (
    not kernels.unavailable()
)


@pytest.fixture(scope="module")
def pair():
    """The embedded model on the CPU, even if there is a GPU."""
    return load_model(device="cpu")


def layer_of(inputs=40, outputs=70, kind="Linear", dtype=torch.float32):
    """Return a layer whose sizes are no multiples of a panel or a group."""
    torch.manual_seed(0)
    layer = Conv1D(nf=outputs, nx=inputs) if kind == "Conv1D" else nn.Linear(inputs, outputs, bias=kind == "Linear")
    nn.init.normal_(layer.weight)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    return layer.to(dtype)


# --- rounding ---------------------------------------------------------------------------------------------------------


@in_both_formats
def test_the_largest_weight_of_a_group_gets_the_largest_integer_and_zero_stays_zero(weights):
    weight = torch.zeros(32, 64)
    weight[0, 5], weight[0, 40], weight[1, 0] = -3.0, 1.5, 1e-44  # the last is below the smallest normal number
    integers, _ = round_to_integers(weight, FORMATS[weights])
    largest = {"int8": 127, "int4": 7}[weights]
    own_group = weights == "int4"
    assert integers[0, 5] == -largest and integers[0, 40] == (largest if own_group else round(largest / 2))
    assert integers.count_nonzero() == 2


@in_both_formats
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_weight_without_a_nearest_integer_is_refused_by_name(weights, number):
    model = nn.Sequential(layer_of(), layer_of())
    model[1].weight.data[3, 3] = number
    with pytest.raises(ValueError, match="Sequential cannot be quantized: 1: A weight is infinite or not a number"):
        quantize(model, weights)


# --- a layer's error --------------------------------------------------------------------------------------------------


def normal(shape, random):
    return torch.randn(shape, generator=random)


def with_outliers(shape, random):
    weight = normal(shape, random)
    weight[:, 1] = 1e4
    return weight


WEIGHTS = {
    "normal": normal,
    "an outlier per output": with_outliers,
    "halves, which lie between integers": lambda shape, random: torch.randint(-254, 255, shape, generator=random) / 2,
    "zeros": lambda shape, random: torch.zeros(shape),
    "below the normal numbers": lambda shape, random: normal(shape, random) * 1e-40,
    "huge": lambda shape, random: normal(shape, random) * 1e20,
}
INPUTS = {  # of a layer whose quantized weight differs from the exact one by `errors`
    "normal": lambda errors, random: normal((3, errors.shape[1]), random),
    "huge and tiny": lambda errors, random: normal((3, errors.shape[1]), random) ** 9,
    "terms that cancel": lambda errors, random: 1e4 * (-1.0) ** torch.arange(errors.shape[1]).expand(3, -1),
    "errors that add up": lambda errors, random: errors.sign()[:3],
}
SIZE = st.integers(32, 90)


@in_both_formats
@settings(max_examples=20)
@given(st.sampled_from(list(WEIGHTS)), st.sampled_from(list(INPUTS)), SIZE, SIZE, st.integers(0, 9))
@example("an outlier per output", "errors that add up", 64, 32, 0)
@torch.no_grad()
def test_a_layers_error_is_at_most_half_a_scale_per_input(weights, kind, x_kind, inputs, outputs, seed):
    """|dy_j| <= sum over k of s_jk / 2 |x_k|, plus the rounding of float32 sums of n terms, n 2^-24 sum |w_jk x_k|."""
    random = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.copy_(WEIGHTS[kind]((outputs, inputs), random))
    quantized = QuantizedLinear(layer, weights)
    assert weights == "int8" or torch.equal(quantized.weight, quantized.weight.bfloat16().float())
    x = INPUTS[x_kind](quantized.weight - layer.weight, random)
    exact = x.double() @ layer.weight.double().T
    scales = quantized.scales.double().transpose(1, 2).flatten(0, 1)[:outputs]
    scales = scales.repeat_interleave(GROUP if weights == "int4" else 96, dim=1)[:, :inputs]
    by_quantization = x.double().abs() @ scales.T / 2
    # Sums of integers are multiplied by a scale, which is one more rounding; so is each conversion.
    by_floats = (inputs + 4) * 2**-24 * (x.double().abs() @ quantized.weight.double().abs().T) + inputs * 1e-36
    for product in PRODUCTS:
        error = (product(quantized, x).double() - exact).abs()
        assert (error <= by_quantization * (1 + 1e-6) + by_floats).all(), product


@needs_kernels
@in_both_formats
@pytest.mark.parametrize("kind", ["Linear", "Linear without bias", "Conv1D"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@torch.no_grad()
def test_the_kernel_multiplies_by_the_rounded_weight_and_no_row_depends_on_the_others(kind, dtype, tolerance, weights):
    quantized = QuantizedLinear(layer_of(kind=kind, dtype=dtype), weights)
    exact = QuantizedLinear(layer_of(kind=kind, dtype=dtype).float(), weights)
    x = torch.randn(80, 40).to(dtype)
    alone = multiply_quantized(quantized, x[:1])
    for rows in (1, 2, 3, 5, 8, 9, 17, 31, 64, 67, 80):
        y = multiply_quantized(quantized, x[:rows])
        assert y.dtype is dtype
        expected = exact.multiply_dequantized(x[:rows].float())
        torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(y[:1], alone), rows
    assert quantized(torch.randn(2, 0, 40).to(dtype)).shape == (2, 0, 70)
    last = torch.randn(5, 2, 40).to(dtype)[:, -1:]  # not contiguous
    assert torch.equal(quantized(last), quantized(last.clone()))


@needs_kernels
@in_both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "most"), [(512, 80), (4096, 300)])
@torch.no_grad()
def test_few_rows_are_summed_in_the_order_of_many(dtype, weights, inputs, most):
    """All products cancel. What is left are the roundings of the sums, so any other order shows.

    300 rows of 4,096 inputs do not fit in a second-level cache.
    """
    half = inputs // 2
    layer, x = layer_of(inputs, 70, "Linear without bias", dtype), torch.randn(most, half).to(dtype)
    layer.weight[:, half:] = layer.weight[:, :half]
    quantized, x = QuantizedLinear(layer, weights), torch.cat([x, -x], dim=1)
    many = multiply_quantized(quantized, x)
    assert many.count_nonzero() > many.numel() / 10
    for rows in (*range(1, 9), most - 10):
        assert torch.equal(multiply_quantized(quantized, x[:rows]), many[:rows]), rows


@torch.no_grad()
def test_a_weight_that_replaces_a_loaded_one_gets_the_scales_of_the_format():
    layer, integers = torch.nn.Linear(64, 40, bias=False), torch.ones(40, 64, dtype=torch.int8)
    loaded = QuantizedLinear.from_integers(integers, torch.rand(40, 2).bfloat16(), 4, None, torch.float32)
    loaded.requantize(layer.weight)
    assert torch.equal(loaded.weight, QuantizedLinear(layer, "int4").weight)


@needs_kernels
@pytest.mark.parametrize("scale", [lambda x: x, lambda x: x.bfloat16().float(), lambda x: -torch.exp2(x.round())])
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])
@torch.no_grad()
def test_with_other_scales_no_row_depends_on_the_number_of_rows_either(bits, group, scale):
    """Weights with such scales may not be exact in bfloat16, in which matrix registers multiply."""
    torch.manual_seed(0)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (70, 192), dtype=torch.int8)
    scales = scale(torch.rand(70, 192 // group) + 0.5)
    scales[32:64] = 0.5  # of the second panel
    quantized = QuantizedLinear.from_integers(integers, scales, bits, None, torch.bfloat16)
    x = torch.randn(80, 192).bfloat16()
    y, exact = multiply_quantized(quantized, x), x.double() @ (integers * scales.repeat_interleave(group, 1)).double().T
    torch.testing.assert_close(y.double(), exact, rtol=0.01, atol=0.003 * exact.abs().max().item())
    for rows in range(1, 9):
        assert torch.equal(multiply_quantized(quantized, x[:rows]), y[:rows]), rows


@needs_kernels
@in_both_formats
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@torch.no_grad()
def test_the_dequantized_weight_has_the_bits_of_pytorchs(dtype, tolerance, weights):
    for kind, inputs, outputs in (("Linear", 40, 70), ("Conv1D", 96, 33), ("Linear without bias", 64, 64)):
        quantized = QuantizedLinear(layer_of(inputs, outputs, kind=kind, dtype=dtype), weights)
        whole = kernels.dequantize(quantized.words, quantized.scales, quantized.format.bits, outputs, dtype)
        assert torch.equal(whole[:inputs].T, quantized.weight)
        x = torch.randn(2, 3, inputs).to(dtype)
        expected = x.double() @ quantized.weight.double().T + (0 if quantized.bias is None else quantized.bias.double())
        error = multiply_dequantized(quantized, x).double() - expected
        assert error.abs().max() <= tolerance * expected.abs().max()


@needs_kernels
def test_the_kernel_refuses_what_does_not_fit():
    quantized = QuantizedLinear(layer_of(), "int8")
    with pytest.raises(ValueError, match="float64"):
        multiply_quantized(quantized, torch.randn(2, 40).double())
    with pytest.raises(ValueError, match="has 40 inputs, but x has 41"):
        multiply_quantized(quantized, torch.randn(2, 41))
    with pytest.raises(ValueError, match=r"float32 \[70\]: pass a bias of \[70\] in the dtype of x, torch.bfloat16"):
        multiply_quantized(quantized, torch.randn(2, 40).bfloat16())


# --- models -----------------------------------------------------------------------------------------------------------


def quantized_layers(model) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]


@in_both_formats
def test_the_head_is_quantized_and_the_embedding_that_it_is_tied_to_is_not(pair, weights):
    model = pair[0]
    rounded = dequantized(model, weights)
    assert type(rounded) is type(model) and not quantized_layers(rounded)
    assert rounded.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert not torch.equal(rounded.lm_head.weight, model.lm_head.weight)
    assert not rounded.config.tie_word_embeddings and model.config.tie_word_embeddings
    engine = Engine(*pair, EngineConfig(weights=weights))
    assert "lm_head" in quantized_layers(engine.model) and len(quantized_layers(engine.model)) == 17
    assert torch.equal(engine.model.lm_head.weight, rounded.lm_head.weight)


SETTINGS = [{"weights": "int8", "compute": "int8"}, {"weights": "int8"}, {"weights": "int4"}]


@pytest.mark.parametrize(("loaded", "settings"), zip(["int8", None, None], SETTINGS, strict=True), ids=str)
def test_the_callers_model_stays_as_it_is(loaded, settings):
    model, tokenizer = load_model(device="cpu", weights=loaded)
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    kinds = list(map(type, modules.values()))
    Engine(model, tokenizer, EngineConfig(**settings)).generate(["The rain"], SamplingParams(max_tokens=2))
    dequantized(model, settings["weights"])
    if "compute" in settings:
        integer_reference(model)
    assert dict(model.named_modules()) == modules and list(map(type, modules.values())) == kinds
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_engine_generates_the_references_tokens_in_any_company(family):
    """A third of the families is quantized in each way, which takes a third of the time.

    Tokens of rounded inputs are compared in float64, or need only be near the best ones: see test_integer_products.py.
    """
    skip_unless_known(family)
    way = SETTINGS[FAMILIES.index(family) % 3]
    model, margin, most = build(family), LEAD, 1
    reference = integer_reference(model) if "compute" in way else dequantized(model, way["weights"])
    if "compute" in way:
        exact, margin, most = build(family, torch.float64), BF16_MARGIN, 10**9
        with contextlib.suppress(ValueError):  # transformers cannot run some families in float64
            require_exact_batching(exact)
            model, reference, most = exact, integer_reference(exact), 0
    requests = [Request(prompt, tokens) for prompt, (_, tokens) in zip(prompts()[1:3], SIZES[1:], strict=False)]
    outputs, engine = serve_in_company(family, model, requests, **way)
    assert quantized_layers(engine.model)
    pairs = zip(requests, outputs, strict=True)
    assert sum(count_near_ties(reference, request.prompt, output, margin) for request, output in pairs) <= most


def test_the_verbs_run_a_model_that_was_loaded_quantized(pair):
    model, tokenizer = load_model(device="cpu", weights="int8")
    assert load_model(device="cpu", weights="int8")[0] is model and load_model(device="cpu")[0] is not model
    requests = [("The quick brown fox", 12), ("What comes up", 20)]
    expected = generate_continuous(requests, 2, dequantized(pair[0], "int8"), tokenizer).outputs
    actual = generate_continuous(requests, 2, model, tokenizer).outputs
    assert [output.token_ids for output in actual] == [output.token_ids for output in expected]
    assert Engine(model, tokenizer, EngineConfig(weights="int8")).generate(["The"], SamplingParams(max_tokens=2))


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_bytes(call) -> int:
    """Return the most bytes of tensors made by a call that exist at once; it must free nothing that was made before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    del result
    return max(live)


@in_both_formats
def test_quantizing_never_holds_more_than_the_float_weights_and_one_layer(weights):
    sizes = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3}
    config = AutoConfig.for_model("llama", **sizes)
    models = []

    def load():
        models.append(quantize(AutoModelForCausalLM.from_config(config), weights))

    peak, plain = peak_bytes(load), AutoModelForCausalLM.from_config(config)
    total, largest = (function(parameter.nbytes for parameter in plain.parameters()) for function in (sum, max))
    assert total < peak < total + largest
    left = sum(tensor.nbytes for tensor in [*models[0].parameters(), *models[0].buffers()])
    embedding = plain.get_input_embeddings().weight.nbytes
    assert left - embedding < {"int8": 0.26, "int4": 0.145}[weights] * (total - embedding)


# --- the choice -------------------------------------------------------------------------------------------------------


@needs_kernels
@in_all_ways
@torch.no_grad()
def test_the_kernel_joins_the_choice_by_measurement(monkeypatch, tmp_path, weights, change):
    """A product of integers is chosen among such products, so the result stays the same to the bit."""
    monkeypatch.setattr("helpers.fast.kernels.compiled.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(linear, "MIN_MODEL_BYTES", 0)
    monkeypatch.setattr(linear, "MIN_LAYER_BYTES", 4 * 300 * 32)  # of floats: integers take a quarter or less
    model = change(quantize(nn.Sequential(layer_of(400, 300), layer_of(300, 32)), weights))
    x, of_integers = torch.randn(3, 400), change is round_inputs
    expected, tolerance = model(x), 0 if of_integers else 1e-4
    for backend in ("auto", "pytorch", "compiled"):
        assert choose_linear_backends(model, backend, copies=False) == 2
        torch.testing.assert_close(model(x), expected, rtol=tolerance, atol=tolerance)
    assert ("int8 by int8" in shape_of(model[0].layer)) == of_integers, "whose times are kept apart"


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_unknown_format_is_an_error_that_lists_the_known_ones(pair):
    for call in (EngineConfig, load_model, functools.partial(dequantized, pair[0])):
        with pytest.raises(ValueError, match=r'weights must be "int8"(,| or) "int4".* not \'int3\''):
            call(weights="int3")


def test_layers_that_do_more_or_are_narrow_stay_as_they_are():
    class Special(nn.Linear):
        """A subclass may do more than multiply."""

    hooked = nn.Linear(64, 64)
    hooked.register_forward_hook(lambda *_: None)
    model = quantize(nn.Sequential(Special(64, 64), hooked, nn.Linear(64, 8), nn.Linear(64, 64)), "int8")
    assert quantized_layers(model) == ["3"]
