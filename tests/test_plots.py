"""The text of a picture describes what it shows, and its counts are those of the trace."""

import base64
import json
import re
from itertools import combinations

import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

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


def overlapping_texts(picture):
    """Return the pairs of texts that cover each other, and the texts that the edge of the picture cuts."""
    figure = picture.figure
    figure.draw_without_rendering()
    unseen = set()  # ticks beyond the limits of an axis exist, but are not drawn
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not (ax.axison and low <= tick.get_loc() <= high):
                    unseen |= {tick.label1, tick.label2}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts if text not in unseen]
    pairs = [(one, other) for (one, box), (other, room) in combinations(boxes, 2) if box.overlaps(room)]
    edge = figure.bbox.padded(1)
    cut = [name for name, box in boxes if not (edge.contains(box.x0, box.y0) and edge.contains(box.x1, box.y1))]
    return pairs + cut


def drafting_trace():
    """Two requests: one gains three tokens in its second pass, the other one has a draft rejected."""
    trace = Trace(2)
    prefills = [RowStep("prefill", id, tokens=3, new_tokens=1) for id in (0, 1)]
    first, second = (
        RowStep("decode", id, tokens=3, new_tokens=1 + accepted, drafted=2, accepted=accepted)
        for id, accepted in ((0, 2), (1, 0))
    )
    trace.add(prefills, 0.0, 1.0, 0)
    trace.add([first, second], 1.0, 1.0, 1)
    return trace


