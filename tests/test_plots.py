"""The text of a picture describes what it shows, and its counts are those of the trace."""

import base64
import json
import re

import pytest
from matplotlib.colors import to_rgb

from helpers import Trace, filter_batch, generate_next_token, init_batch, metrics, plots
from helpers.trace import WORK, RowStep, TracedPass

PNG = b"\x89PNG"


def small_trace():
    """Two rows, three forward passes: one row is refilled, the other waits and runs empty."""
    trace = Trace(2)
    trace.passes = [
        TracedPass((RowStep("prefill", 0, 3, 1, 1), RowStep("prefill", 1, 4, 0, 1)), 0.0, 1.0),
        TracedPass((RowStep("stalled", 0), RowStep("prefill", 2, 4, 0, 1)), 1.0, 1.0),
        TracedPass((RowStep("decode", 0, 1, 0, 1), RowStep("finished", 2, 0, 1)), 2.0, 1.0),
        TracedPass((RowStep("decode", 0, 1, 0, 1), RowStep()), 3.0, 1.0),
    ]
    return trace


def a_batch():
    return generate_next_token(init_batch([("Look", 2), ("The quick brown fox", 1)]))


PICTURES = {
    "bars": lambda: plots.bars({" lazy": 0.9, " dog": 0.1}, "probability"),
    "lines": lambda: plots.lines({"a": ([1, 2], [3, 4])}, "tokens", "milliseconds"),
    "throughput_latency": lambda: plots.throughput_latency([1, 2], [10, 20], [1, 1.5]),
    "token_grid": lambda: plots.token_grid({"left": [["pad", "a"], ["b", "c"]]}, {"left": [[0, 1], [1, 1]]}),
    "batches": lambda: plots.batches({"before": a_batch(), "after": filter_batch(a_batch())[0]}),
    "compare": lambda: plots.compare([[0, 1], [1, 1]], [[1, 0], [1, 1]], "attention_mask", (None, 0)),
    "slot_timeline": lambda: plots.slot_timeline({"run": small_trace()}),
    "work_bars": lambda: plots.work_bars({"run": small_trace()}),
    "latencies": lambda: plots.latencies({"run": metrics.request_metrics(small_trace())}),
    "who_waits": lambda: plots.who_waits({"run": metrics.request_metrics(small_trace())}, {"all": {0, 1, 2}}),
    "tokens_read": lambda: plots.tokens_read({"run": small_trace()}),
    "padding": lambda: plots.padding({"run": ([3, 2], [1, 0])}, "keys"),
    "token_row": lambda: plots.token_row({"pass": [(" a", "x", 0), (" b", "y", 4)]}),
    "who_sees_whom": lambda: plots.who_sees_whom({"all": [[True, False], [True, True]]}, ["a", "b"], [0, 1]),
    "tradeoff": lambda: plots.tradeoff({"one": (1, 2), "other": (2, 1)}, "seconds", "milliseconds"),
    "memory_timeline": lambda: plots.memory_timeline({"paged": ([3, 4, 5], [4, 8, 8])}, 12),
    "memory_shares": lambda: plots.memory_shares({"a": [1, 2, 2], "b": [1, 0, 1]}, 3, "blocks"),
    "block_tables": lambda: plots.block_tables({"now": {"a": ([0, 2], 6), "b": ([0, 1], 5)}}, blocks=4, block_size=4),
    "grouped_bars": lambda: plots.grouped_bars(
        ["x", "y"], {"a": [1, 2], "b": [3, 4]}, "group", "times", line=(2, "all")
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_itself_with_a_text_and_labelled_axes(name):
    picture = PICTURES[name]()
    data, metadata = picture._repr_mimebundle_()

    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert len(picture.alt) > 20
    assert metadata["image/png"]["alt"] == picture.alt
    if name not in ("token_grid", "batches", "compare", "token_row"):  # grids name their rows instead
        assert all(ax.get_xlabel() or ax.get_ylabel() for ax in picture.figure.axes)


def test_the_same_picture_is_saved_as_the_same_bytes(tmp_path):
    for name in ("one.svg", "two.svg"):
        plots.slot_timeline({"run": small_trace()}).save(tmp_path / name)

    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_timeline_says_the_counts_of_the_trace():
    alt = plots.slot_timeline({"run": small_trace()}).alt

    assert "4 forward passes on 2 rows" in alt
    assert "2 decode, 1 empty, 1 finished, 3 prefill, 1 stalled" in alt


def test_a_line_plot_says_the_highest_point_where_it_is_neither_end():
    alt = plots.lines({"flat": ([1, 2, 3], [4, 4, 5]), "peak": ([1, 2, 3], [4, 90, 5])}, "token", "gap").alt

    assert alt == "Line plot of gap over token: flat from 4 to 5; peak from 4 to 5, at most 90."


def test_who_waits_says_the_range_and_the_median_of_each_group():
    requests = [metrics.RequestMetrics(id, 0.0, [latency]) for id, latency in enumerate([9, 1, 2, 6])]
    picture = plots.who_waits({"fair": requests}, {"short": {1, 2, 3}, "long": {0}}, unit="iterations")

    assert "fair, short: 1 to 6, median 2; fair, long: 9 to 9, median 9." in picture.alt
    assert picture.figure.axes[0].get_xlabel() == "latency (iterations)"


def test_equal_latencies_are_stacked():
    requests = [metrics.RequestMetrics(id, 0.0, [5]) for id in range(3)]
    (ax,) = plots.who_waits({"all the same": requests}, {"any": {0, 1, 2}}).figure.axes
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_marker() == "o"]

    assert dots == [(5, 0.6), (5, 1.6), (5, 2.6)]


def test_the_tokens_read_are_those_of_the_trace_pads_left_out():
    (ax,) = plots.tokens_read({"run": small_trace()}).figure.axes
    tops: dict = {}
    for bar in ax.patches:
        pass_number = round(bar.get_x() + bar.get_width() / 2)
        tops[pass_number] = max(tops.get(pass_number, 0), bar.get_y() + bar.get_height())

    assert tops == {0: 7, 1: 4, 2: 1, 3: 1}
    assert "run: at most 7 per pass, passes with prompt tokens: 2" in plots.tokens_read({"run": small_trace()}).alt
    last_two = plots.tokens_read({"run": small_trace()}, first=2, last=3)
    assert "run: at most 1 per pass, passes with prompt tokens: 0" in last_two.alt


def test_the_padding_is_drawn_on_top_of_what_is_useful_and_counted():
    picture = plots.padding({"one": ([3, 2], [1, 0]), "other": ([5], [15])}, "keys read")

    assert "one: 5 for the requests' tokens and 1 for padding; other: 5 for" in picture.alt
    assert [ax.get_title(loc="left") for ax in picture.figure.axes] == ["one: 17% padding", "other: 75% padding"]


def test_a_request_keeps_its_colour_from_row_to_row():
    picture = plots.token_row({"first": [("a", "x", 0), ("b", "y", 0)], "second": [("c", "y", 1), ("d", "x", 1)]})
    first, second = ([patch.get_facecolor() for patch in ax.patches] for ax in picture.figure.axes)

    assert first == second[::-1] and first[0] != first[1]
    assert "first: a (x, 0), b (y, 0); second: c (y, 1), d (x, 1)" in picture.alt


def test_attention_to_another_request_is_counted_and_marked_by_more_than_colour():
    causal, split = [[True, False], [True, True]], [[True, False], [False, True]]
    picture = plots.who_sees_whom({"causal": causal, "split": split}, ["a", "b"], [0, 1])

    assert "causal: 3 of 4 pairs attend, 1 of them across requests; split: 2 of 4" in picture.alt
    assert [[text.get_text() for text in ax.texts] for ax in picture.figure.axes] == [["×"], []]


def test_a_batch_picture_says_how_many_pads_each_row_has():
    batch = a_batch()
    ids = batch["request_ids"]

    assert f"request {ids[0]} with 3 pads, request {ids[1]} with 0 pads" in plots.batches({"now": batch}).alt


def test_a_comparison_says_where_it_differs_and_marks_it_by_more_than_colour():
    picture = plots.compare([[1, 2], [3, 4]], [[1, 2], [None, 4]], "keys")
    marks = [text.get_text() for text in picture.figure.axes[1].texts]

    assert picture.alt == "keys: row 1, column 0: expected 3, got a pad."
    assert marks.count("≠") == 1
    assert "no difference" in plots.compare([[1]], [[1]]).alt


def test_grids_of_unequal_width_are_aligned_at_their_right_edges():
    picture = plots.compare([[1, 2, 3]], [[2, 3], [9, 9]], "mask")

    assert "row 0, column 0: expected 1, got nothing; row 1, column 1: expected nothing, got 9" in picture.alt


def test_an_empty_batch_can_be_drawn():
    empty, _ = filter_batch(generate_next_token(init_batch([("Look", 1)])))

    assert "no rows" in plots.batches({"empty": empty}).alt


def test_the_player_holds_a_frame_for_every_iteration_and_fetches_nothing():
    page = plots.play(small_trace())._repr_html_()
    frames = json.loads(re.search(r"frames = (\[\[.*?\]\]\]), colors", page)[1])

    assert len(frames) == 4
    assert frames[2] == [["0", WORK.index("decode"), 2], ["2", WORK.index("finished"), 1]]
    assert not re.search(r"(src|href)=|import\(|fetch\(|url\(", page)
    assert page == plots.play(small_trace())._repr_html_()


def test_a_request_id_cannot_break_out_of_the_player():
    trace = Trace(1)
    trace.passes = [TracedPass((RowStep("prefill", "</script><b>", 1, 0, 1),), 0.0, 1.0)]

    assert "</script><b>" not in plots.play(trace)._repr_html_()


def test_a_memory_timeline_says_what_share_of_the_allocated_memory_is_used():
    picture = plots.memory_timeline({"reserve": ([1, 3], [8, 8]), "paged": ([1, 3], [2, 4])}, 10)

    assert "room for 10 tokens" in picture.alt
    assert "reserve: 2 iterations, 25% of the allocated memory" in picture.alt
    assert "paged: 2 iterations, 67% of the allocated memory" in picture.alt


def test_a_request_that_comes_back_has_two_stretches_in_the_shares_of_memory():
    alt = plots.memory_shares({"a": [1, 2, 2, 2], "b": [1, 0, 0, 3]}, 5, "blocks").alt

    assert "a from iteration 0 to 4, at most 2; b from iteration 0 to 1, 3 to 4, at most 3." in alt


def test_block_tables_colour_a_block_by_its_request_and_a_shared_one_gray():
    tables = {"a": ([0, 2], 6), "b": ([0, 1], 5)}
    left, right = plots.block_tables({"now": tables}, blocks=4, block_size=4).figure.axes
    slots = [patch.get_facecolor()[:3] for patch in right.patches]
    gray, white = plots.GRAY, "white"

    assert [text.get_text() for text in left.texts] == ["0", "2", "0", "1"]
    shared, of_b, of_a, free = (slots[start : start + 4] for start in (0, 4, 8, 12))
    assert shared == [to_rgb(gray)] * 4
    assert of_b == [to_rgb(plots.ORANGE), *[to_rgb(white)] * 3]
    assert of_a == [*[to_rgb(plots.SKY)] * 2, *[to_rgb(white)] * 2]
    assert free == [to_rgb(white)] * 4
    assert "now: a has [0, 2], b has [0, 1]." in plots.block_tables({"now": tables}, blocks=4, block_size=4).alt
