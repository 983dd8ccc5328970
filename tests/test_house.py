"""The house rules that no linter checks: documented modules, short files, imports that cost nothing until needed.

Which module may import which is in pyproject.toml; `make test` checks it with import-linter.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import colab
import nbformat
import pytest

from helpers.set_up import NOT_FOR_LESSONS

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "helpers").rglob("*.py"))
MAX_LINES = 350
DATA = {"helpers/tiny_model/corpus.py"}  # word lists and sentences: long, but there is no logic to follow

# Packages that a requirement brings along and documents as part of itself.
INCLUDED = {
    "pillow": {"PIL"},
    "transformers": {"huggingface_hub", "safetensors", "tokenizers"},
    "fastapi": {"pydantic", "starlette"},
    "uvicorn": {"h11"},
    "cyclopts": {"docstring_parser"},
    "matplotlib": {"PIL"},
}
NOTEBOOK = {"IPython", "packaging"}  # imported only inside a notebook, where Jupyter's kernel requires them


def path_of(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


def test_every_module_has_a_docstring_and_is_short_enough_to_read_at_once():
    sources = {path_of(module): module.read_text(encoding="utf-8") for module in MODULES}
    without = [path for path, source in sources.items() if not ast.get_docstring(ast.parse(source))]
    assert without == [], "a docstring states the module's idea and its claim"
    long = [path for path, source in sources.items() if source.count("\n") > MAX_LINES and path not in DATA]
    assert long == [], f"a file over {MAX_LINES} lines has more than one idea: split it"


HEAVY = {"torch", "transformers", "numpy"}
LIGHT = {
    "import helpers.set_up, helpers.engine, helpers.metrics, helpers.trace, helpers.cluster.lockstep\n"
    "from helpers import EngineConfig, Request, RequestOutput, SamplingParams, Trace, workloads\n"
    "from helpers.checks import compare_guess": HEAVY,
    "run('helpers', '--help')": HEAVY,
    "run('helpers.load_test', '--help')": HEAVY | {"matplotlib"},
}
RUN = """
import contextlib, io, runpy, sys

def run(module, *arguments):
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("code", LIGHT)
def test_what_needs_no_model_loads_none_of_the_heavy_packages(code):
    program = f"{RUN}\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "helpers" in loaded
    assert not loaded & LIGHT[code]


# --- requirements -----------------------------------------------------------------------------------------------------


def declared(without: Iterable[str] = ()) -> list[str]:
    """Return the requirements of the package and of its extras, but for those left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(without) <= set(extras)
    return project["dependencies"] + [line for extra in set(extras) - set(without) for line in extras[extra]]


def test_the_package_and_the_lessons_require_the_same_versions():
    lessons = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    missing = set(declared(without=NOT_FOR_LESSONS)) - set(lessons)
    assert not missing, "a range in pyproject.toml is missing from requirements.txt"


def test_every_package_that_helpers_or_a_notebook_imports_is_declared():
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in declared()}
    names |= {included for name in names for included in INCLUDED.get(name, ())} | NOTEBOOK | sys.stdlib_module_names
    missing = {path_of(module): imported(module.read_text("utf-8")) - names for module in MODULES}
    for path in colab.notebooks_of():
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        source = re.sub(r"^\s*[%!].*", "pass", "\n".join(cell.source for cell in cells), flags=re.MULTILINE)
        missing[path_of(path)] = imported(source) - names - {"helpers"}
    assert {path: packages for path, packages in missing.items() if packages} == {}


def imported(source: str) -> set[str]:
    """Return the top-level packages that absolute imports name, those in functions included."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages.add(node.module.partition(".")[0])
    return packages
