"""The command line of the simulator answers with goodput per fleet size, and says what is wrong with its input."""

import re
import shlex
from pathlib import Path

import pytest

from helpers import load_model
from helpers.simulator import CostModel, TimedRequest, write_trace
from helpers.simulator.__main__ import main

ROOT = Path(__file__).parents[1]
SECOND_PER_ITERATION = CostModel(iterations=1.0)


@pytest.fixture
def trace(tmp_path):
    """Four requests at once, of two tokens each."""
    write_trace(tmp_path / "trace.csv", [TimedRequest(number / 1e6, 1, 2) for number in range(4)])
    SECOND_PER_ITERATION.save(tmp_path / "cost.json")
    return ["--trace", str(tmp_path / "trace.csv"), "--cost", str(tmp_path / "cost.json"), "--rows", "1"]


def rows(text: str) -> list[list[str]]:
    lines = text.split("\n\n")[1].splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def test_each_size_gets_a_line_and_the_smallest_that_suffices_is_named(trace, capsys):
    status = main([*trace, "--replicas", "1..3", "--slo", "ttft=3,e2e=4.5", "--price-per-hour", "3600"])
    text = capsys.readouterr().out
    head, *sizes = rows(text)
    assert status == 0
    assert text.startswith("4 requests arrive within ")
    assert text.splitlines()[0].endswith("; unknown model on unknown machine, unknown source")
    assert head[:4] == ["replicas", "finished/s", "goodput/s", "within"]
    assert [size[0] for size in sizes] == ["1", "2", "3"]
    assert [size[3] for size in sizes] == ["50.0%", "100.0%", "100.0%"]
    assert [float(size[-1]) for size in sizes] == pytest.approx([1e6, 1e6, 1.5e6], rel=0.01)


def test_replicas_that_come_and_go_or_do_half_of_the_work_get_a_line_each(trace, tmp_path, capsys):
    write_trace(tmp_path / "trace.csv", [TimedRequest(number / 1e6, 1, 2) for number in range(40)])
    fleets = ["--replicas", "3", "--autoscale", "1..3", "--start-seconds", "5", "--price-per-hour", "3600"]
    assert main([*trace, *fleets, "--disaggregate", "1:1", "--slo", "ttft=100"]) == 0
    text = capsys.readouterr().out
    assert main([*trace, *fleets, "--fail-every", "20"]) == 0
    failing = rows(capsys.readouterr().out)
    head, fixed, scaled, separate = rows(text)
    assert head[-1] == "mean size price per 1M"  # two columns
    assert (fixed[0], scaled[0], separate[0]) == ("3", "1..3", "1:1")
    assert float(fixed[-2]) == 3.0 and float(separate[-2]) == 2.0 and 1 < float(scaled[-2]) < 3
    assert float(fixed[-1]) == pytest.approx(3 * 28 * 1e6 / 80, rel=0.01)
    assert float(separate[-1]) == pytest.approx(2 * 41 * 1e6 / 80, rel=0.01)
    mean, seconds = float(scaled[-2]), 40 / float(scaled[1])
    assert float(scaled[-1]) == pytest.approx(mean * seconds * 1e6 / 80, rel=0.02)
    assert text.endswith("the smallest of these fleets has 1:1 replicas.\n")
    assert failing[0][-2:] == ["mean size", "resumed price per 1M"]
    assert int(failing[1][-2]) > 0 and float(failing[1][1]) < float(fixed[1])
    assert failing[2][0] == "1..3" and int(failing[2][-2]) > 0


def test_replicas_of_two_devices_halve_the_time_and_have_the_rows_of_both(trace, tmp_path, capsys):
    CostModel(iterations=1.0, sums=10, sum_bytes=1.0).save(tmp_path / "cost.json")
    link = ["--sum-seconds", "0.005", "--link-bytes", "1e12", "--price-per-hour", "3600"]
    assert main([*trace, "--replicas", "2,3", "--tensor-parallel", "2", *link, "--slo", "e2e=2.8"]) == 0
    text = capsys.readouterr().out
    _, two, three, split = rows(text)
    assert [line[0] for line in (two, three, split)] == ["2", "3", "1x2"]
    assert [line[3] for line in (two, three, split)] == ["50.0%", "75.0%", "100.0%"]
    assert [float(line[4]) for line in (two, split)] == [2.0, 1.37]  # first tokens at 1, 1, 3, 3; from 0.55 to 2.2
    assert [float(line[-1]) for line in (two, split)] == pytest.approx([2 * 4e6 / 8, 2 * 2.75e6 / 8], rel=0.01)
    assert text.endswith("the smallest of these fleets has 1x2 replicas.\n")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--replicas", "0"], "sizes are like 4, 1..8 or 1,2,4, not '0'"),
        (["--slo", "itl=1"], "limits are some of ttft=SECONDS,tpot=SECONDS,e2e=SECONDS, not 'itl=1'"),
        (["--disaggregate", "1:1,2:0"], "pairs are like 2:1 or 1:1,2:1, not '1:1,2:0'"),
        (["--fail-every", "60", "--disaggregate", "1:1"], "--fail-every excludes --disaggregate"),
        (["--replicas", "1,3", "--tensor-parallel", "1,2"], "--tensor-parallel 2 divides none of --replicas"),
        (["--cost", "nowhere.json"], "nowhere.json"),
        (["--trace", "nowhere.csv"], "cannot open nowhere.csv: No such file or directory."),
        (["--blocks", "1", "--block-size", "1"], "need 2 blocks of 1 tokens, and this engine has 1"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_reason(trace, capsys, arguments, reason):
    with pytest.raises(SystemExit) as exit:
        main([*trace, *arguments])
    assert exit.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_can_be_measured_and_its_costs_used(tmp_path, capsys):
    file = str(tmp_path / "machine.json")
    assert main(["--fit", file, "--requests", "20", "--dtype", "bfloat16", "--rows", "4", "--tokens", "64"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the prediction is off by") == 2
    cost, config = CostModel.load(file), load_model()[0].config
    assert (cost.about["rows"], cost.about["tokens per iteration"]) == (4, 64)
    assert (cost.sums, cost.sum_bytes) == (2 * config.num_hidden_layers + 1, 2 * config.hidden_size)
    assert main(["--synthetic", "code", "--requests", "20", "--cost", file]) == 0
    assert "the embedded model in bfloat16 on" in capsys.readouterr().out


def test_the_page_on_planning_shows_what_its_first_command_prints(capsys):
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").replace("\\\n", "")
    command, printed = re.search(
        r"python -m helpers\.simulator (.*)\n```.*?```text\n(.*?)```", page, re.DOTALL
    ).groups()
    assert main(shlex.split(command.replace("benchmarks", str(ROOT / "benchmarks")))) == 0
    assert capsys.readouterr().out.partition("\n\n")[2] == printed


def test_the_page_on_planning_reports_what_the_commands_for_split_models_print(capsys):
    """To the two digits that it gives."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split("## One model on several")[1]
    commands = page.partition("```bash\n")[2].partition("```")[0].replace("\\\n", "").splitlines()
    tables = []
    for command in commands:
        assert main(shlex.split(command)[3:]) == 0
        tables.append([(float(line[4]), float(line[6])) for line in rows(capsys.readouterr().out)[1:5]])
    written = re.findall(r"([\d.]+) (m?s)\b", page.partition("| --- |")[2].partition("\n\n")[0])
    seconds = [float(number) / {"ms": 1000, "s": 1}[unit] for number, unit in written]
    printed = [latency for line in zip(*tables, strict=True) for latencies in line for latency in latencies]
    assert seconds == pytest.approx(printed, rel=0.05)
