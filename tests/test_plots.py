"""The text of a picture describes what it shows, and its counts are those of the trace."""

import base64
import functools
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from matplotlib import rcParams
from matplotlib.text import Text

from helpers import Trace, filter_batch, generate_next_token, init_batch, metrics, plots
from helpers.trace import RowStep, TracedPass


def trace_of(num_rows, *passes):
    trace = Trace(num_rows)
    trace.passes = [TracedPass(steps, float(number), 1.0) for number, steps in enumerate(passes)]
    return trace


# Two rows, four forward passes: one row is refilled, the other waits and runs empty.
TRACE = trace_of(
    2,
    (RowStep("prefill", 0, 3, 1, 1), RowStep("prefill", 1, 4, 0, 1)),
    (RowStep("stalled", 0), RowStep("prefill", 2, 4, 0, 1)),
    (RowStep("decode", 0, 1, 0, 1), RowStep("finished", 2, 0, 1)),
    (RowStep("decode", 0, 1, 0, 1), RowStep()),
)


def latencies(*seconds):
    """Return the metrics of requests that arrive at 0 and have these latencies."""
    return [metrics.RequestMetrics(id, 0.0, [latency]) for id, latency in enumerate(seconds)]


@functools.cache
def batch():
    return generate_next_token(init_batch([("Look", 2), ("The quick brown fox", 1)]))


