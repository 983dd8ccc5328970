"""The backend of a linear layer is chosen by measurement, once per machine; copies of weights are kept if they pay.

No test asserts which backend wins, or how long a measurement takes.
"""

import math

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers.fast import kernels, linear, linear_backends, linear_choice
from helpers.fast.kernels import compiled
from helpers.fast.linear import FastLinear, choose_linear_backends
from helpers.fast.linear_choice import ROWS, Times, fingerprint, load, save, shape_of, times_of
from helpers.models import quantize

NAMES = ["pytorch", "compiled", "compiled_unpacked"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache folder, as on a new machine. The compiled kernels are where they were."""
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """Replace the backends with two that record each call and its number of rows; the second one copies the weight."""
    calls = []

    def recording(name: str):
        return lambda layer: lambda x: calls.append((name, x.shape[0])) or layer(x)

    for name in ("pytorch", "compiled"):
        monkeypatch.setitem(linear_backends.BACKENDS, name, recording(name))
    monkeypatch.setattr(linear, "available_backends", lambda *kind: ["pytorch", "compiled"])
    monkeypatch.setattr(linear, "MIN_MODEL_BYTES", 0)
    monkeypatch.setattr(linear, "MIN_LAYER_BYTES", 0)
    monkeypatch.setattr(linear_choice, "busy_elsewhere", lambda: 0.0)
    monkeypatch.setattr(linear_choice, "BUDGET", math.inf)
    return calls


def layers():
    """Return two layers of one shape, and one of another class and the same sizes."""
    return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24), Conv1D(24, 24))


# --- the rule ---------------------------------------------------------------------------------------------------------


PYTORCH = [10.0, 10.0, 10.0]
CHOICES = {
    "the fastest for each number": (
        {"pytorch": [1.0, 4.0], "compiled_unpacked": [2.0, 3.0]},
        ["pytorch"] + ["compiled_unpacked"] * 6,
    ),
    "no copy that saves less than 15 percent": ({"pytorch": PYTORCH, "compiled": [10.0, 8.6, 10.0]}, ["pytorch"] * 7),
    "a copy that saves 15 percent": ({"pytorch": PYTORCH[:2], "compiled": [10.1, 8.4]}, ["pytorch"] + ["compiled"] * 6),
    "a copy that is kept, wherever it is faster": ({"pytorch": PYTORCH[:2], "compiled": [9.9, 5.0]}, ["compiled"] * 7),
}


@pytest.mark.parametrize("times, names", CHOICES.values(), ids=CHOICES)
def test_the_fastest_backends_are_chosen_and_copies_that_pay(times, names):
    """The times are those of the first numbers of rows. Later ones take the last choice."""
    assert Times(times).choose(list(times)) == names


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(kernels.unavailable()), reason=f"no compiled kernels: {kernels.unavailable()}")
@pytest.mark.parametrize("copies, expected", [(True, "compiled"), (False, "compiled_unpacked")])
def test_the_kernel_for_the_own_weight_is_only_chosen_where_no_copy_may_be_kept(monkeypatch, copies, expected):
    seconds = dict(zip(NAMES, [9e-6, 2e-6, 1e-6], strict=True))
    times = Times({name: [each] * len(ROWS) for name, each in seconds.items()})
    monkeypatch.setattr(linear, "times_of", lambda layers, backends: {shape_of(layer): times for layer in layers})
    monkeypatch.setattr(linear, "available_backends", lambda *kind: NAMES)
    monkeypatch.setattr(linear, "MIN_MODEL_BYTES", 0)
    model = nn.Sequential(nn.Linear(600, 900))
    choose_linear_backends(model, copies=copies)
    assert model[0].backends == [expected] * len(ROWS)


def test_a_quantized_layer_is_not_timed_with_pytorch_alone(monkeypatch):
    names, times = [], Times({name: [1.0] for name in linear_backends.QUANTIZED})
    monkeypatch.setattr(linear, "times_of", lambda layers, own: names.extend(own) or {shape_of(layers[0]): times})
    monkeypatch.setattr(linear, "available_backends", lambda dtype, device, all_names: [*all_names])
    monkeypatch.setattr(linear, "MIN_MODEL_BYTES", 0)
    choose_linear_backends(quantize(nn.Sequential(nn.Linear(600, 900)), "int8"))
    assert names == ["compiled", "dequantized"]


def test_small_layers_and_small_models_are_not_measured(calls, monkeypatch):
    monkeypatch.setattr(linear, "MIN_LAYER_BYTES", 1_000_000)
    assert choose_linear_backends(layers()) == 0
    monkeypatch.setattr(linear, "MIN_LAYER_BYTES", 0)
    monkeypatch.setattr(linear, "MIN_MODEL_BYTES", 10_000_000)
    assert choose_linear_backends(layers()) == 0
    assert not calls


def test_layers_get_what_was_chosen_for_their_shape_and_stay_where_pytorch_wins(calls, monkeypatch):
    slow, quick = [2.0] * len(ROWS), [1.0] * len(ROWS)
    times = {
        "Linear 24x24": Times({"pytorch": quick, "compiled": slow}),
        "Conv1D 24x24": Times({"pytorch": slow, "compiled": quick}),
    }
    monkeypatch.setattr(linear, "times_of", lambda layers, backends: times)
    model = layers()
    assert choose_linear_backends(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, FastLinear]
    assert model[2].backends == ["compiled"] * len(ROWS)


# --- keeping ----------------------------------------------------------------------------------------------------------

TIMES = {"Linear 24x24": Times({"pytorch": [0.5, 0.25]})}


def machine(dtype=torch.float32, backends=("pytorch",)):
    return fingerprint(dtype, list(TIMES), backends)


def test_times_are_measured_once(calls, cache):
    first = times_of(list(layers()), ["pytorch", "compiled"])
    calls.clear()
    assert times_of(list(layers()), ["pytorch", "compiled"]) == first
    assert not calls
    assert [path.suffix for path in cache.iterdir()] == [".json"], "no temporary files remain"


ELSEWHERE = {
    "processor": lambda patch: patch.setattr(linear_choice, "processor", lambda: "another"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 99),
    "torch": lambda patch: patch.setattr(torch, "__version__", "another"),
}


@pytest.mark.parametrize("change", ELSEWHERE.values(), ids=ELSEWHERE)
def test_times_of_another_machine_are_not_used(change, monkeypatch):
    save(machine(), TIMES)
    assert load(machine()) == TIMES
    change(monkeypatch)
    assert load(machine()) is None


def test_a_damaged_file_is_ignored_and_replaced(cache):
    save(machine(), TIMES)
    (path,) = cache.iterdir()
    path.write_text(path.read_text()[:40])
    assert load(machine()) is None
    save(machine(), TIMES)
    assert load(machine()) == TIMES


def test_a_cache_folder_that_cannot_be_written_keeps_nothing(calls, cache, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    (cache / "file").write_text("")
    for folder in (lambda: cache / "file", no_home):
        monkeypatch.setattr(compiled, "cache_folder", folder)
        assert len(times_of(list(layers()), ["pytorch", "compiled"])) == 2
        assert load(machine()) is None
