"""The layout of the package: plain requests run without the features, and there is little to read about them."""

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import alone

from helpers import Engine, EngineConfig, SamplingParams
from helpers.engine import Sequence
from tests.support import use_copy
from tests.support.core_size import PACKAGE, Calls, calls_of, lines_of_code

APPLICATIONS = ("server", "cluster", "simulator", "load_test", "checks", "plots")
FEATURES = sorted(path.stem for path in (PACKAGE / "features").iterdir() if not path.stem.startswith("__"))
BARE = "without features and fast"
NEEDS = {field.name: field.metadata["needs"] for field in fields(SamplingParams) if "needs" in field.metadata}
BUILDS_ON = {"beam_search": "parallel_sampling"}
NEEDS |= {"speculative": "speculation", "generated": "resumption", "beam_search": "beam_search"}
NEEDS |= {"kv_cache": "quantized_kv_cache"}
NEEDS |= {"adapter": "adapters", "load_adapter": "adapters"}


# --- parts may be missing ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """What works in each copy: in one without all that is not the core, and in those without a single feature."""
    folder = tmp_path_factory.mktemp("copies")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (BARE, *FEATURES):
        copy = shutil.copytree(PACKAGE, folder / name / "helpers", ignore=ignored)
        for part in (*APPLICATIONS, *(("features", "fast") if name == BARE else ())):
            shutil.rmtree(copy / part)
        for path in (copy / "features").glob(f"{name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    names = [str(folder / name) for name in (BARE, *FEATURES)]
    result = subprocess.run([sys.executable, use_copy.__file__, *names], cwd=folder, capture_output=True, text=True)
    files = {name: folder / name / "report.json" for name in (BARE, *FEATURES)}
    assert all(file.exists() for file in files.values()), result.stderr
    return {name: json.loads(file.read_text()) for name, file in files.items()}


@pytest.mark.parametrize("missing", [BARE, *FEATURES])
@pytest.mark.parametrize("execution", ["ragged", "padded"])
def test_plain_requests_are_exact_whatever_is_missing(reports, embedded, missing, execution):
    found = reports[missing][execution]
    expected = [alone(*embedded, prompt, use_copy.MAX_TOKENS) for prompt in use_copy.PROMPTS]
    assert found["tokens"] == expected
    assert found["stream"] == expected[0]
    if execution == "ragged":
        assert found["preempted"] > 0 and found["shared"] > 0


@pytest.mark.parametrize("setting", NEEDS)
@pytest.mark.parametrize("missing", [BARE, *FEATURES])
def test_a_setting_is_refused_exactly_if_its_feature_is_missing(reports, missing, setting):
    if missing in (BARE, NEEDS[setting], BUILDS_ON.get(NEEDS[setting])):
        assert reports[missing][setting].startswith("refused: ")
        assert setting in reports[missing][setting]
    else:
        assert reports[missing][setting] == "works"


@pytest.mark.parametrize("setting", use_copy.FAST, ids=str)
def test_what_needs_the_folder_fast_is_refused_without_it(reports, setting):
    (name,) = setting
    assert reports[BARE][str(setting)].startswith("refused: ") and name in reports[BARE][str(setting)]


def test_integer_weights_work_without_the_folder_fast(reports):
    assert reports[BARE]["weights"] == "works"


# --- what a reader has to read ----------------------------------------------------------------------------------------

ENGINE = sorted((PACKAGE / "engine").glob("*.py"))


@pytest.fixture(scope="module")
def plain_request() -> Calls:
    """What a plain greedy request runs, from `add_request` to its last output."""
    engine, params = Engine(config=EngineConfig(**use_copy.SLOW_AND_SURE)), SamplingParams(max_tokens=8)

    def run():
        engine.add_request("The quick brown fox", params)
        while engine.has_unfinished_requests():
            engine.step()

    return calls_of(run)


def test_the_engine_has_few_files():
    assert len(ENGINE) <= 12


def test_the_engine_has_few_lines_of_code():
    sizes = {path.name: len(lines_of_code(path)) for path in ENGINE}
    assert sum(sizes.values()) <= 1000, sizes


def test_a_plain_request_runs_through_few_files(plain_request):
    assert len(plain_request.lines) <= 16, plain_request.by_file


def test_a_plain_request_runs_few_lines_of_code(plain_request):
    assert plain_request.lines_of_functions <= 648, plain_request.by_file


def test_the_scheduler_fits_on_a_few_screens():
    path = PACKAGE / "engine/scheduler.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    scheduler = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Scheduler")
    assert len(lines_of_code(path) & set(range(scheduler.lineno, scheduler.end_lineno + 1))) <= 150


def test_a_sequence_has_few_attributes():
    assert len(vars(Sequence("a", [1], 1))) <= 12