T = "A takeaway"
STRIPS = {"all": {"fox": 0.5, "owl": 0.25}, "mask": {"fox": 0.4, "owl": 0.6}, "rare": {"fox": 0.1, "owl": 0.1}}
BARS = {"frog": 0.0864, "hare": 0.058, "mole": 0.00004}
SHARED_BLOCKS = {"a": ([0, 2], 6), "b": ([0, 1], 5)}
CURVES = {"same": ([1, 2, 4], [3, 4, 5]), "as this": ([1, 2, 4], [4, 4, 5]), "bound": ([1, 4], [1, 1])}
CURVE_MARKS = dict(
    xscale="log2", yscale="log", dashed={"bound"}, measured={"same": ([1, 4], [3.1, 5.2])}, rings={"as this": 1}
)
CAUSAL, SPLIT = [[True, False], [True, True]], [[True, False], [False, True]]
TWO_TOKENS = {"first": [("a", "x", 0), ("b", "y", 0)], "second": [("c", "y", 1), ("d", "x", 1)]}
PICTURES = {
    "bars": lambda: plots.bars(BARS, "probability"),
    "lines": lambda: plots.lines({"flat": ([1, 2, 3], [4, 4, 5]), "peak": ([1, 2, 3], [4, 90, 5])}, "token", "gap"),
    "lines that end at 0": lambda: plots.lines({name: ([1, 2], [9, 0]) for name in "abc"}, "token", "gap"),
    "lines compared": lambda: plots.lines(CURVES, "tokens", "milliseconds", T, **CURVE_MARKS),
    "throughput_latency": lambda: plots.throughput_latency([1, 2, 4], [10, 20, 30], [1, 1.5, 2]),
    "token_grid": lambda: plots.token_grid({"left": [["pad", "a"], ["b", "c"]]}, {"left": [[0, 1], [1, 1]]}),
    "batches": lambda: plots.batches({"before": batch(), "after": filter_batch(batch())[0]}),
    "compare": lambda: plots.compare([[1, 2], [3, 4]], [[1, 2], [None, 4]], "keys", (None, 0)),
    "slot_timeline": lambda: plots.slot_timeline({"run": TRACE}, T, zoom=(1, 2)),
    "waiting_requests": lambda: plots.waiting_requests(
        {"fair": latencies(9, 1, 2, 6)}, {"short": {1, 2, 3}, "long": {0}}, unit="iterations"
    ),
    "tokens_read": lambda: plots.tokens_read({"run": TRACE}),
    "token_row": lambda: plots.token_row(TWO_TOKENS),
    "visible_keys": lambda: plots.visible_keys({"causal": CAUSAL, "split": SPLIT}, ["a", "b"], [0, 1]),
    "memory_timeline": lambda: plots.memory_timeline({"reserve": ([1, 3], [8, 8]), "paged": ([1, 3], [2, 4])}, 10),
    "memory_shares": lambda: plots.memory_shares({"a": [1, 2, 2, 2], "b": [1, 0, 0, 3]}, 5, "blocks"),
    "block_tables": lambda: plots.block_tables({"now": SHARED_BLOCKS}, blocks=4, block_size=4),
    "probability_strips": lambda: plots.probability_strips(STRIPS, 0.5, T),
    "constrained_text": lambda: plots.constrained_text(["{", ' "', "na", "me", '"}'] * 5, [1, 2, 30, 1, 1] * 5),
    "tokens_over_states": lambda: plots.tokens_over_states([' "', "but"], ('."', "."), first=8, title=T),
    "token_budget": lambda: plots.token_budget(36, decoding=3, budget=16),
    "verified_draft": lambda: plots.verified_draft(" came", [" to", " a", " river"], [" to", " a", " field", " of"], T),
    "draft_staircase": lambda: plots.draft_staircase([(4, 4), (4, 1), (0, 0)]),
    "rounding_levels": lambda: plots.rounding_levels([0.3, -0.2, 0.05, 0.0], {"all": [0.1], "two": [0.1, 0.05]}, 3, T),
    "weight_path": lambda: plots.weight_path((-0.31, 0.52), (-3, 5), 0.1, T),
    "activation_map": lambda: plots.activation_map(
        [[0.1, 5.0, 0.2, 0.0, 0.3], [1.5, 0.3, 0.2, 0.0, 2.5]], [" a", "b"], T
    ),
    "agreement": lambda: plots.agreement(
        [[1, 2, 3, 4], [5, 6], [7, 8]], {"int4": [[1, 9, 3, 4], [5, 6, 6], [7, 8]]}, T
    ),
    "prefix_map": lambda: plots.prefix_map({"all": [[3, 1], [2, 0]], "one": [[5, 0], [0, 1]]}, T),
    "replica_work": lambda: plots.replica_work({"herd": [[20, 0], [5, 1]], "even": [[5, 5]]}, 10, T),
    "resumed_streams": lambda: plots.resumed_streams({"a": [(0, 0, 1), (1, 2, 2)], "b": [(0, 2, 1)]}, {1: 0}, T),
    "virtual_clock": lambda: plots.virtual_clock(
        {"a": 0, "b": 4}, [(0, 2, {"a": 9}), (2, 3, {"a": 1}), (4, 6, {"b": 5})]
    ),
    "block_lookup": lambda: plots.block_lookup([4, 6, 7, 8], 9, 4, 12),
    "cache_growth_steps": lambda: plots.cache_growth_steps().pictures[-1],
    "merged_and_adapted": lambda: plots.merged_and_adapted(title=T),
    "split_block": lambda: plots.split_block(title=T),
    "pass_shares": lambda: plots.pass_shares(
        {"decode": {"near": (0.006, 0.003, 0.001), "far": (1, 2, 1)}}, ("weights", "latency", "bytes"), T
    ),
    "system_map": lambda: plots.system_map(),
}
DRAWINGS = (
    "life_of_a_request attention_step padded_and_ragged routed_fleet separate_phases shared_pass static_and_continuous"
)
PICTURES |= {name: getattr(plots, name) for name in DRAWINGS.split()}
OF_FILLS = [color.lower() for color in (plots.GRAY, plots.colors.DARK, plots.colors.BRIGHT)]


@functools.cache
def drawn(name):
    return PICTURES[name]()


def axes_of(name):
    return drawn(name).figure.axes


def texts_of(ax):
    return [text.get_text() for text in ax.texts]


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
    pairs = [(name, other) for (name, box), (other, room) in combinations(boxes, 2) if box.overlaps(room)]
    edge = figure.bbox.padded(1)
    cut = [name for name, box in boxes if not (edge.contains(box.x0, box.y0) and edge.contains(box.x1, box.y1))]
    return pairs + cut


def test_a_notebook_gets_a_picture_and_its_text():
    data, metadata = drawn("bars")._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == drawn("bars").alt


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_a_text_and_labels_that_stand_free_and_colors_that_follow_a_dark_page(name):
    picture = drawn(name)
    assert len(picture.alt) > 20
    assert overlapping_texts(picture) == []
    svg = picture.svg()
    fixed = re.findall(r'(?:fill|stroke)(?:: |=")(#\w+)', svg)
    assert ElementTree.fromstring(svg).get("aria-label") == picture.alt
    assert {color for color in fixed if len(set(color[1::2])) == 1 and color not in OF_FILLS} == set()
    assert set(re.findall(r"url\(#(\w+)\)", svg)) <= set(re.findall(r' id="(\w+)"', svg))


