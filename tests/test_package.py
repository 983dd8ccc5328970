"""The wheel works without the checkout: it is built, installed into a new environment and run from an empty folder.

Nothing is downloaded. The new environment borrows torch and all other packages from the one that runs the tests.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import alone

from helpers.fast import kernels
from tests.support.building import ROOT, pip

pytestmark = pytest.mark.slow
PROMPT, MAX_TOKENS = "The quick brown fox", 8


class Installation:
    """A virtual environment with the wheel, used from an empty folder by a user with an empty cache."""

    def __init__(self, folder: Path, wheel: Path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        pip("install", wheel, python=self.python)
        (self.packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (self.packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        self.empty, self.cache = folder / "empty", folder / ".cache"
        self.empty.mkdir()
        ours = ("PYTHONPATH", "COURSE_KERNEL_CACHE")
        self.environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.environment |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *arguments: str) -> str:
        """Run the environment's Python and return what it prints."""
        command = [self.python, *arguments]
        result = subprocess.run(
            command, cwd=self.empty, env=self.environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return result.stdout

    def files(self) -> set[Path]:
        return set(self.packages.rglob("*"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Installation(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_holds_every_file_of_helpers_and_nothing_else(wheel):
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "helpers").rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == {name for name in expected if ".pyc" not in name}


def test_an_engine_generates_with_the_embedded_model_and_kernels_in_the_users_cache(installed, embedded):
    before = installed.files()
    code = (
        "from helpers import Engine, SamplingParams\n"
        f"print(Engine().generate({PROMPT!r}, SamplingParams(max_tokens={MAX_TOKENS}))[0].token_ids)"
    )
    assert installed.run("-c", code) == f"{alone(*embedded, PROMPT, MAX_TOKENS)}\n"
    assert installed.files() == before, "site-packages may be read-only"
    compiled = [path.suffix for path in (installed.cache / "continuous-batching" / "kernels").glob("*")]
    assert compiled == ([] if kernels.unavailable() else [".so"])
    assert not list(installed.empty.iterdir())


def test_the_command_line_generates_the_same_text(installed, embedded):
    model, tokenizer = embedded
    text = tokenizer.decode(alone(model, tokenizer, PROMPT, MAX_TOKENS), skip_special_tokens=True)
    assert text in installed.run("-m", "helpers", PROMPT, "--max-tokens", str(MAX_TOKENS))


SERVER = ["aiohttp", "fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"]
PLOTS = ["matplotlib", "IPython"]
WITHOUT = """
import importlib.abc, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
runpy.run_module("{command}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("command", "missing"), [("helpers", SERVER + PLOTS), ("helpers.server", PLOTS), ("helpers.load_test", PLOTS)]
)
def test_every_command_starts_with_only_its_own_extra(installed, command, missing):
    assert f"python -m {command}" in installed.run("-c", WITHOUT.format(missing=missing, command=command), "--help")