DRAWINGS = (
    "block_lookup",
    "life_of_a_request",
    "padded_and_ragged",
    "shared_pass",
    "static_and_continuous",
    "token_budget",
    "with_and_without_cache",
)
PICTURES = {
    "bars": lambda: plots.bars({" lazy": 0.9, " dog": 0.1}, "probability"),
    "lines": lambda: plots.lines({"a": ([1, 2], [3, 4])}, "tokens", "milliseconds"),
    "throughput_latency": lambda: plots.throughput_latency([1, 2], [10, 20], [1, 1.5]),
    "token_grid": lambda: plots.token_grid({"left": [["pad", "a"], ["b", "c"]]}, {"left": [[0, 1], [1, 1]]}),
    "batches": lambda: plots.batches({"before": a_batch(), "after": filter_batch(a_batch())[0]}),
    "compare": lambda: plots.compare([[0, 1], [1, 1]], [[1, 0], [1, 1]], "attention_mask", (None, 0)),
    "slot_timeline": lambda: plots.slot_timeline({"run": small_trace()}),
    "latencies": lambda: plots.latencies({"run": metrics.request_metrics(small_trace())}),
    "waiting_requests": lambda: plots.waiting_requests(
        {"run": metrics.request_metrics(small_trace())}, {"all": {0, 1, 2}}
    ),
    "tokens_read": lambda: plots.tokens_read({"run": small_trace()}),
    "padding": lambda: plots.padding({"run": ([3, 2], [1, 0])}, "keys"),
    "token_row": lambda: plots.token_row({"pass": [(" a", "x", 0), (" b", "y", 4)]}),
    "visible_keys": lambda: plots.visible_keys({"all": [[True, False], [True, True]]}, ["a", "b"], [0, 1]),
    "tradeoff": lambda: plots.tradeoff({"one": (1, 2), "other": (2, 1)}, "seconds", "milliseconds"),
    "memory_timeline": lambda: plots.memory_timeline({"paged": ([3, 4, 5], [4, 8, 8])}, 12),
    "memory_shares": lambda: plots.memory_shares({"a": [1, 2, 2], "b": [1, 0, 1]}, 3, "blocks"),
    "block_tables": lambda: plots.block_tables({"now": {"a": ([0, 2], 6), "b": ([0, 1], 5)}}, blocks=4, block_size=4),
    "grouped_bars": lambda: plots.grouped_bars(
        ["x", "y"], {"a": [1, 2], "b": [3, 4]}, "group", "times", line=(2, "all")
    ),
    "lines compared": lambda: plots.lines(
        {"same": ([1, 2, 4], [3, 4, 5]), "as this": ([1, 2, 4], [[3, 4, 9], [4, 4], [5]]), "bound": ([1, 4], [1, 1])},
        "tokens",
        "milliseconds",
        "A takeaway",
        xscale="log2",
        dashed={"bound"},
        measured={"same": ([1, 4], [3.1, 5.2])},
        rings={"as this": 1},
    ),
    "waiting_requests side by side": lambda: plots.waiting_requests(
        {"one": [metrics.RequestMetrics(id, 0.0, [when]) for id, when in enumerate([4, 4, 4, 10, 10])]},
        {"10 tokens": {0, 1, 2}, "100 tokens": {3, 4}},
        unit="iterations",
    ),
    "probability_strips": lambda: plots.probability_strips(
        {"all": {"fox": 0.5, "owl": 0.25, "cat": 0.02}, "mask": {"fox": 0.4, "owl": 0.6}}, "A takeaway", number=0.5
    ),
    "constrained_text": lambda: plots.constrained_text(["{", ' "', "na", "me", '"}'] * 5, [1, 2, 30, 1, 1] * 5),
    "tokens_over_states": lambda: plots.tokens_over_states([' "', "but"], ('."', "."), first=8, title="A takeaway"),
    "token_budget of few chunks": lambda: plots.token_budget(36, decoding=3, budget=16),
    "verified_draft": lambda: plots.verified_draft(" a", [" b", " c"], [" b", " d", " e"], "A takeaway"),
    "verified_draft without a draft": lambda: plots.verified_draft(" a", [], [" b"]),
    "draft_staircase": lambda: plots.draft_staircase([(4, 4), (4, 1), (0, 0)]),
    "draft_timeline": lambda: plots.draft_timeline(drafting_trace(), "A takeaway"),
    "rounding_levels": lambda: plots.rounding_levels(
        [0.1, -0.4, 0.7, 0.2], {"all": [0.1], "two": [0.06, 0.1]}, 7, "A takeaway"
    ),
    "error_map": lambda: plots.error_map({"all": [[0.1, -0.4], [0, 0.2]], "none": [[0, 0], [0, 0]]}, "A takeaway"),
    "packed_byte": lambda: plots.packed_byte(-3, 5, "A takeaway"),
    "agreement": lambda: plots.agreement([[1, 2, 3], [4, 5]], {"int8": [[1, 2, 3], [4, 5, 6]]}, "A takeaway"),
    "prefix_map": lambda: plots.prefix_map({"all": [[3, 1], [2, 0]], "one": [[5, 0], [0, 1]]}, "A takeaway"),
    "replica_work": lambda: plots.replica_work({"herd": [[9, 0], [5, 1]], "even": [[4, 4]]}, 8, "A takeaway"),
    "resumed_streams": lambda: plots.resumed_streams({0: [(0, 0, 1), (1, 2, 2)], 1: [(0, 2, 1)]}, {1: 0}, "A takeaway"),
    "predicted_times": lambda: plots.predicted_times(
        {"two": [(1, 2, True), (3, 2, False)], "six": [(1, 1, True), (3, 3, False)]}, "milliseconds", "A takeaway"
    ),
    "missed_requests": lambda: plots.missed_requests(
        {"Poisson": {2: 0.5, 3: 0.02, 4: 0}, "bursts": {2: 0.6, 3: 0.2, 4: 0.05}}, title="A takeaway"
    ),
    "arrivals_and_departures": lambda: plots.arrivals_and_departures([(0, 2), (1, 5), (1.5, 3)], "A takeaway"),
    "fleet_over_time": lambda: plots.fleet_over_time([(0, 1, 1), (2, 3, 1), (4, 3, 3), (9, 0, 0)], [0, 1, 2, 2.5], "A"),
    "slot_timeline enlarged": lambda: plots.slot_timeline({"run": small_trace()}, "A takeaway", zoom=(1, 2)),
} | {name: getattr(plots, name) for name in DRAWINGS}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_itself_with_a_text_and_labelled_axes(name):
    picture = PICTURES[name]()
    data, metadata = picture._repr_mimebundle_()

    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert len(picture.alt) > 20
    assert metadata["image/png"]["alt"] == picture.alt
    named = ("token_grid", "batches", "compare", "token_row", "constrained_text", "tokens_over_states")
    if name.split()[0] not in (*named, "verified_draft", "packed_byte", *DRAWINGS):  # these name their rows
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


