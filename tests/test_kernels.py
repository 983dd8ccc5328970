"""The compiled kernels compute what PyTorch's operators compute, in every shape, and an engine runs without them too.

test_ragged_exactness.py shows that they change no token while requests arrive, leave and are preempted.
"""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROMPTS, random_pair, spied
from torch.nn.functional import linear, scaled_dot_product_attention

from helpers import Engine, EngineConfig, SamplingParams
from helpers.fast import kernels
from helpers.fast.kernels import Segments, compiled

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


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("outputs", [1, 16, 32, 33, 100])
@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_linear_computes_pytorchs_linear(dtype, tolerance, outputs, inputs):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = kernels.pack(weight)
    for shape in [(0,), (1,), (2,), (7,), (8,), (9,), (1, 13), (2, 3, 5), (64,)]:
        x = torch.randn(*shape, inputs).to(dtype)
        for b in (bias, None):
            expected = linear(x.float(), weight.float(), None if b is None else b.float()).to(dtype)
            torch.testing.assert_close(kernels.linear(x, packed, b), expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@in_both_dtypes
def test_strides_do_not_matter(dtype, tolerance):
    weight, x, bias = torch.randn(24, 40).to(dtype).T, torch.randn(24, 9).to(dtype).T, torch.randn(80).to(dtype)[::2]
    assert not (weight.is_contiguous() or x.is_contiguous() or bias.is_contiguous())
    expected = linear(x.float(), weight.float(), bias.float()).to(dtype)
    torch.testing.assert_close(kernels.linear(x, kernels.pack(weight), bias), expected, rtol=0.02, atol=tolerance)


@needs_kernels
def test_bfloat16_is_rounded_to_nearest_even():
    """Halfway between 1 and the next number, 1 + 2^-7, is 1 + 2^-8: it goes to the even one, 1, and more goes up."""
    x = torch.tensor([[1.0, 2**-9], [1.0, 2**-8], [1.0, 2**-8 + 2**-10], [1 + 2**-7, 2**-8]]).bfloat16()
    got = kernels.linear(x, kernels.pack(torch.ones(1, 2).bfloat16()), None)
    assert got.flatten().tolist() == [1.0, 1.0, 1 + 2**-7, 1 + 2**-6]


def stored(weight: torch.Tensor, order: str) -> torch.Tensor:
    """Return the same weight [out, in], stored in the order of one kind of layer."""
    if order == "rows that lie apart":
        return torch.stack([weight, weight], dim=1)[:, 0]
    return weight.T.contiguous().T if order == "as in Conv1D" else weight.contiguous()


in_every_order = pytest.mark.parametrize("order", ["as in Linear", "as in Conv1D", "rows that lie apart"])


@needs_kernels
@in_both_dtypes
@in_every_order
@pytest.mark.parametrize("outputs", [1, 3, 33, 100, 2100])
@pytest.mark.parametrize("inputs", [0, 1, 2, 7, 64, 99])
def test_unpacked_linear_computes_pytorchs_linear(dtype, tolerance, order, outputs, inputs):
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    in_order = stored(weight, order)
    for shape in [(0,), (1,), (2,), (7,), (8,), (9,), (2, 3, 5), (67,)]:
        x = torch.randn(*shape, inputs).to(dtype)
        for b in (bias, None):
            expected = linear(x.float(), weight.float(), None if b is None else b.float()).to(dtype)
            actual = kernels.unpacked_linear(x, in_order, b)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@in_both_dtypes
def test_unpacked_linear_takes_any_strides(dtype, tolerance):
    weight = torch.randn(80, 48).to(dtype)[:, ::2]
    x, bias = torch.randn(24, 9).to(dtype).T, torch.randn(160).to(dtype)[::2]
    assert 1 not in weight.stride() and not (x.is_contiguous() or bias.is_contiguous())
    expected = linear(x.float(), weight.float(), bias.float()).to(dtype)
    torch.testing.assert_close(kernels.unpacked_linear(x, weight, bias), expected, rtol=0.02, atol=tolerance)


@needs_kernels
@in_both_dtypes
@in_every_order
def test_the_result_of_an_unpacked_row_does_not_depend_on_the_other_rows(dtype, tolerance, order):
    weight, x = stored(torch.randn(100, 99).to(dtype), order), torch.randn(70, 99).to(dtype)
    together = kernels.unpacked_linear(x, weight, None)
    for rows in (1, 2, 3, 5, 8, 37):
        parts = [kernels.unpacked_linear(part, weight, None) for part in x.split(rows)]
        assert torch.equal(torch.cat(parts), together)


@needs_kernels
@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.ones(2, 24).bfloat16(), None, r"float32 on the CPU, but an argument is torch\.bfloat16 on cpu"),
        (torch.ones(2, 24), torch.ones(40).double(), r"an argument is torch\.float64"),
        (torch.ones(2, 24, device="meta"), None, r"an argument is torch\.float32 on meta"),
        (torch.ones(2, 23), None, "has 24 inputs, but x has 23"),
        (torch.ones(2, 24), torch.ones(39), r"bias has shape \[39\], but the layer has 40 outputs"),
    ],
)
def test_arguments_that_do_not_fit_the_weight_are_rejected(x, bias, message):
    with pytest.raises(ValueError, match=message):
        kernels.linear(x, kernels.pack(torch.ones(40, 24)), bias)
    with pytest.raises(ValueError, match=message):
        kernels.unpacked_linear(x, torch.ones(40, 24), bias)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize("inputs", [23, 24])