def test_the_same_picture_is_saved_as_the_same_bytes_changes_no_settings_and_follows_a_dark_page(tmp_path):
    before = dict(rcParams)
    for name in ("one.svg", "two.svg"):
        plots.slot_timeline({"run": TRACE}).save(tmp_path / name)
    assert dict(rcParams) == before, "the settings of matplotlib are left alone"
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "prefers-color-scheme:dark" in (tmp_path / "one.svg").read_text()


# --- what is drawn is what the text says ------------------------------------------------------------------------------


def texts_per_panel(axes):
    return [texts_of(ax) for ax in axes]


def cells_per_row(axes):
    """Return the first cell of each of three rows, and how many there are."""
    cells = [(round(patch.get_x()), round(patch.get_y())) for patch in axes[0].patches]
    rows = [[x for x, y in cells if y == row] for row in range(3)]
    return [(min(row), len(row)) for row in rows]


@pytest.mark.parametrize(
    ("name", "read", "expected"),
    [
        ("bars", texts_per_panel, [["0.0864", "0.058", "4e-05"]]),
        ("visible_keys", texts_per_panel, [["×"], []]),  # attention to another request, marked by more than color
        ("prefix_map", texts_per_panel, [["3", "1", "2"], ["5", "1"]]),
        ("draft_staircase", cells_per_row, [(0, 5), (5, 5), (7, 1)]),  # from the token that the pass before chose
        (
            "agreement",  # ends at the first other token, also where a text is longer
            lambda axes: [(patch.get_x(), patch.get_width()) for patch in axes[0].patches],
            [(0, 1), (2, 2), (1, 1), (0, 2), (3, 0), (2, 1), (0, 2)],
        ),
        ("pass_shares", lambda axes: [round(bar.get_width()) for bar in axes[0].patches], [60, 30, 10, 25, 50, 25]),
    ],
)
def test_what_is_drawn_is_what_was_given(name, read, expected):
    assert read(axes_of(name)) == expected


def test_the_map_of_each_lesson_frames_what_it_builds_and_nothing_overlaps():
    for lesson in range(1, 19):
        picture = plots.system_map(lesson)
        framed = [patch for patch in picture.figure.axes[0].patches if patch.get_linewidth() > 2]
        assert overlapping_texts(picture) == []
        assert len(framed) == picture.alt.split(f"Lesson {lesson} builds: ")[1].count(" (") >= 1


# --- pictures that move -----------------------------------------------------------------------------------------------


def test_the_player_has_a_veil_over_its_timeline_and_fetches_nothing():
    page = plots.play(TRACE)._repr_html_()
    assert page.count('class=\\"veil\\"') == 1 and "last = 4;" in page
    assert not re.search(r"""(src|href)="(?!data:)|import\(|fetch\(|url\((?!#)""", page)
    assert page == plots.play(TRACE)._repr_html_()
    trace = trace_of(1, (RowStep("prefill", "</script><b>", 1, 0, 1),))
    assert "</script><b>" not in plots.play(trace)._repr_html_()  # a request's id


def test_without_scripts_a_player_is_a_still_picture_and_a_line_that_says_what_to_do():
    for moving in (plots.play(TRACE), plots.flip_book([drawn("block_lookup")], ["One."], "Title")):
        page = re.sub(r"<script>.*?</script>", "", moving._repr_html_(), flags=re.S)
        assert re.search(r'<img src="data:image/(png|svg\+xml);base64,[\w+/=]{500,}" alt="[^"]{20,}"', page)
        assert "Run the cell to" in page
        assert not re.search("<(button|input|svg|text)", page)  # a notebook that is not trusted would keep them
    assert moving._repr_html_().count('class=\\"leaf\\"') == 1


def test_flip_books_show_each_step_once():
    leaves = [leaf.alt for leaf in plots.cache_growth_steps(7, 3).pictures]
    computed = [re.search(r"(\d+) tokens without a cache; (\d+) with one", leaf).groups() for leaf in leaves]
    assert computed == [("7", "7"), ("15", "8"), ("24", "9")]
    assert plots.block_lookup_steps()._repr_html_().count('class=\\"leaf\\"') > 2