def test_labels_of_lines_that_end_together_share_the_way_and_stay_above_the_axis():
    def offsets(y):
        (ax,) = plots.lines({name: ([1, 2], [9, y]) for name in "abc"}, "token", "gap").figure.axes
        return [text.xyann[1] for text in ax.texts]

    low, middle, high = offsets(5)
    assert middle == pytest.approx(0) and high == pytest.approx(-low) and high > 10
    assert min(offsets(0)) > 5


def test_the_labels_of_bars_have_equally_many_decimals():
    picture = plots.bars({"frog": 0.0864, "hare": 0.058, "mole": 0.00004}, "probability")

    assert [text.get_text() for text in picture.figure.axes[0].texts] == ["0.0864", "0.0580", "under 0.0001"]
    assert picture.alt == "Bar chart, probability: frog 0.09, hare 0.06, mole under 0.01."
    assert "64 blocks 1,364, 80 blocks 364." in plots.bars({"64 blocks": 1364, "80 blocks": 364}, "passes").alt


@pytest.mark.parametrize("share", [0.55, 0.8, 1])
def test_letters_have_enough_contrast_with_every_color_of_a_request(share):
    def luminance(color):
        return sum(
            weight * (part / 12.92 if part < 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), to_rgb(color), strict=True)
        )

    for color in plots.REQUEST_COLORS:
        fill = plots.looks.shade(color, share)
        dark, light = sorted(luminance(each) + 0.05 for each in (fill, plots.looks.ink_on(fill)))
        assert light / dark > 4, (color, share)


def test_waiting_requests_says_the_range_and_the_median_of_each_group():
    requests = [metrics.RequestMetrics(id, 0.0, [latency]) for id, latency in enumerate([9, 1, 2, 6])]
    picture = plots.waiting_requests({"fair": requests}, {"short": {1, 2, 3}, "long": {0}}, unit="iterations")

    assert "fair, short: 1 to 6, median 2; fair, long: 9 to 9, median 9." in picture.alt
    assert picture.figure.axes[0].get_xlabel() == "latency (iterations)"


def test_a_number_on_a_border_draws_the_token_that_begins_there():
    rows = {"all": {"fox": 0.5, "owl": 0.25}, "mask": {"fox": 0.4, "owl": 0.6}, "rare": {"fox": 0.1, "owl": 0.1}}
    picture = plots.probability_strips(rows, number=0.5)

    assert "all: fox 0.50, owl 0.25, draws owl; mask: fox 0.40, owl 0.60, draws owl; rare: " in picture.alt
    assert picture.alt.endswith("draws another.")
    assert [patch.get_linewidth() for patch in picture.figure.axes[0].patches].count(2) == 3


def test_a_token_that_a_rule_has_removed_is_not_listed():
    alt = plots.probability_strips({"all": {"fox": 0.6, "owl": 0.4}, "top-k 1": {"fox": 1.0, "owl": 0.0}}).alt

    assert alt == "Probabilities side by side. all: fox 0.60, owl 0.40; top-k 1: fox 1.00."


