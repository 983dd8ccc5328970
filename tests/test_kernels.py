"""The compiled kernels give what PyTorch's operators give, in every shape; where they cannot be had, nothing is lost.

That an engine on them changes no token is in test_ragged_exactness.py, where it comes and goes with everything else.
"""

import os
import subprocess
import sys

import pytest
import torch
from conftest import PROMPTS, random_pair, spied
from torch.nn.functional import linear, scaled_dot_product_attention

from helpers import Engine, EngineConfig, SamplingParams, kernels
from helpers.kernels import Decodes, compiled

needs_kernels = pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")


DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
in_both_dtypes = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items())


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As on a new machine: nothing is compiled yet."""
    monkeypatch.setattr(compiled, "BUILD", tmp_path / "kernels")
    yield monkeypatch
    monkeypatch.undo()
    forget()


def forget():
    compiled.library.cache_clear()
    compiled._problem.cache_clear()


# --- linear layers ----------------------------------------------------------------------------------------------------


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("outputs", [1, 16, 32, 33, 100])
@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_linear_is_pytorchs_linear(dtype, tolerance, outputs, inputs):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = kernels.pack(weight)
    for shape in [(0,), (1,), (2,), (7,), (8,), (9,), (1, 13), (2, 3, 5), (64,)]:
        x = torch.randn(*shape, inputs).to(dtype)
        for b in (bias, None):
            expected = linear(x.float(), weight.float(), None if b is None else b.float()).to(dtype)
            torch.testing.assert_close(kernels.linear(x, packed, b, outputs), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@in_both_dtypes
def test_strides_do_not_matter(dtype, tolerance):
    weight, x = torch.randn(24, 40).to(dtype).T, torch.randn(24, 9).to(dtype).T  # neither is contiguous
    expected = linear(x.float(), weight.float()).to(dtype)
    torch.testing.assert_close(kernels.linear(x, kernels.pack(weight), None, 40), expected, rtol=0.02, atol=tolerance)


@needs_kernels
@in_both_dtypes
def test_a_rows_numbers_do_not_depend_on_the_rows_beside_it(dtype, tolerance):
    weight, x = torch.randn(100, 64).to(dtype), torch.randn(37, 64).to(dtype)
    packed = kernels.pack(weight)
    together = kernels.linear(x, packed, None, 100)
    for row in range(37):
        assert torch.equal(kernels.linear(x[row : row + 1], packed, None, 100), together[row : row + 1])


@needs_kernels
def test_bfloat16_is_rounded_to_the_nearest():
    """1 + 2^-9 lies between 1 and 1 + 2^-7, nearer to 1; 1 + 2^-8 in the middle, so to the even one; the next is up."""
    x = torch.tensor([[1.0, 2**-9], [1.0, 2**-8], [1.0, 2**-8 + 2**-10], [1 + 2**-7, 2**-8]]).bfloat16()
    got = kernels.linear(x, kernels.pack(torch.ones(1, 2).bfloat16()), None, 1)
    assert got.flatten().tolist() == [1.0, 1.0, 1 + 2**-7, 1 + 2**-6]


@needs_kernels
@pytest.mark.parametrize(
    ("x", "bias", "says"),
    [
        (torch.ones(2, 24).bfloat16(), None, r"float32 on the CPU, not torch\.bfloat16"),
        (torch.ones(2, 24), torch.ones(40).double(), r"not torch\.float64"),
        (torch.ones(2, 24, device="meta"), None, "not torch.float32 on meta"),
        (torch.ones(2, 23), None, "takes 24 numbers, not 23"),
        (torch.ones(2, 24), torch.ones(39), "this bias do not have 40 outputs"),
    ],
)
def test_what_does_not_fit_the_weight_is_refused(x, bias, says):
    with pytest.raises(ValueError, match=says):
        kernels.linear(x, kernels.pack(torch.ones(40, 24)), bias, 40)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(query, keys, values, decodes, scale, window=None):
    """By the kernel: [T, heads, dim], NaN wherever it did not write."""
    answer = query.new_full((query.shape[1], query.shape[0], query.shape[2]), float("nan"))
    kernels.paged_attention(query, keys, values, decodes, answer, scale, window)
    return answer


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("dim", [4, 64, 80, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 1, 9])
def test_every_decode_meets_its_own_keys_wherever_they_lie(dtype, tolerance, dim, kv_heads, window):
    torch.manual_seed(0)
    heads, block_size, blocks = 6, 4, 40
    keys, values = (torch.randn(kv_heads, blocks * block_size, dim).to(dtype) for _ in range(2))
    query = torch.randn(9, 3, heads, dim).to(dtype)[:, 1].transpose(0, 1)  # [heads, T, dim], a part of something else
    columns, lengths = [1, 4, 5, 8], [1, 4, 5, 31]
    places = iter(torch.randperm(blocks).tolist())
    tables = [[next(places) for _ in range(-(-length // block_size))] for length in lengths]
    tables[1].append(next(places))  # memory for tokens that are not there yet

    answer = attention(query, keys, values, Decodes(columns, lengths, tables, block_size), 0.3, window)

    for column, length, table in zip(columns, lengths, tables, strict=True):
        first = 0 if window is None else max(0, length - window)
        slots = [table[i // block_size] * block_size + i % block_size for i in range(first, length)]
        q, k, v = query[:, column : column + 1].float(), keys[:, slots].float(), values[:, slots].float()
        expected = scaled_dot_product_attention(q[None], k[None], v[None], scale=0.3, enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(answer[column], expected.to(dtype), rtol=tolerance, atol=tolerance)
    assert answer[[0, 2, 3, 6, 7]].isnan().all(), "others' columns are left alone"


@needs_kernels
@pytest.mark.parametrize("block_size", [1, 16, 300, 1000])
def test_blocks_of_any_size(block_size):
    """Larger ones than the kernel takes at a time, too; scores that grow make it scale down what it has."""
    length = 700
    blocks = -(-length // block_size)
    keys, values = torch.randn(2, blocks * block_size, 8), torch.randn(2, blocks * block_size, 8)
    keys[:, :length, 0] = torch.linspace(-40, 40, length)
    query = torch.ones(2, 1, 8)
    answer = attention(query, keys, values, Decodes([0], [length], [list(range(blocks))], block_size), 1.0)
    expected = scaled_dot_product_attention(query[None], keys[None, :, :length], values[None, :, :length], scale=1.0)
    torch.testing.assert_close(answer[0], expected[0, :, 0], rtol=1e-4, atol=1e-5)


@needs_kernels
def test_a_decodes_numbers_do_not_depend_on_its_company_or_its_blocks():
    keys, values, query = torch.randn(2, 64, 8), torch.randn(2, 64, 8), torch.randn(2, 3, 8)
    keys[:, 40:50], values[:, 40:50] = keys[:, 8:18], values[:, 8:18]
    one = attention(query, keys, values, Decodes([1], [10], [[2, 3, 4]], 4), 1.0)
    company = Decodes([0, 1, 2], [20, 10, 3], [[7, 6, 5, 4, 3], [10, 11, 12], [0]], 4)
    other = attention(query, keys, values, company, 1.0)
    assert torch.equal(one[1], other[1])


def test_what_the_kernel_is_not_made_for_it_does_not_take():
    def of(dim, dtype=torch.float32):
        return torch.ones(2, 3, dim, dtype=dtype)

    assert kernels.takes(of(512), of(512), of(512))
    assert not kernels.takes(of(513), of(513), of(513)), "there is no room for a longer head"
    assert not kernels.takes(of(8), of(8), of(4))
    assert not kernels.takes(*[of(8).to("meta")] * 3), "the model has moved to another device"
    assert not kernels.takes(torch.ones(7, 3, 8), torch.ones(3, 9, 8), torch.ones(3, 9, 8)), "heads share evenly"
    assert not kernels.takes(of(8), of(8, torch.bfloat16), of(8, torch.bfloat16))
    assert not kernels.takes(of(8, torch.float16), of(8, torch.float16), of(8, torch.float16))
    assert not kernels.takes(of(3).transpose(1, 2), of(3), of(3)), "numbers of a head lie side by side"


# --- in an engine -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif("CI_KERNELS" not in os.environ, reason="a machine may have no compiler")
def test_they_can_be_had():
    assert kernels.unavailable() is None


def answers(pair, **config):
    params = [SamplingParams(max_tokens=5 + 3 * row) for row in range(6)]
    engine = Engine(*pair, EngineConfig(execution="ragged", max_batch_size=4, **config))
    return engine, [output.token_ids for output in engine.generate(PROMPTS[:6], params)]


@needs_kernels
def test_an_engine_uses_them_unless_it_is_told_not_to(monkeypatch):
    pair, calls = random_pair("llama"), []
    monkeypatch.setattr(kernels, "paged_attention", spied(kernels.paged_attention, calls))
    engine, plain = answers(pair, kernels=False)
    assert not calls and not engine.execution.compiled
    engine, fast = answers(pair)
    assert calls and engine.execution.compiled
    assert fast == plain


def test_without_a_compiler_pytorch_does_the_work(fresh):
    pair = random_pair("llama")
    _, expected = answers(pair)
    forget()
    fresh.setattr(compiled.shutil, "which", lambda name: None)
    assert "no C++ compiler" in kernels.unavailable()
    engine, got = answers(pair)
    assert got == expected and not engine.execution.compiled
    with pytest.raises(ValueError, match=r"No kernels can be compiled here: there is no C\+\+ compiler .*kernels=None"):
        answers(pair, kernels=True)


def test_a_compiler_that_fails_is_quoted(fresh, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'unknown option -fopenmp' >&2\nexit 1\n")
    compiler.chmod(0o755)
    fresh.setenv("CXX", str(compiler))
    forget()
    assert kernels.unavailable().endswith("unknown option -fopenmp\n")


@needs_kernels
def test_a_library_that_cannot_be_loaded_is_a_problem_and_no_crash(fresh, tmp_path):
    forget()
    header = tmp_path / "header.h"
    header.write_text('extern "C" int nowhere();\n__attribute__((used)) static int (*needed)() = nowhere;\n')
    fresh.setattr(compiled, "FLAGS", [*compiled.FLAGS, "-include", str(header)])
    assert "undefined symbol: nowhere" in kernels.unavailable()


def test_other_dtypes_and_devices_have_none():
    assert "not for cuda:0" in kernels.unavailable(torch.float32, "cuda:0")
    assert "not for float16" in kernels.unavailable(torch.float16)


@needs_kernels
def test_they_are_compiled_once_and_again_when_something_changes(fresh):
    forget()
    first = compiled.library()._name
    forget()
    fresh.setattr(compiled.subprocess, "run", only_asks(subprocess.run))
    assert compiled.library()._name == first
    forget()
    fresh.setattr(compiled, "FLAGS", [*compiled.FLAGS, "-DNDEBUG"])
    with pytest.raises(AssertionError, match="compiles"):
        compiled.library()


def only_asks(run):
    def call(command, **options):
        assert "-E" in command, "compiles"
        return run(command, **options)

    return call


@needs_kernels
def test_processes_that_begin_at_once_do_not_disturb_each_other(tmp_path):
    code = (
        "import sys, pathlib; from helpers.kernels import compiled\n"
        "compiled.BUILD = pathlib.Path(sys.argv[1]); print(compiled.library().panel_columns())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {int(process.communicate(timeout=120)[0]) for process in processes} <= {16, 32}
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"], "no rests"
