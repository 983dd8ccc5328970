"""The command that starts replicas: its options, also in docs/deployment.md, and its refusals."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cluster.__main__ import command
from helpers.command_line import parse

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("given, expected", [("1", (1, 1)), ("3", (3, 3)), ("1..4", (1, 4)), ("2..2", (2, 2))])
def test_the_number_of_replicas_may_be_a_range(given, expected):
    assert parse(command, ["--replicas", given]).replicas == expected


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--replicas", "0"], "a number of at least 1, or a range such as 1..4, not '0'"),
        (["--replicas", "4..2"], "not '4..2'"),
        (["--target", "0"], "--target must be a number above 0, not 0.0"),
        (["--adapter-folder", "."], "--adapter-folder is for a single server: name the replicas' adapters in"),
    ],
)
def test_an_option_outside_its_range_is_refused_with_the_reason(arguments, reason, capsys):
    with pytest.raises(SystemExit):
        parse(command, arguments)
    assert reason in capsys.readouterr().err


def test_the_help_and_refusals_need_no_ray():
    code = (
        "import runpy, sys; sys.modules['ray'] = None; sys.argv = ['helpers.cluster', *sys.argv[1:]];"
        "runpy.run_module('helpers.cluster', run_name='__main__')"
    )
    for argument, status in (("--help", 0), ("--replicas=1", 1)):
        ended = subprocess.run([sys.executable, "-c", code, argument], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == status and ("--replica-timeout" in ended.stdout) == (status == 0), ended.stderr
    assert "replicas need Ray, which is not installed: run `pip install" in ended.stderr


def test_every_command_on_the_page_has_options_that_exist():
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    commands = re.findall(r"python -m helpers\.cluster([^`\n]*)", page)
    assert len([parse(command, shlex.split(options)) for options in commands]) >= 3