def test_a_constrained_text_says_how_many_tokens_were_allowed_for_each():
    picture = plots.constrained_text(["{", ' "', "na"], [1, 2, 30])

    assert "3 tokens, 2 of them chosen from several" in picture.alt and "'na' 30" in picture.alt
    assert {text.get_text() for text in picture.figure.axes[0].texts} == {"{", "␣", '"', "n", "a", "2", "30"}


def test_equal_latencies_are_stacked():
    requests = [metrics.RequestMetrics(id, 0.0, [5]) for id in range(3)]
    (ax,) = plots.waiting_requests({"all the same": requests}, {"any": {0, 1, 2}}).figure.axes
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


def test_a_verified_draft_says_what_the_output_gains():
    alt = plots.verified_draft(" came", [" to", " a", " river"], [" to", " a", " field", " of"]).alt

    assert "2 of 3 draft tokens are accepted. The output gains ' to', ' a', ' field'." in alt
    with pytest.raises(ValueError, match="needs 3 chosen tokens, not 2"):
        plots.verified_draft("a", ["b", "c"], ["b", "c"])


def test_the_staircase_begins_each_pass_at_the_token_that_the_pass_before_it_chose():
    picture = plots.draft_staircase([(4, 4), (4, 1), (0, 0)])
    cells = [(round(patch.get_x()), round(patch.get_y())) for patch in picture.figure.axes[0].patches]

    assert [min(x for x, y in cells if y == row) for row in range(3)] == [0, 5, 7]
    assert [sum(y == row for _, y in cells) for row in range(3)] == [5, 5, 1]
    assert "3 passes yield 8 tokens: of 8 draft tokens, 5 are accepted and 3 are rejected." in picture.alt


def test_a_timeline_of_drafts_is_as_tall_as_the_tokens_gained():
    picture = plots.draft_timeline(drafting_trace())
    heights = [round(patch.get_height() / 0.88 * 3) for patch in picture.figure.axes[0].patches]

    assert heights == [3, 3, 3, 1, 2]  # two prefills; three tokens gained; one gained and two rejected
    assert "yield 6 tokens: 4 draft tokens are verified, 2 of them accepted." in picture.alt


def test_the_levels_end_at_the_largest_integer_and_errors_lead_to_the_nearest_level():
    picture = plots.rounding_levels([0.3, -0.2, 0.05, 0.0], {"all": [0.1], "two": [0.1, 0.05]}, largest=3)
    (levels, _), errors = picture.figure.axes[1].collections, picture.figure.axes[1].lines

    assert [round(segment[0][1], 2) for segment in levels.get_segments()] == [-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3]
    assert [line.get_ydata()[1] for line in errors[:3]] == pytest.approx([0.3, -0.2, 0.05])
    assert "all: 1 scale, mean error 0.013; two: 2 scales, mean error 0.000." in picture.alt


def test_a_map_of_errors_has_one_color_scale_for_all_panels():
    picture = plots.error_map({"large": [[0.5, -1.0]], "small": [[0.25, 0.0]]})

    assert {ax.images[0].get_clim() for ax in picture.figure.axes[:2]} == {(0, 1)}
    assert "large: mean error 0.7500; small: mean error 0.1250." in picture.alt


def test_a_packed_byte_has_the_bits_of_both_integers():
    picture = plots.packed_byte(-3, 5)
    bits = [text.get_text() for text in picture.figure.axes[0].texts if len(text.get_text()) == 1]

    assert sorted(bits) == sorted("1101" + "0101" + "01011101")
    assert "-3 and 5 have the bits 1101 and 0101. Their byte is 01011101." in picture.alt
    with pytest.raises(ValueError, match="8 does not fit into 4 bits"):
        plots.packed_byte(8, 0)


def test_agreement_ends_at_the_first_other_token_also_where_a_text_is_longer():
    picture = plots.agreement([[1, 2, 3, 4], [5, 6], [7, 8]], {"int4": [[1, 9, 3, 4], [5, 6, 6], [7, 8]]})
    widths = [(patch.get_x(), patch.get_width()) for patch in picture.figure.axes[0].patches]

    assert widths == [(0, 1), (2, 2), (1, 1), (0, 2), (3, 0), (2, 1), (0, 2)]
    assert "int4: 2 of 3 texts change." in picture.alt


