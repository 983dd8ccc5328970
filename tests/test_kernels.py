"""The compiled kernels compute what PyTorch's operators compute, in every shape, and an engine runs without them too.

test_ragged_exactness.py shows that they change no token while requests arrive, leave and are preempted.
"""

import math
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import PROMPTS, random_pair, spied
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import kernels
from helpers.fast.kernels import Segments, compiled
from helpers.fast.plain_executor import rotate

pytestmark = pytest.mark.usefixtures("two_threads")
needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")


DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
in_both_dtypes = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items())


SMALL = ("elementwise.cpp", "numbers.h", "shares.h", "vectors.h")
UNOPTIMIZED = ["-O0" if flag == "-O3" else flag for flag in compiled.FLAGS]  # compiled in a seventh of the time


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, as on a new machine, and a single small source to compile."""
    monkeypatch.setenv("COURSE_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiled, "FLAGS", UNOPTIMIZED)
    (tmp_path / "sources").mkdir()
    for name in SMALL:
        shutil.copy(compiled.SOURCES / name, tmp_path / "sources")
    monkeypatch.setattr(compiled, "SOURCES", tmp_path / "sources")
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget():
    compiled.library.cache_clear()
    compiled._problem.cache_clear()


# --- linear layers ----------------------------------------------------------------------------------------------------

ORDERS = {  # in which a weight [out, in] is stored
    "as in Linear": torch.Tensor.contiguous,
    "as in Conv1D": lambda weight: weight.T.contiguous().T,
    "rows that lie apart": lambda weight: torch.stack([weight, weight], dim=1)[:, 0],
    "numbers that lie apart": lambda weight: torch.stack([weight, weight], dim=2)[..., 0],
}
KINDS = [(packed, order) for packed in (True, False) for order in ORDERS]


def multiply(x, weight, bias, packed: bool, order: str = "as in Linear"):
    """Multiply by a copy of the weight in the kernel's order, or by the weight itself as it is stored."""
    weight = ORDERS[order](weight)
    return kernels.linear(x, kernels.pack(weight), bias) if packed else kernels.unpacked_linear(x, weight, bias)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize(("packed", "order"), KINDS)
@pytest.mark.parametrize("outputs", [1, 3, 16, 32, 33, 100, 2100])
def test_a_product_is_pytorchs_linear_however_the_weight_is_stored(dtype, tolerance, packed, order, outputs):
    torch.manual_seed(0)
    for inputs in (1, 2, 7, 64, 99) if packed else (0, 1, 2, 7, 64, 99):
        weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(2 * outputs).to(dtype)[::2]
        for shape in [(0,), (1,), (2,), (7,), (8,), (9,), (1, 13), (2, 3, 5), (67,), (121,)]:
            x = torch.randn(inputs, *shape).to(dtype).movedim(0, -1)  # not contiguous
            for b in (bias, None):
                expected = linear(x.float(), weight.float(), None if b is None else b.float()).to(dtype)
                actual = multiply(x, weight, b, packed, order)
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@needs_kernels
def test_bfloat16_is_rounded_to_nearest_even():
    """Halfway between 1 and the next number, 1 + 2^-7, is 1 + 2^-8: it goes to the even one, 1, and more goes up."""
    x = torch.tensor([[1.0, 2**-9], [1.0, 2**-8], [1.0, 2**-8 + 2**-10], [1 + 2**-7, 2**-8]]).bfloat16()
    got = kernels.linear(x, kernels.pack(torch.ones(1, 2).bfloat16()), None)
    assert got.flatten().tolist() == [1.0, 1.0, 1 + 2**-7, 1 + 2**-6]


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize(("kind", "inputs"), [*((kind, 99) for kind in KINDS), (KINDS[0], 2051), (KINDS[0], 4096)])
def test_the_result_of_a_row_does_not_depend_on_the_other_rows(dtype, tolerance, kind, inputs):
    """300 rows of 4,096 inputs do not fit in a second-level cache. Each call packs the weight, so those are few."""
    rows, sizes = (300, (37, 290)) if inputs == 4096 else (130, (1, 2, 3, 5, 8, 11, 29, 37))
    weight, x, bias = (torch.randn(shape).to(dtype) for shape in ((100, inputs), (rows, inputs), (100,)))
    together = multiply(x, weight, bias, *kind)
    for size in sizes:
        parts = [multiply(part, weight, bias, *kind) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)


ONES = torch.ones(40, 24)


