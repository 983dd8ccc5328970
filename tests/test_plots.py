"""Pictures say in words what they show, and count what the trace counts."""

import base64
import json
import re

import pytest

from helpers import Trace, filter_batch, generate_next_token, init_batch, metrics, plots
from helpers.trace import WORK, Iteration, Slot

PNG = b"\x89PNG"


def small_trace():
    """Two rows, three forward passes: one row is refilled, the other waits and runs empty."""
    trace = Trace(2)
    trace.iterations = [
        Iteration((Slot("prefill", 0, 3, 1, 1), Slot("prefill", 1, 4, 0, 1)), 0.0, 1.0),
        Iteration((Slot("stalled", 0), Slot("prefill", 2, 4, 0, 1)), 1.0, 1.0),
        Iteration((Slot("decode", 0, 1, 0, 1), Slot("finished", 2, 0, 1)), 2.0, 1.0),
        Iteration((Slot("decode", 0, 1, 0, 1), Slot()), 3.0, 1.0),
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
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_itself_with_a_text_and_labelled_axes(name):
    picture = PICTURES[name]()
    data, metadata = picture._repr_mimebundle_()

    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert len(picture.alt) > 20
    assert metadata["image/png"]["alt"] == picture.alt
    if name not in ("token_grid", "batches", "compare"):  # grids name their rows instead
        assert all(ax.get_xlabel() or ax.get_ylabel() for ax in picture.figure.axes)


def test_the_same_picture_is_saved_as_the_same_bytes(tmp_path):
    for name in ("one.svg", "two.svg"):
        plots.slot_timeline({"run": small_trace()}).save(tmp_path / name)

    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_timeline_says_the_counts_of_the_trace():
    alt = plots.slot_timeline({"run": small_trace()}).alt

    assert "4 forward passes on 2 rows" in alt
    assert "2 decode, 1 empty, 1 finished, 3 prefill, 1 stalled" in alt


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


def test_grids_of_unequal_width_are_lined_up_at_their_right_edges():
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
    trace.iterations = [Iteration((Slot("prefill", "</script><b>", 1, 0, 1),), 0.0, 1.0)]

    assert "</script><b>" not in plots.play(trace)._repr_html_()