def test_a_prefix_is_filled_on_the_replicas_that_got_requests_with_it():
    picture = plots.prefix_map({"all": [[3, 1], [2, 0]], "one": [[5, 0], [0, 1]]})
    colors = [{patch.get_facecolor() for patch in ax.patches} for ax in picture.figure.axes]

    assert [len(each) for each in colors] == [3, 3]  # a replica each, and the empty cells
    assert [text.get_text() for ax in picture.figure.axes for text in ax.texts] == ["3", "1", "2", "5", "1"]
    assert (
        "all: 3 filled cells; requests per replica 4, 2. one: 2 filled cells; requests per replica 5, 1." in picture.alt
    )


def test_a_full_lane_is_the_stated_number_of_tokens_or_more():
    picture = plots.replica_work({"herd": [[20, 0], [5, 1]], "even": [[5, 5]]}, top=10)
    tops = [
        round(lane + 0.94 - min(path.vertices[:, 1].min() for path in each.get_paths()), 2)
        for ax in picture.figure.axes
        for lane, each in enumerate(ax.collections)
    ]

    assert tops == [0.88, 0.09, 0.44, 0.44]
    assert "herd: 2 iterations; tokens per replica 25, 1." in picture.alt


def test_a_resumed_stream_changes_its_color_with_the_replica():
    picture = plots.resumed_streams({"a": [(0, 0, 1), (1, 2, 2)], "b": [(0, 2, 1)]}, {1: 0})
    first, second, other = [
        patch.get_facecolor() for patch in picture.figure.axes[0].patches if patch.get_width() < 0.9
    ]

    assert first != second == other
    assert (
        "replica 0 before iteration 1. a: 3 tokens from replica 0 and then 2; b: 1 tokens from replica 2."
        in picture.alt
    )


def test_predicted_times_are_described_with_the_error_of_each_model():
    points = {"two": [(1, 2, True), (4, 2, False)], "six": [(1, 1, True), (4, 6, False)]}
    alt = plots.predicted_times(points, "milliseconds").alt

    assert alt.endswith("2 iterations. two: off by 75% in the median; six: off by 25% in the median.")


def test_a_ring_marks_the_smallest_fleet_that_keeps_a_promise():
    picture = plots.missed_requests({"load": {1: 0.3, 2: 0.05, 3: 0.01, 4: 0.0}}, promises=(0.9, 0.99, 0.999))
    rings = [line.get_xdata()[0] for line in picture.figure.axes[0].lines if line.get_markersize() == 12]

    assert rings == [2, 3, 4]
    assert "load: smallest fleets 2 for 90.0%, 3 for 99.0%, 4 for 99.9%." in picture.alt


def test_the_distance_between_arrivals_and_departures_is_the_number_of_requests_in_the_system():
    picture = plots.arrivals_and_departures([(0, 4), (1, 2), (3, 5), (3.5, 6)])

    assert "At most 3 are in the system." in picture.alt
    assert "3 in the system" in [text.get_text() for text in picture.figure.axes[0].texts]


def test_a_request_keeps_its_color_from_row_to_row():
    picture = plots.token_row({"first": [("a", "x", 0), ("b", "y", 0)], "second": [("c", "y", 1), ("d", "x", 1)]})
    first, second = ([patch.get_facecolor() for patch in ax.patches] for ax in picture.figure.axes)

    assert first == second[::-1] and first[0] != first[1]
    assert "first: a (x, 0), b (y, 0); second: c (y, 1), d (x, 1)" in picture.alt


