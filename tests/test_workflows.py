"""GitHub's workflows, as far as they can be checked without GitHub: their schema, and that what they run exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github").glob("*/*.yml"))


def test_the_workflows_follow_githubs_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_targets_and_files_that_exist_and_says_what_has_not_run(workflow):
    text, makefile = workflow.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^ *- run: (.*)$", text, re.M)
    assert commands and "What has not run" in re.match(r"(?:#.*\n)+", text)[0]
    for command in commands:
        for target in re.findall(r"^make ([\w-]+)", command):
            assert re.search(rf"^{target}:", makefile, re.M), command
        for path in re.findall(r"[\w/-]+\.(?:py|txt)\b", command):
            assert (ROOT / path).is_file(), command


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_without_the_tested_packages_is_refused_before_anything_is_installed(tmp_path, version):
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        (tmp_path / name).touch()
    other = tmp_path / "python"
    code = f"import sys; sys.version_info = (*{version}, 0); exec(sys.argv[1])"
    other.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 3\nexec {sys.executable} -c "{code}" "$2"\n')
    other.chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", "lab", f"PYTHON={other}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python 3.11 to 3.14" in done.stderr and "make PYTHON=python3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_newest_python_that_the_makefile_accepts_is_tested():
    versions = re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    accepted = re.search(r"needs Python (3\.\d+) to (3\.\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(versions) == set(accepted.groups())
