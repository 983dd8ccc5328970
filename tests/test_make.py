"""What `make` and GitHub's workflows set up and start, as far as it can be checked here."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


WORKFLOWS = sorted((ROOT / ".github").glob("*/*.yml"))


def run(*command, **more):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)


def test_make_lists_its_commands_without_an_error_in_a_folder_without_tests(tmp_path):
    result = run("make", "--file", ROOT / "Makefile", cwd=tmp_path)
    assert "make course " in result.stdout and result.stderr == ""


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_without_the_tested_packages_is_refused_before_anything_is_installed(tmp_path, version):
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        (tmp_path / name).touch()
    other = tmp_path / "python"
    code = f"import sys; sys.version_info = (*{version}, 0); exec(sys.argv[1])"
    other.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 3\nexec {sys.executable} -c "{code}" "$2"\n')
    other.chmod(0o755)
    result = run("make", "-f", ROOT / "Makefile", "lab", f"PYTHON={other}", cwd=tmp_path)
    assert result.returncode != 0
    assert "needs Python 3.11 to 3.14" in result.stderr and "make PYTHON=python3.12" in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
def test_the_link_to_the_package_needs_no_network_and_leaves_copies_of_the_package_as_they_are(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "helpers", tmp_path / "helpers", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv").returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib"))
    (link,) = re.findall(r"^LINK := (.*)$", MAKEFILE, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = run(python, "-m", "pip", "install", "--no-index", *link.split(), cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    found = run(python, "-c", "import helpers; print(helpers.__file__)", cwd="/", env=environment)
    assert found.stdout.strip() == str(tmp_path / "helpers" / "__init__.py")
    (tmp_path / "copy").mkdir()
    shutil.copytree(ROOT / "helpers", tmp_path / "copy" / "helpers", ignore=shutil.ignore_patterns("features"))
    found = run(python, "-c", "import helpers.features", cwd=tmp_path / "copy", env=environment)
    assert "No module named 'helpers.features'" in found.stderr


# --- GitHub's workflows -----------------------------------------------------------------------------------------------


def test_the_workflows_follow_githubs_schema():
    result = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_targets_and_files_that_exist_and_says_what_has_not_run(workflow):
    text = workflow.read_text(encoding="utf-8")
    commands = re.findall(r"^ *- run: (.*)$", text, re.M)
    assert commands and "What has not run" in re.match(r"(?:#.*\n)+", text)[0]
    for command in commands:
        for target in re.findall(r"^make ([\w-]+)", command):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), command
        for path in re.findall(r"[\w/-]+\.(?:py|txt)\b", command):
            assert (ROOT / path).is_file(), command