def test_attention_to_another_request_is_counted_and_marked_by_more_than_color():
    causal, split = [[True, False], [True, True]], [[True, False], [False, True]]
    picture = plots.visible_keys({"causal": causal, "split": split}, ["a", "b"], [0, 1])

    assert "causal: 3 of 4 pairs attend, 1 of them across requests; split: 2 of 4" in picture.alt
    assert [[text.get_text() for text in ax.texts] for ax in picture.figure.axes] == [["×"], []]


def test_a_batch_picture_says_how_many_pads_each_row_has():
    batch = a_batch()
    ids = batch["request_ids"]

    assert f"request {ids[0]} with 3 pads, request {ids[1]} with 0 pads" in plots.batches({"now": batch}).alt


def test_a_comparison_says_where_it_differs_and_marks_it_by_more_than_color():
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
    frames = json.loads(re.search(r"frames = (\[\[.*?\]\]\]), fills", page)[1])

    assert len(frames) == 4
    assert frames[2] == [["0", WORK.index("decode"), 2], ["2", WORK.index("finished"), 1]]
    assert not re.search(r"""(src|href)="(?!data:)|import\(|fetch\(|url\((?!#)""", page)
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
    assert "long: 1,200 iterations" in plots.memory_timeline({"long": ([1] * 1200, [2] * 1200)}, 10).alt


def test_a_request_that_comes_back_has_two_stretches_in_the_shares_of_memory():
    alt = plots.memory_shares({"a": [1, 2, 2, 2], "b": [1, 0, 0, 3]}, 5, "blocks").alt

    assert "a from iteration 0 to 4, at most 2; b from iteration 0 to 1, 3 to 4, at most 3." in alt


def test_block_tables_color_a_block_by_its_request_and_a_shared_one_gray():
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


def test_block_tables_leave_room_for_as_many_entries_as_asked_for():
    def room(table, **settings):
        left, _ = plots.block_tables({"now": {"a": (table, 1)}}, blocks=8, block_size=4, **settings).figure.axes
        return left.get_xlim(), left.get_subplotspec().get_gridspec().get_width_ratios()

    assert room([0], entries=5) == room([0, 1, 2, 3, 4]) == room([0, 1, 2, 3, 4], entries=3)
    assert room([0]) != room([0], entries=5)


@pytest.mark.parametrize("name", PICTURES)
def test_no_label_covers_another_one_or_leaves_the_picture(name):
    assert overlapping_texts(PICTURES[name]()) == []


def test_the_map_of_the_whole_course_names_the_lessons_of_each_part():
    picture = plots.system_map()

    assert "Scheduler (lessons 3, 4, 12)" in picture.alt
    assert overlapping_texts(picture) == []


@pytest.mark.parametrize("lesson", range(1, 13))
def test_the_map_of_each_lesson_names_what_it_builds_and_nothing_overlaps(lesson):
    picture = plots.system_map(lesson)
    framed = [patch for patch in picture.figure.axes[0].patches if patch.get_linewidth() > 2]

    assert overlapping_texts(picture) == []
    assert re.search(rf"Lesson {lesson}: .* It builds: ", picture.alt)
    assert len(framed) == picture.alt.split("It builds: ")[1].count(" (") >= 1


def test_a_map_of_a_lesson_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="from 1 to 12, not 13"):
        plots.system_map(13)


def test_each_part_of_the_system_is_built_by_a_lesson_and_later_parts_say_which():
    texts = [text.get_text() for text in plots.system_map(1).figure.axes[0].texts]

    assert {"lesson 2", "lesson 4", "lesson 6", "lesson 7", "lesson 9", "lesson 10", "lesson 11"} - set(texts) == {
        "lesson 4"  # the scheduler is begun in lesson 3
    }


def test_a_request_has_its_number_and_the_same_color_in_every_panel_of_a_timeline():
    trace = small_trace()
    upper, lower = plots.slot_timeline({"run": trace}, zoom=(0, 1)).figure.axes
    used = [
        {to_rgb(bar.get_facecolor()[0]) for bar in ax.collections if len(bar.get_facecolor())} for ax in (upper, lower)
    ]

    assert to_rgb(plots.SKY) in used[0]  # decodes of request 0
    assert {text.get_text() for text in upper.texts} == {"0", "1", "2"}
    assert lower.get_xlim() == (0, 2)


