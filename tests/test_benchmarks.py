"""The benchmark gives every engine the same work, and reports no time where outputs differ.

No test asserts how fast anything is.
"""

import io
import json

import pytest
import torch
from tqdm import tqdm

from benchmarks import __main__ as program
from benchmarks import report, workloads
from benchmarks.engines import TransformersStatic
from benchmarks.measure import Measurement, TokensDiffer, count_runs, make_shortfall, measure
from benchmarks.models import find_model
from benchmarks.other_programs import OtherPrograms, Watch

VOCABULARY = 50257
MACHINE = {"processor": "p", "cores": 2, "matrix units": ["amx_bf16"], "date": "today", "versions": {}}
IDLE = OtherPrograms(0.0, "")
SETTING = {"model": "m", "skipped": {}, "machine": MACHINE, "weight bytes": {}}


@pytest.fixture(autouse=True)
def known_bandwidth(request, monkeypatch):
    """Measure no bandwidth, which takes a second per workload, but in the slow test of a whole run."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("benchmarks.measure.memory_bandwidth", lambda: 1e10)


class CountingEngine:
    """A fake engine: counts up from the prompt's first token; the last token is wrong from request `wrong_from` on."""

    ours = samples = rounds = False

    def __init__(self, name, wrong_from=None, log=None):
        self.name, self.wrong_from = name, wrong_from
        self.log = [] if log is None else log

    def why_unavailable(self):
        return None

    def load(self, folder, dtype, rows):
        self.log.append(("load", self.name))

    def run(self, requests):
        self.log.append(("run", self.name))
        outputs = [[request.prompt[0] + i for i in range(request.max_tokens)] for request in requests]
        if self.wrong_from is not None:
            for output in outputs[self.wrong_from :]:
                output[-1] += 1
        return outputs

    def versions(self):
        return {self.name: "1.0"}

    def close(self):
        self.log.append(("close", self.name))


def measurement(engine, seconds, **changes):
    fields = dict(ours=False, workload="race", dtype="float32", rows=8, requests=32, prompt_tokens=224)
    fields |= dict(output_tokens=680, identical=1.0, shortfall=0.0, bandwidth=(1e6, 1e6), other_programs=IDLE)
    return Measurement(engine=engine, seconds=seconds, **(fields | changes))


# --- workloads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "requests", "prompts", "outputs"),
    [
        ("race", 8, 32, (7, 7), (10, 100)),  # of lesson 3
        ("mixed", 16, 64, (8, 128), (8, 128)),
        ("long", 16, 48, (256, 512), (16, 64)),
        ("one", 1, 1, (8, 8), (128, 128)),
    ],
)
def test_a_workload_has_the_sizes_that_its_description_states(name, rows, requests, prompts, outputs):
    build = workloads.WORKLOADS[name]
    workload = build(VOCABULARY)
    assert (workload.name, workload.rows, len(workload.requests)) == (name, rows, requests)
    assert all(prompts[0] <= len(request.prompt) <= prompts[1] for request in workload.requests)
    assert all(outputs[0] <= request.max_tokens <= outputs[1] for request in workload.requests)
    assert all(0 <= token < VOCABULARY for request in workload.requests for token in request.prompt)
    assert name != "race" or [request.max_tokens for request in workload.requests] == [100, *[10] * 7] * 4
    assert workload == build(VOCABULARY) != build(VOCABULARY, seed=1)


# --- the report -----------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_repeat():
    # In the last repeat, the machine is three times slower for both engines, which does not change the ratio.
    reference, other = measurement("transformers", [4.0, 5.0, 12.0]), measurement("llama", [2.0, 2.0, 6.0])
    assert report.ratios(reference, other) == report.Spread(median=2.0, least=2.0, greatest=2.5)
    assert report.tokens_per_second(other) == report.Spread(median=340.0, least=680 / 6, greatest=340.0)
    assert f"{report.ratios(reference, other):.1f}" == "2.0 (2.0–2.5)"


# --- other programs -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, capsys):
    """Run the program with counting engines; return its exit code and what it prints."""

    def main(*arguments, engines=None):
        code = program.main([*arguments, "--output", str(tmp_path)], engines or [CountingEngine("first")])
        return code, capsys.readouterr()

    return main


