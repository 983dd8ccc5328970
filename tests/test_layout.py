"""The layout of the package: plain requests run without the features, and there is little to read about them."""

import ast
import io
import json
import shutil
import subprocess
import sys
import tokenize
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import alone

from helpers import SamplingParams
from helpers.engine import Sequence
from tests.support import use_copy

PACKAGE = Path(__file__).resolve().parents[1] / "helpers"
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
    done = subprocess.run([sys.executable, use_copy.__file__, *names], cwd=folder, capture_output=True, text=True)
    files = {name: folder / name / "report.json" for name in (BARE, *FEATURES)}
    assert all(file.exists() for file in files.values()), done.stderr
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
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(path: Path) -> int:
    """Return how many lines of a file have a token other than a comment, and are no part of a docstring."""
    source = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_engine_has_few_files():
    assert len(ENGINE) <= 12


def test_the_engine_has_few_lines_of_code():
    sizes = {path.name: lines_of_code(path) for path in ENGINE}
    assert sum(sizes.values()) <= 1000, sizes


def test_a_sequence_has_few_attributes():
    assert len(vars(Sequence("a", [1], 1))) <= 12