def test_a_line_through_measurements_is_their_median():
    picture = plots.lines({"noisy": ([1, 2], [[1, 2, 90], [3, 3, 4]])}, "token", "milliseconds")

    assert list(picture.figure.axes[0].lines[0].get_ydata()) == [2, 3]
    assert "noisy from 2 to 3" in picture.alt


def test_latency_is_drawn_against_throughput_with_batch_sizes_as_labels():
    (ax,) = plots.throughput_latency([1, 2, 4], [10, 20, 30], [1, 1.5, 2]).figure.axes

    assert [text.get_text() for text in ax.texts] == ["1 row", "2", "4 rows"]
    assert list(ax.lines[0].get_xdata()) == [10, 20, 30] and list(ax.lines[0].get_ydata()) == [1, 1.5, 2]


def test_the_toy_of_lesson_3_refills_rows_without_losing_a_token():
    alt = plots.static_and_continuous((6, 2, 3, 2, 4, 1), 2).alt

    assert "static batches: 13 forward passes on 2 rows; 12 decode, 8 finished, 6 prefill" in alt
    assert "rows refilled at once: 10 forward passes on 2 rows; 12 decode, 2 empty, 6 prefill" in alt


def test_a_block_lookup_finds_the_slot_that_its_numbers_give():
    assert "in slot 29." in plots.block_lookup([4, 6, 7, 8], 9, 4, 12).alt
    assert "in slot 0." in plots.block_lookup([0], 0, 4, 2).alt


def test_the_chunks_of_a_budget_add_up_to_the_prompt():
    alt = plots.token_budget(100, decoding=4, budget=34).alt

    assert "a pass of 104 tokens" in alt and "chunks of 30, 30, 30, 10," in alt


def test_slot_steps_that_yield_several_tokens_count_once_as_useful():
    trace = Trace(2)
    trace.passes = [
        TracedPass((RowStep("prefill", 0, 3, 0, 1), RowStep()), 0.0, 1.0),
        TracedPass((RowStep("decode", 0, 4, 0, 4, drafted=3, accepted=3), RowStep()), 1.0, 1.0),
    ]
    (ax,) = plots.slot_timeline({"run": trace}).figure.axes

    assert ax.get_title(loc="left") == "run: 2 forward passes, 2 of 4 slot-steps useful (50%)"


def test_without_scripts_a_player_is_a_still_picture_and_a_line_that_says_what_to_do():
    for moving in (plots.play(small_trace()), plots.block_lookup_steps(), plots.cache_growth_steps()):
        page = re.sub(r"<script>.*?</script>", "", moving._repr_html_(), flags=re.S)

        assert re.search(r'<img src="data:image/(png|svg\+xml);base64,[\w+/=]{500,}" alt="[^"]{20,}"', page)
        assert "Run the cell to" in page
        assert not re.search("<(button|input|svg|text)", page)  # a notebook that is not trusted would keep them


def test_each_leaf_of_the_growing_cache_has_one_more_pass():
    computed = [re.search(r"(\d+) tokens without a cache; (\d+) with one", leaf.alt).groups()
                for leaf in plots.cache_growth_steps(7, 3).pictures]  # fmt: skip

    assert computed == [("7", "7"), ("15", "8"), ("24", "9")]


def test_a_flip_book_has_a_caption_for_each_picture():
    picture = plots.block_lookup()

    assert plots.flip_book([picture], ["One."], "Title")._repr_html_().count('class=\\"leaf\\"') == 1
    with pytest.raises(ValueError, match="not 1 for 2"):
        plots.flip_book([picture, picture], ["One."], "Title")