def test_figures_taken_beside_another_program_are_refused_and_with_force_marked(run, monkeypatch):
    monkeypatch.setattr(Watch, "stop", lambda self: OtherPrograms(0.8, "a video"))
    arguments = ["--model", "embedded", "--workloads", "one", "--repeats", "1"]
    (refused, without), (forced, shown) = run(*arguments), run(*arguments, "--force")
    assert (refused, without.out, forced) == (1, "", 0)
    assert "other programs kept 0.8 cores busy, a video most of all. End them, or use --force." in without.err
    assert "**Not idle**: other programs kept 0.8 cores busy" in shown.out


# --- tokens, then times ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "near"), [("float32", 0.0009), ("bfloat16", 0.019)])
def test_different_tokens_are_refused_before_any_run_is_timed_unless_they_are_near_ties(tmp_path, dtype, near):
    log, distance = [], 1.15 * near
    engines = [CountingEngine("first", log=log), CountingEngine("second", wrong_from=3, log=log)]
    message = "second and first gave different tokens for 29 of 32 requests of race.* of the logits' range"
    with pytest.raises(TokensDiffer, match=message):
        measure(engines, workloads.race(VOCABULARY), tmp_path, dtype, 3, shortfall=lambda request, output: distance)
    assert log.count(("run", "first")) == 1  # only the comparison
    assert log[-2:] == [("close", "first"), ("close", "second")]
    engines, seen = [CountingEngine("first"), CountingEngine("second", wrong_from=24)], []

    def shortfall(request, output):
        seen.append(output)
        return near if len(seen) == 3 else 0.0

    first, second = measure(engines, workloads.race(VOCABULARY), tmp_path, dtype, 1, settle=0, shortfall=shortfall)
    assert (first.identical, first.shortfall) == (1.0, 0.0)
    assert (second.identical, second.shortfall) == (0.75, near)
    assert len(seen) == 2 * 8  # both outputs of the 8 requests that differ, and no others
    assert f"| 75% ({near:.2%}) |" in report.markdown([first, second], SETTING)


def test_greedy_outputs_have_no_shortfall_and_others_the_share_of_the_range_that_they_miss():
    model, request = find_model(smoke=True), workloads.shortened(workloads.mixed(512)).requests[0]
    engine, shortfall = TransformersStatic(), make_shortfall(find_model(smoke=True).folder)
    engine.load(model.folder, "float32", rows=1)
    (output,) = engine.run([request])
    with torch.no_grad():
        ids = torch.tensor([request.prompt + output[:2]])
        logits = engine.model(ids).logits[0, -1]
    assert shortfall(request, output) < 1e-6
    worst = [*output[:2], int(logits.argmin())]
    assert shortfall(request, worst) == pytest.approx(1)


def test_engines_take_turns_and_each_is_first_once(tmp_path):
    log, bar = [], tqdm(file=io.StringIO())
    engines = [CountingEngine(name, log=log) for name in "ab"]
    measurements = measure(engines, workloads.one(VOCABULARY), tmp_path, "float32", 2, bar, settle=0)
    assert [name for what, name in log if what == "run"] == ["a", "b", "a", "b", "b", "a"]
    assert [len(measurement.seconds) for measurement in measurements] == [2, 2]
    assert bar.n == count_runs(engines, repeats=2)


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_smoke_run_works_end_to_end_and_writes_report_json_and_plot(tmp_path, capsys):
    names = ["transformers", "generate_batch", "static", "padded", "ragged", "ragged-longest", "ragged-int8"]
    arguments = ["--smoke", "--dtype", "float32", "bfloat16", "--workloads", "mixed", "one"]
    arguments += ["--output", str(tmp_path), "--engines", *names]
    assert program.main(arguments) == 0
    assert "random weights" in capsys.readouterr().out
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert written["skipped"] == {}
    results = written["results"]
    assert {(result["workload"], result["dtype"], result["engine"]) for result in results} == {
        (workload, dtype, name) for workload in ("mixed", "one") for dtype in ("float32", "bfloat16") for name in names
    }
    exact = [result for result in results if result["dtype"] == "float32" and result["engine"] != "ragged-int8"]
    assert all(result["identical"] == 1 for result in exact)
    assert "random weights" in (tmp_path / "benchmark.svg").read_text()
    assert (tmp_path / "benchmark.md").read_text().startswith("Model: ")


# --- workers --------------------------------------------------------------------------------------------------------
