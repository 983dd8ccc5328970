"""Traces in published formats are read, and synthetic ones have the statistics that they claim."""

import itertools
import statistics
from pathlib import Path

import pytest

from helpers.simulator import TimedRequest, read_trace, synthetic_trace, write_trace
from helpers.simulator.synthetic import TRACES
from helpers.simulator.trace_files import at_rate

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
COMMITTED = Path(__file__).parents[1] / "benchmarks" / "traces"


def read(tmp_path, text: str) -> list[TimedRequest]:
    (tmp_path / "trace.csv").write_text(text)
    return read_trace(tmp_path / "trace.csv")


def test_azures_columns_are_read_with_dates_of_both_years(tmp_path):
    first = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9305900,396,109\n"
    second = "2024-05-10 00:00:00.250000+00:00,10,2\n2024-05-10 00:00:01+00:00,20,1\n"
    assert read(tmp_path, AZURE + first) == [(0.0, 374, 44), (4.25, 396, 109)]
    assert read(tmp_path, AZURE + second) == [(0.0, 10, 2), (0.75, 20, 1)]


def test_burstgpts_columns_are_read_in_order_of_arrival_and_without_failures(tmp_path):
    lines = "45,ChatGPT,1087,230,1317,Conversation log\n5,ChatGPT,472,18,490,Conversation log\n7,GPT-4,9,0,9,API log\n"
    assert read(tmp_path, BURSTGPT + lines) == [(0.0, 472, 18), (40.0, 1087, 230)]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "is not a trace: its first line must name the columns TIMESTAMP, ContextTokens, GeneratedTokens or"),
        (AZURE + "2023-11-16 18:15:46,0,7\n", "no requests with both prompt tokens and output tokens"),
        (AZURE + "2023-11-16 18:15:46,5,7\nyesterday,5,7\n", "line 3: .*yesterday"),
        (AZURE + "2023-11-16 18:15:46," + "1" * 140_000 + ",7", "after line 1: field larger than field limit"),
        (BURSTGPT + "nan,ChatGPT,1,2,3,API log\n", "line 2: a time and two numbers"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_place(tmp_path, text, reason):
    with pytest.raises(ValueError, match=reason):
        read(tmp_path, text)


@pytest.mark.parametrize("format", ["azure", "burstgpt"])
def test_what_is_written_is_read_again(tmp_path, format):
    requests = [TimedRequest(0.0, 5, 6), TimedRequest(1.5, 7, 8), TimedRequest(4000.25, 1, 1)]
    write_trace(tmp_path / "trace.csv", [*requests, TimedRequest(5000.0, [7, 8, 9], 2)], format)
    assert read_trace(tmp_path / "trace.csv") == [*requests, (5000.0, 3, 2)], "of token ids, their number is written"


def test_a_trace_at_another_rate_keeps_its_pattern():
    requests = [TimedRequest(0.0, 1, 1), TimedRequest(1.0, 2, 2), TimedRequest(4.0, 3, 3)]
    assert at_rate(requests, 5.0) == [(0.0, 1, 1), (0.1, 2, 2), (0.4, 3, 3)]
    with pytest.raises(ValueError, match="above 0, not 0"):
        at_rate(requests, 0)
    with pytest.raises(ValueError, match="arrive at once"):
        at_rate(requests[:1], 1.0)


@pytest.mark.parametrize("name", TRACES)
def test_a_synthetic_trace_has_the_statistics_that_it_claims(name):
    requests, claimed = list(synthetic_trace(name, 20_000, 4.0)), TRACES[name]
    prompts, outputs = [request.prompt for request in requests], [request.output_tokens for request in requests]
    gaps = [later.arrival - earlier.arrival for earlier, later in itertools.pairwise(requests)]
    assert statistics.median(prompts) == pytest.approx(claimed.prompt_median, rel=0.05)
    assert statistics.mean(prompts) == pytest.approx(claimed.prompt_mean, rel=0.08)  # the longest are cut off
    assert statistics.median(outputs) == pytest.approx(claimed.output_median, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(claimed.output_mean, rel=0.05)
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(claimed.cv, rel=0.05)


def test_the_committed_traces_are_those_that_the_generator_writes(tmp_path):
    for name, format in (("conversation", "azure"), ("code", "azure"), ("bursts", "burstgpt")):
        write_trace(tmp_path / "trace.csv", synthetic_trace(name, 1000, 2.0), format)
        committed = COMMITTED / f"synthetic_{name}.csv"
        assert committed.read_bytes() == (tmp_path / "trace.csv").read_bytes(), committed