@pytest.mark.parametrize("difference", [-1, 1])
def test_an_input_of_another_width_is_rejected_even_if_padding_would_make_it_fit(dtype, tolerance, inputs, difference):
    x, packed = torch.ones(2, inputs + difference).to(dtype), kernels.pack(torch.ones(40, inputs).to(dtype))
    with pytest.raises(ValueError, match=f"has {inputs} inputs, but x has {inputs + difference}"):
        kernels.linear(x, packed, None)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(query, keys, values, decodes, scale, window=None):
    """Return the kernel's output [T, heads, dim], NaN wherever it did not write."""
    output = query.new_full((query.shape[1], query.shape[0], query.shape[2]), float("nan"))
    kernels.paged_attention(query, keys, values, decodes, output, scale, window)
    return output


@needs_kernels
@pytest.mark.parametrize("block_size", [1, 16, 300, 1000])
def test_blocks_of_any_size(block_size):
    """A block may be larger than what the kernel processes at a time. Growing scores make it scale down its sums."""
    length = 700
    blocks = -(-length // block_size)
    keys, values = torch.randn(2, blocks * block_size, 8), torch.randn(2, blocks * block_size, 8)
    keys[:, :length, 0] = torch.linspace(-40, 40, length)
    query = torch.ones(2, 1, 8)
    output = attention(query, keys, values, Segments([0], [1], [length], [list(range(blocks))], block_size), 1.0)
    expected = scaled_dot_product_attention(query[None], keys[None, :, :length], values[None, :, :length], scale=1.0)
    torch.testing.assert_close(output[0], expected[0, :, 0], rtol=1e-4, atol=1e-5)


@needs_kernels
@in_both_dtypes
@pytest.mark.parametrize(
    ("score", "first", "last"),
    [
        *((-math.inf, *keys) for keys in [(0, 12), (0, 11), (0, 4), (3, 9), (8, 12)]),
        *((math.nan, *keys) for keys in [(0, 1), (0, 4), (9, 11)]),
    ],
)
def test_scores_of_minus_infinity_and_nan_give_what_they_give_in_pytorch(dtype, tolerance, score, first, last):
    """A key with the score -inf has no weight, and a query without any weights gets zeros. NaN stays NaN."""
    keys, values, query = torch.zeros(1, 12, 8), torch.randn(1, 12, 8).to(dtype), torch.zeros(1, 1, 8).to(dtype)
    keys[0, first:last, 0], query[..., 0] = score, 1
    keys = keys.to(dtype)
    output = attention(query, keys, values, Segments([0], [1], [12], [[0, 1, 2]], 4), 1.0)
    expected = scaled_dot_product_attention(query[None], keys[None], values[None], scale=1.0)
    torch.testing.assert_close(output[0], expected[0, :, 0], rtol=tolerance, atol=tolerance, equal_nan=True)


def test_unsupported_queries_keys_and_values_are_recognised():
    def vectors(dim, dtype=torch.float32):
        return torch.ones(2, 3, dim, dtype=dtype)

    assert kernels.is_supported(vectors(512), vectors(512), vectors(512))
    assert not kernels.is_supported(vectors(514), vectors(514), vectors(514)), "512 numbers per head at most"
    assert not kernels.is_supported(vectors(7), vectors(7), vectors(7)), "two bfloat16 numbers are read at a time"
    assert not kernels.is_supported(vectors(8), vectors(8), vectors(4))
    assert not kernels.is_supported(*[vectors(8).to("meta")] * 3), "the kernels are for the CPU"
    assert not kernels.is_supported(torch.ones(7, 3, 8), torch.ones(3, 9, 8), torch.ones(3, 9, 8)), "heads share evenly"
    assert not kernels.is_supported(vectors(8), vectors(8, torch.bfloat16), vectors(8, torch.bfloat16))
    assert not kernels.is_supported(vectors(8, torch.float16), vectors(8, torch.float16), vectors(8, torch.float16))
    assert not kernels.is_supported(torch.ones(2, 4, 4).transpose(1, 2), *[torch.ones(2, 4, 4)] * 2), "strided numbers"


# --- compiling --------------------------------------------------------------------------------------------------------


def test_other_dtypes_and_devices_have_no_kernels():
    assert "not for cuda:0" in kernels.unavailable(torch.float32, "cuda:0")
    assert "not for float16" in kernels.unavailable(torch.float16)


def test_the_message_of_a_failing_compiler_is_quoted(fresh, tmp_path):
    compiler = program(tmp_path / "c++", "echo 'unknown option -fopenmp' >&2; exit 1")
    fresh.setenv("CXX", str(compiler))
    forget()
    assert kernels.unavailable().endswith("unknown option -fopenmp\n")


def program(path: Path, commands: str) -> Path:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return path


@needs_kernels
def test_a_library_that_cannot_be_loaded_is_a_reason_and_not_a_crash(fresh, tmp_path):
    forget()
    header = tmp_path / "header.h"
    header.write_text('extern "C" int nowhere();\n__attribute__((used)) static int (*needed)() = nowhere;\n')
    fresh.setattr(compiled, "FLAGS", [*compiled.FLAGS, "-include", str(header)])
    assert "undefined symbol: nowhere" in kernels.unavailable()


# In a process of its own: loading a damaged library could end the process with a bus error.
COMPILING = f"""
import pathlib, sys
from helpers.fast.kernels import compiled
compiled.SOURCES, compiled.FLAGS = pathlib.Path(sys.argv[1]), {UNOPTIMIZED}
print(compiled.library()._name)"""


@needs_kernels
def test_processes_replace_a_damaged_library_and_do_not_disturb_each_other(fresh):
    forget()
    path = Path(compiled.library()._name)
    whole = path.read_bytes()
    path.unlink()  # this process has mapped the old file
    path.write_bytes(whole[: len(whole) // 2])
    command = [sys.executable, "-c", COMPILING, compiled.SOURCES]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate(timeout=300)[0] for process in processes} == {f"{path}\n"}
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == whole, "one library, and no temporary files"


CACHE_FOLDERS = {
    "the variable wins": ({"COURSE_KERNEL_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
    "the variable may start with ~": ({"COURSE_KERNEL_CACHE": "~/chosen"}, "/home/ada/chosen"),
    "the user's cache": ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/continuous-batching/kernels"),
    "a relative cache is ignored": ({"XDG_CACHE_HOME": "xdg"}, "/home/ada/.cache/continuous-batching/kernels"),
    "nothing is set": ({}, "/home/ada/.cache/continuous-batching/kernels"),
    "empty means not set": (
        {"COURSE_KERNEL_CACHE": "", "XDG_CACHE_HOME": ""},
        "/home/ada/.cache/continuous-batching/kernels",
    ),
}


@pytest.mark.parametrize(("environment", "folder"), CACHE_FOLDERS.values(), ids=CACHE_FOLDERS)
def test_compiled_kernels_are_kept_in_the_users_cache_unless_a_variable_names_a_folder(
    monkeypatch, environment, folder
):
    for name in ("COURSE_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/ada"} | environment).items():
        monkeypatch.setenv(name, value)
    assert compiled.cache_folder() == Path(folder)


def test_a_cache_folder_that_cannot_be_written_is_a_reason_and_not_a_crash(fresh, tmp_path):
    (tmp_path / "kernels").write_text("a file in the folder's place")
    fresh.setenv("CXX", str(program(tmp_path / "c++", "true")))
    forget()
    assert "File exists" in kernels.unavailable()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that fingerprints a copy of the sources; its compiler defines one macro for this machine."""
    shutil.copytree(compiled.SOURCES, tmp_path / "kernels")
    monkeypatch.setattr(compiled, "SOURCES", tmp_path / "kernels")

    def fingerprint(macro: str = "#define __AVX2__ 1") -> str:
        native = f"case $* in *-march=native*-dM*-E*) echo '{macro}';; esac"
        return compiled._fingerprint(str(program(tmp_path / "c++", native)))

    return fingerprint


@pytest.mark.parametrize(
    "name", sorted(path.name for path in compiled.SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
)
def test_the_fingerprint_changes_with_every_source_and_header(machine, name):
    before = machine()
    with (compiled.SOURCES / name).open("a") as file:
        file.write("// changed\n")
    assert machine() != before


@pytest.mark.parametrize("name", ["FLAGS", "LINK_FLAGS"])
def test_the_fingerprint_changes_with_the_processor_and_the_flags(machine, monkeypatch, name):
    before = machine()
    assert machine() == before != machine("#define __AVX512F__ 1")
    monkeypatch.setattr(compiled, name, [*getattr(compiled, name), "-g"])
    assert machine() != before


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
