"""GitHub's workflows, as far as they can be checked without GitHub: their schema, and that what they run exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_workflows_follow_githubs_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_names_targets_and_files_that_exist(workflow):
    commands = re.findall(r"^ *- run: (.*)$", workflow.read_text(encoding="utf-8"), re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert commands
    for command in commands:
        for target in re.findall(r"^make ([\w-]+)", command):
            assert re.search(rf"^{target}:", makefile, re.M), command
        for path in re.findall(r"[\w/-]+\.(?:py|txt)\b", command):
            assert (ROOT / path).is_file(), command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_says_what_has_not_run(workflow):
    header = re.match(r"(?:#.*\n)+", workflow.read_text(encoding="utf-8"))[0]
    assert "What has not run" in header