@needs_kernels
@pytest.mark.parametrize(
    ("weight", "x", "bias", "message"),
    [
        (ONES, ONES[:2].bfloat16(), None, r"float32 on the CPU, but an argument is torch\.bfloat16 on cpu"),
        (ONES, ONES[:2], torch.ones(39), r"bias has shape \[39\], but the layer has 40 outputs"),
        (ONES, torch.ones(2, 23), None, "has 24 inputs, but x has 23"),
        (ONES[:, 1:].bfloat16(), ONES[:2].bfloat16(), None, "has 23 inputs, but x has 24"),  # padded, it would fit
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_arguments_that_do_not_fit_the_weight_are_rejected(weight, x, bias, message, packed):
    with pytest.raises(ValueError, match=message):
        multiply(x, weight, bias, packed)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(query, keys, values, decodes, scale, window=None):
    """Return the kernel's output [T, heads, dim], NaN wherever it did not write."""
    output = query.new_full((query.shape[1], query.shape[0], query.shape[2]), float("nan"))
    kernels.paged_attention(query, keys, values, decodes, output, scale, window)
    return output


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize(
    ("tokens", "score", "first", "last"),
    [
        *((tokens, -math.inf, *keys) for tokens in (1, 12) for keys in [(0, 12), (0, 11), (0, 4), (3, 9), (8, 12)]),
        *((1, math.nan, *keys) for keys in [(0, 1), (0, 4), (9, 11)]),
        (12, math.nan, 0, 1),  # PyTorch adds its mask, so another key's NaN would reach the queries before it
    ],
)
def test_minus_infinity_and_nan_give_what_they_give_in_pytorch(dtype, tolerance, tokens, score, first, last, dim):
    """A key with the score -inf has no weight, and a query without any weights gets zeros. NaN stays NaN."""
    keys, values = torch.zeros(1, 12, dim, dtype=dtype), torch.randn(1, 12, dim).to(dtype)
    query = torch.zeros(1, tokens, dim, dtype=dtype)
    keys[0, first:last, 0], query[..., 0] = score, 1
    output = attention(query, keys, values, Segments([0], [tokens], [12], [[0, 1, 2]], 4), 1.0)
    mask = torch.ones(tokens, 12, dtype=torch.bool).tril(12 - tokens)
    expected = scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=1.0)
    torch.testing.assert_close(output[:, 0], expected[0, 0], rtol=tolerance, atol=tolerance, equal_nan=True)


# (tokens, past): decodes of one piece of keys and of several; chunks shorter and longer than a tile of queries, a piece
# and a task, with and without a past.
SIZES = [(1, 0), (5, 0), (1, 320), (130, 17), (8, 260), (300, 0)]


class Cache:
    """Keys, whose scores grow, and values of SIZES in random blocks; NaN wherever no token has been written."""

    def __init__(self, sizes, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype):
        torch.manual_seed(0)
        blocks_of = [-(-(tokens + past) // block_size) for tokens, past in sizes]
        num_blocks = sum(blocks_of) + 3
        free_blocks = iter(torch.randperm(num_blocks).tolist())
        self.tables = [[next(free_blocks) for _ in range(count)] for count in blocks_of]
        self.keys, self.values = (
            torch.full((kv_heads, num_blocks * block_size, dim), math.nan).to(dtype) for _ in range(2)
        )
        self.slots = [
            [table[i // block_size] * block_size + i % block_size for i in range(tokens + past)]
            for (tokens, past), table in zip(sizes, self.tables, strict=True)
        ]
        for slots in self.slots:
            growing = torch.linspace(0.1, 2, len(slots))[:, None]
            for tensor, factor in ((self.keys, growing), (self.values, 1)):
                tensor[:, slots] = (factor * torch.randn(kv_heads, len(slots), dim)).to(dtype)
        starts = [sum(tokens for tokens, _ in sizes[:i]) for i in range(len(sizes))]
        lengths = [tokens + past for tokens, past in sizes]
        self.segments = Segments(starts, [tokens for tokens, _ in sizes], lengths, self.tables, block_size)
        self.starts, self.total = starts, sum(tokens for tokens, _ in sizes)

    def attend(self, query, window=None, segments=None):
        return attention(query, self.keys, self.values, segments or self.segments, 0.3, window)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("dim", [2, 6, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (14, 2)])
@pytest.mark.parametrize("block_size", [1, 16, 300])
def test_every_query_attends_to_the_keys_before_it_within_the_window(
    dtype, tolerance, dim, heads, kv_heads, block_size
):
    """A block may be larger than a piece of keys, which are computed at a time. NaN from unwritten slots fails."""
    cache = Cache(SIZES, kv_heads, dim, block_size, dtype)
    query = torch.randn(cache.total, 3, heads, dim).to(dtype)[:, 1].transpose(0, 1)  # a view of a larger tensor
    for window in (None, 1, 9, 150):
        output = cache.attend(query, window)
        for (tokens, past), start, slots in zip(SIZES, cache.starts, cache.slots, strict=True):
            queries, keys = torch.arange(past, past + tokens)[:, None], torch.arange(past + tokens)
            mask = (keys <= queries) & (keys > queries - (window or math.inf))
            own = (query[:, start : start + tokens], cache.keys[:, slots], cache.values[:, slots])
            q, k, v = (tensor[None].double() for tensor in own)
            expected = scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
            most = tolerance * max(1, dim / (64 if dtype == torch.float32 else 128))  # larger scores, larger errors
            assert (output[start : start + tokens] - expected).abs().max() < most, (window, tokens, past)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("window", [None, 20])
def test_the_result_of_a_query_does_not_depend_on_the_size_of_its_chunk(dtype, tolerance, window):
    """A chunk of one token is a decode, which sums in another order."""
    cache = Cache([(300, 0)], 2, 64, 16, dtype)
    query = torch.randn(4, 300, 64).to(dtype)
    whole = cache.attend(query, window)
    sizes = [2, 3, 90, 33, 5, 167]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    lengths = [start + size for start, size in zip(starts, sizes, strict=True)]
    chunks = Segments(starts, sizes, lengths, cache.tables * len(sizes), 16)
    assert torch.equal(cache.attend(query, window, chunks), whole)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("dim", [6, 64, 128])
@pytest.mark.parametrize("window", [None, 20])
def test_the_bits_of_a_decode_do_not_depend_on_the_heads_that_are_computed_with_it(dtype, tolerance, dim, window):
    """Up to four heads that share keys are computed together, unless threads share out the heads of a few decodes."""
    cache = Cache([(1, 0), (1, 77), (1, 399), (1, 30)], 1, dim, 16, dtype)
    query = torch.randn(7, 4, dim).to(dtype)
    together = cache.attend(query, window)
    apart = [cache.attend(query[head : head + 1], window) for head in range(7)]
    assert torch.equal(together, torch.cat(apart, 1))
    last = Segments([3], [1], [31], cache.tables[3:], 16)
    assert torch.equal(cache.attend(query, window, last)[3], together[3])


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_the_bits_of_a_decode_do_not_depend_on_the_size_of_blocks(dtype, tolerance, dim, window):
    torch.manual_seed(0)
    query, keys, values = (torch.randn(2, tokens, dim).to(dtype) for tokens in (1, 301, 301))
    outputs = []
    for block_size in (4, 7, 16, 301):
        segments = Segments([0], [1], [301], [list(range(-(-301 // block_size)))], block_size)
        outputs.append(attention(query, keys, values, segments, 0.3, window))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_unsupported_queries_keys_and_values_are_recognised():
    def vectors(dim, dtype=torch.float32):
        return torch.ones(2, 3, dim, dtype=dtype)

    assert kernels.is_supported(vectors(512), vectors(512), vectors(512))
    assert not kernels.is_supported(vectors(514), vectors(514), vectors(514)), "512 numbers per head at most"
    assert not kernels.is_supported(vectors(7), vectors(7), vectors(7)), "two bfloat16 numbers are read at a time"
    assert not kernels.is_supported(*[vectors(8).to("meta")] * 3), "the kernels are for the CPU"
    assert not kernels.is_supported(torch.ones(7, 3, 8), torch.ones(3, 9, 8), torch.ones(3, 9, 8)), "heads share evenly"
    assert not kernels.is_supported(vectors(8, torch.float16), vectors(8, torch.float16), vectors(8, torch.float16))
    assert not kernels.is_supported(torch.ones(2, 4, 4).transpose(1, 2), *[torch.ones(2, 4, 4)] * 2), "strided numbers"


# --- what lies between linear layers and attention --------------------------------------------------------------------


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("size", [1, 15, 16, 771])
@pytest.mark.parametrize("kind", [kernels.LAYER_NORM, kernels.RMS_NORM, kernels.ZERO_CENTERED_RMS_NORM])
@pytest.mark.parametrize("with_update", [False, True])
def test_a_residual_is_added_in_place_and_its_norm_returned(dtype, tolerance, rows, size, kind, with_update):
    torch.manual_seed(0)
    x, update, weight, bias = (torch.randn(*shape).to(dtype) for shape in [(rows, size)] * 2 + [(size,)] * 2)
    x = x + 3  # a mean that LayerNorm has to subtract
    expected_sum = x + update if with_update else x.clone()
    wide = expected_sum.float(), (size,), weight.float() + (kind == kernels.ZERO_CENTERED_RMS_NORM)
    bias = bias if kind == kernels.LAYER_NORM else None
    expected = rms_norm(*wide, 1e-5) if bias is None else layer_norm(*wide, bias.float(), 1e-5)
    actual = kernels.add_norm(x, update if with_update else None, weight, bias, 1e-5, kind)
    assert torch.equal(x, expected_sum)
    torch.testing.assert_close(actual, expected.to(dtype), rtol=tolerance, atol=tolerance)


ACTIVATIONS = {kernels.TANH_GELU: lambda x: gelu(x, approximate="tanh"), kernels.SILU: silu}


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("kind", ACTIVATIONS, ids=["GELU", "SiLU"])
@pytest.mark.parametrize("shape", [(0, 3), (5, 1), (3, 100), (40, 1001)])
def test_an_activation_is_that_of_float32_rounded_once(dtype, tolerance, shape, kind):
    torch.manual_seed(0)
    pair = (8 * torch.randn(2, *shape)).to(dtype)
    x, factor = pair
    expected = ACTIVATIONS[kind](x.double())
    exact = {"rtol": tolerance, "atol": tolerance}
    beside = torch.cat([x, factor], dim=1).split(shape[1], dim=1)  # as one layer computes both
    for operands in (beside, (x.clone(), factor)):
        torch.testing.assert_close(kernels.activate(*operands, kind), (expected * factor.double()).to(dtype), **exact)
    assert kernels.activate(x, None, kind) is x
    torch.testing.assert_close(x, expected.to(dtype), **exact)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (6, 6), (80, 80), (64, 24)])
def test_heads_are_rotated_in_place_by_their_positions(dtype, tolerance, dim, rotated):
    """40 tokens of 3 heads are a view of a larger tensor; numbers behind the rotated ones stay."""
    torch.manual_seed(0)
    all_heads, (cos, sin) = torch.randn(40, 5, dim).to(dtype), torch.randn(2, 40, rotated).to(dtype)
    heads, before = all_heads[:, 1:4], all_heads.clone()
    expected = rotate(heads.float(), cos.float(), sin.float()).to(dtype)
    torch.testing.assert_close(kernels.rotate_(heads, cos, sin), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(all_heads[:, ::4], before[:, ::4])


# --- compiling --------------------------------------------------------------------------------------------------------


def program(path: Path, commands: str) -> Path:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return path


def name_of_library(_) -> str:
    forget()
    return compiled.library()._name


@needs_kernels
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(fresh):
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        first, second = pool.map(name_of_library, range(2))
    assert first == second and list(Path(first).parent.iterdir()) == [Path(first)], "no temporary files"


def test_a_cache_folder_that_cannot_be_written_is_a_reason_and_not_a_crash(fresh, tmp_path):
    (tmp_path / "kernels").write_text("a file in the folder's place")
    fresh.setenv("CXX", str(program(tmp_path / "c++", "true")))
    forget()
    assert "File exists" in kernels.unavailable()


@needs_kernels
def test_a_changed_source_is_compiled_anew(fresh):
    found = {name_of_library(0)}
    for name in SMALL[:2]:
        (compiled.SOURCES / name).write_text((compiled.SOURCES / name).read_text() + "// changed\n")
        found.add(name_of_library(0))
    assert len(found) == 3


# --- in an engine -----------------------------------------------------------------------------------------------------


def generated(pair, **config):
    """Return an engine and the token ids that it generates for six prompts."""
    params = [SamplingParams(max_tokens=5 + 3 * row) for row in range(6)]
    engine = Engine(*pair, EngineConfig(execution="ragged", max_batch_size=4, **config))
    return engine, [output.token_ids for output in engine.generate(PROMPTS[:6], params)]


@needs_kernels
def test_an_engine_uses_the_kernels_unless_the_config_forbids_it(monkeypatch):
    pair, calls = random_pair("llama"), []
    monkeypatch.setattr(kernels, "paged_attention", spied(kernels.paged_attention, calls))
    engine, plain = generated(pair, kernels=False)
    assert not calls and engine.runner.kernel is None
    engine, fast = generated(pair)
    assert calls and engine.runner.kernel
    assert fast == plain


def test_without_a_compiler_pytorch_does_the_work(request):
    pair = random_pair("llama")
    _, expected = generated(pair)
    fresh = request.getfixturevalue("fresh")
    forget()
    fresh.setattr(compiled.shutil, "which", lambda name: None)
    assert "no C++ compiler" in kernels.unavailable()
    engine, tokens = generated(pair)
    assert tokens == expected and engine.runner.kernel is None
    with pytest.raises(ValueError, match=r"No kernels can be compiled here: there is no C\+\+ compiler .*kernels=None"):
        generated(pair, kernels=True)
