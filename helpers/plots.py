"""The pictures of the lessons: masks and caches, timelines of rows, throughput against latency, who waits.

Every function returns a `Picture` (or a `Player`), which shows itself as a cell's last expression and carries a
text that says in words what it shows. Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

import base64
import html
import io
import json
import textwrap
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from hashlib import sha256

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from .batching import Batch
from .metrics import RequestMetrics, percentile
from .trace import WORK, Trace

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
RED, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, GRAY, PALE = "#222222", "#8C8C8C", "#EFEFEF"
REQUEST_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, RED, BLUE)
WORK_COLORS = {"prefill": ORANGE, "decode": BLUE, "finished": GRAY, "stalled": PURPLE, "empty": PALE}
WORK_MEANING = {
    "prefill": "prefill: reads a prompt, first token",
    "decode": "decode: one more token",
    "finished": "finished: waits for the longest",
    "stalled": "stalled: waits for a prefill",
    "empty": "empty: no request",
}


class Picture:
    """A figure and the text that describes it; a notebook shows the figure, a screen reader reads the text."""

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
        width = round(self.figure.get_figwidth() * 96)
        png = base64.b64encode(buffer.getvalue()).decode()
        return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"alt": self.alt, "width": width}}

    def save(self, path) -> None:
        """Write the picture as SVG, the same bytes for the same picture, its text inside as title."""
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": "picture", "svg.fonttype": "none"}):
            self.figure.savefig(path, format="svg", metadata={"Date": None, "Title": self.alt})


def _figure(width: float, height: float, panels: int = 1, **options):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False, **options)[:, 0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bars(values: Mapping[str, float], xlabel: str, title: str = "") -> Picture:
    """Horizontal bars, longest name first to read: the next token and its rivals, bytes, waste."""
    figure, (ax,) = _figure(7, 0.34 * len(values) + 1.1)
    names = list(values)
    colors = [BLUE] + [SKY] * (len(names) - 1)
    drawn = ax.barh(names, list(values.values()), color=colors)
    ax.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel(xlabel)
    ax.set_title(title, loc="left", fontsize=11)
    # Two decimals: more would differ between processors, and stored outputs are compared.
    listed = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    return Picture(figure, f"Bar chart, {title or xlabel}: {listed}.")


def lines(series: Mapping[str, tuple[Sequence, Sequence]], xlabel: str, ylabel: str, title: str = "") -> Picture:
    """A line with markers for each named (xs, ys)."""
    figure, (ax,) = _figure(7.5, 3.6)
    for (name, (xs, ys)), color, marker in zip(series.items(), (RED, BLUE, GREEN, PURPLE), "os^D", strict=False):
        ax.plot(xs, ys, color=color, marker=marker, markersize=3, linewidth=1.2, label=name)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_ylim(bottom=0)
    ax.set_title(title, loc="left", fontsize=11)
    ax.grid(axis="y", color=PALE)
    ax.legend(frameon=False)
    ends = []
    for name, (_, ys) in series.items():
        peak = f", at most {max(ys):.3g}" if max(ys) > max(ys[0], ys[-1]) else ""
        ends.append(f"{name} from {ys[0]:.3g} to {ys[-1]:.3g}{peak}")
    return Picture(figure, f"Line plot of {ylabel} over {xlabel}: {'; '.join(ends)}.")


def throughput_latency(batch_sizes: Sequence[int], throughput: Sequence[float], latency: Sequence[float]) -> Picture:
    """The classic two curves: tokens a second (left axis) and seconds until a batch is done (right axis)."""
    figure, (left,) = _figure(7.5, 3.8)
    right = left.twinx()
    (first,) = left.plot(batch_sizes, throughput, color=BLUE, marker="o", label="throughput (left)")
    (second,) = right.plot(batch_sizes, latency, color=RED, marker="s", linestyle="--", label="latency (right)")
    left.set_xscale("log", base=2)
    left.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
    left.set_xlabel("batch size (rows)")
    left.set_ylabel("throughput (output tokens a second)", color=BLUE)
    right.set_ylabel("latency (seconds until the batch is done)", color=RED)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(handles=[first, second], frameon=False, loc="upper left")
    alt = (
        f"Two curves over batch sizes {batch_sizes[0]} to {batch_sizes[-1]}: throughput goes from {throughput[0]:.0f} "
        f"to {throughput[-1]:.0f} tokens a second, latency from {latency[0]:.2g} to {latency[-1]:.2g} seconds."
    )
    return Picture(figure, alt)


def token_grid(
    grids: Mapping[str, Sequence[Sequence[str]]],
    masks: Mapping[str, Sequence[Sequence[int]]],
    positions: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Picture:
    """Tokens as a coloured grid, a row a request: real tokens in colour, pads hatched, positions small below."""
    height = sum(0.5 * len(grid) + 0.55 for grid in grids.values())
    columns = max(len(row) for grid in grids.values() for row in grid)
    figure, axes = _figure(min(11, 0.95 * columns + 1), height, len(grids))
    for ax, (title, grid) in zip(axes, grids.items(), strict=True):
        for y, row in enumerate(grid):
            for x, token in enumerate(row):
                real = masks[title][y][x]
                _cell(ax, x, y, REQUEST_COLORS[y % 7] if real else None)
                style = {"ha": "center", "va": "center", "color": INK if real else GRAY}
                ax.text(x + 0.5, y + (0.4 if positions else 0.5), token, fontsize=9, **style)
                if positions:
                    ax.text(x + 0.5, y + 0.8, str(positions[title][y][x]), fontsize=7, **style)
        _grid_axes(ax, max(map(len, grid)), len(grid), title)
        ax.set_yticks([y + 0.5 for y in range(len(grid))], [f"request {y}" for y in range(len(grid))])
    described = []
    for title in grids:
        pads = [len(row) - sum(row) for row in masks[title]]
        described.append(f"{title}: pads a row {pads}")
    return Picture(figure, f"Grid of tokens. {'; '.join(described)}.")


def batches(named: Mapping[str, Batch]) -> Picture:
    """Batches before and after a verb, one above the other: a row a request, a column a token.

    In colour: keys and values in the cache. Framed: tokens that the next forward pass reads. Hatched: left padding.
    """
    columns = max(batch["attention_mask"].size(1) for batch in named.values())
    rows = [max(1, len(batch["request_ids"])) + 0.9 for batch in named.values()]
    figure, axes = _figure(min(10, 0.42 * columns + 3.4), 0.38 * sum(rows) + 0.45, len(named), height_ratios=rows)
    ids = list(dict.fromkeys(request_id for batch in named.values() for request_id in batch["request_ids"]))
    color = {request_id: REQUEST_COLORS[index % 7] for index, request_id in enumerate(ids)}
    for ax, (title, batch) in zip(axes, named.items(), strict=True):
        mask = batch["attention_mask"].tolist()
        width, unread = batch["attention_mask"].size(1), batch["input_ids"].size(1)
        for y, request_id in enumerate(batch["request_ids"]):
            for x, real in enumerate(mask[y]):
                _cell(ax, x, y, color[request_id] if real else None, framed=bool(real) and x >= width - unread)
        _grid_axes(ax, columns, max(1, len(mask)), title)
        labels = [
            f"{request_id}: {'done' if left == 0 else f'{left} to go'}"
            for request_id, left in zip(batch["request_ids"], batch["tokens_remaining"], strict=True)
        ]
        ax.set_yticks([y + 0.5 for y in range(len(labels))], labels)
        if not labels:
            ax.text(columns / 2, 0.5, "no rows", ha="center", va="center", color=GRAY)
    figure.legend(
        handles=[
            Patch(facecolor=SKY, edgecolor="white", label="key and value in the cache"),
            Patch(facecolor="white", edgecolor=INK, linewidth=1.6, label="token to be read next"),
            Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="left padding (mask 0)"),
        ],
        loc="outside lower left", ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    return Picture(figure, " ".join(f"{title}: {_describe(batch)}." for title, batch in named.items()))


def compare(
    expected: Sequence[Sequence], actual: Sequence[Sequence], title: str = "", pads: Sequence = (None,)
) -> Picture:
    """Two grids side by side, what was expected and what came; each cell that differs is framed and marked.

    Rows may be of unequal length: they are lined up at their right edges, where a batch grows.

    Args:
        expected, actual: rows of cells (numbers or text).
        title: what the grids show.
        pads: cells with one of these contents are drawn as padding; None without any text.
    """
    columns = max([1, *(len(row) for row in [*expected, *actual])])
    rows = max(1, len(expected), len(actual))
    figure = Figure(figsize=(min(11, 1.0 * columns + 2), 0.42 * rows + 0.95), layout="constrained")
    cells, different = {}, []
    for name, grid in (("expected", expected), ("yours", actual)):
        cells[name] = {
            (y, x + columns - len(row)): "" if cell is None else str(cell)
            for y, row in enumerate(grid)
            for x, cell in enumerate(row)
        }
    for place in sorted(cells["expected"] | cells["yours"]):
        if cells["expected"].get(place) != cells["yours"].get(place):
            different.append(place)
    hatched = {"" if pad is None else str(pad) for pad in pads}
    for ax, name in zip(figure.subplots(1, 2), cells, strict=True):
        for (y, x), text in cells[name].items():
            _cell(ax, x, y, None if text in hatched else REQUEST_COLORS[y % 7])
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9, color=INK)
        if name == "yours":
            for y, x in different:
                frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8, "linestyle": "--"}
                ax.add_patch(Rectangle((x + 0.06, y + 0.08), 0.88, 0.84, **frame))
                ax.text(x + 0.93, y + 0.14, "≠", ha="right", va="top", fontsize=9, color=INK, weight="bold")
        _grid_axes(ax, columns, rows, name)
        ax.set_yticks([y + 0.5 for y in range(rows)], [f"row {y}" for y in range(rows)])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    described = []
    for y, x in different[:8]:
        one, other = (cells[name].get((y, x), "nothing") or "a pad" for name in ("expected", "yours"))
        described.append(f"row {y}, column {x}: expected {one}, got {other}")
    more = f"; and {len(different) - 8} more" if len(different) > 8 else ""
    return Picture(figure, f"{title or 'Two grids'}: {'; '.join(described) or 'no difference'}{more}.")


def _describe(batch: Batch) -> str:
    if not batch["request_ids"]:
        return "no rows"
    pads = (batch["attention_mask"] == 0).sum(dim=1).tolist()
    cached = batch["attention_mask"].size(1) - batch["input_ids"].size(1)
    rows = ", ".join(f"request {id} with {n} pads" for id, n in zip(batch["request_ids"], pads, strict=True))
    return f"{cached} columns in the cache and {batch['input_ids'].size(1)} to be read; {rows}"


def _cell(ax, x: int, y: int, color: str | None, framed: bool = False) -> None:
    if color is None:
        look = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}
    else:
        look = {"facecolor": color, "edgecolor": INK, "linewidth": 1.8 if framed else 0}
    ax.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, **look))


def _grid_axes(ax, columns: int, rows: int, title: str) -> None:
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, loc="left", fontsize=10)


def slot_timeline(traces: Mapping[str, Trace]) -> Picture:
    """What every row did in every forward pass, for each named trace, on one common axis.

    Decoding requests that follow each other in a row are drawn in two blues, so that one can see them change.
    """
    longest = max(trace.forward_passes for trace in traces.values())
    rows = sum(trace.rows for trace in traces.values())
    figure, axes = _figure(10, 0.22 * rows + 0.75 * len(traces) + 0.5, len(traces), sharex=True)
    for ax, (title, trace) in zip(axes, traces.items(), strict=True):
        for row in range(trace.rows):
            for start, length, work, nth in _runs(trace, row):
                color = SKY if work == "decode" and nth % 2 else WORK_COLORS[work]
                ax.broken_barh([(start, length)], (row + 0.08, 0.84), facecolors=color, linewidth=0)
        ax.set_xlim(0, longest)
        ax.set_ylim(trace.rows, 0)
        ax.set_yticks([row + 0.5 for row in range(trace.rows)], [str(row) for row in range(trace.rows)], fontsize=8)
        ax.set_ylabel("row")
        share = trace.output_tokens / trace.slot_steps
        ax.set_title(
            f"{title}: {trace.forward_passes} forward passes x {trace.rows} rows = {trace.slot_steps:,} slot-steps, "
            f"{trace.output_tokens:,} of them useful ({share:.0%})",
            loc="left", fontsize=10,
        )  # fmt: skip
        ax.tick_params(length=2)
    axes[-1].set_xlabel("forward pass")
    seen = [kind for kind in WORK if any(trace.work[kind] for trace in traces.values())]
    figure.legend(
        handles=[Patch(facecolor=WORK_COLORS[kind], label=WORK_MEANING[kind]) for kind in seen],
        loc="outside lower left", ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    described = [
        f"{title}: {trace.forward_passes} forward passes on {trace.rows} rows; "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(trace.work.items()))
        for title, trace in traces.items()
    ]
    return Picture(figure, f"Timeline of rows, slot-steps by kind. {'; '.join(described)}.")


def _runs(trace: Trace, row: int) -> Iterable[tuple[int, int, str, int]]:
    """Stretches of a row in which nothing changes: (start, length, work, how many requests the row had before)."""
    start, last, nth = 0, None, -1
    for index, iteration in enumerate([*trace.iterations, None]):
        slot = iteration.slots[row] if iteration else None
        key = (slot.work, slot.request_id) if slot else None
        if key != last:
            if last is not None:
                yield start, index - start, last[0], nth
            if key is not None and key[1] is not None and (last is None or key[1] != last[1]):
                nth += 1
            start, last = index, key


def work_bars(traces: Mapping[str, Trace]) -> Picture:
    """Where the slot-steps of each trace went, as one stacked bar a trace."""
    figure, (ax,) = _figure(9, 0.5 * len(traces) + 1.5)
    for y, trace in enumerate(traces.values()):
        left = 0
        for kind in WORK:
            count = trace.work[kind]
            ax.barh(y, count, left=left, color=WORK_COLORS[kind], label=WORK_MEANING[kind] if y == 0 else None)
            if count > 0.04 * max(t.slot_steps for t in traces.values()):
                ax.text(left + count / 2, y, f"{count:,}", ha="center", va="center", fontsize=9,
                        color="white" if kind in ("decode", "finished") else INK)  # fmt: skip
            left += count
    ax.set_yticks(range(len(traces)), list(traces))
    ax.invert_yaxis()
    ax.set_xlabel("slot-steps (rows x forward passes)")
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    described = "; ".join(f"{name}: {dict(sorted(trace.work.items()))}" for name, trace in traces.items())
    return Picture(figure, f"Stacked bars of slot-steps. {described}.")


def latencies(named: Mapping[str, Sequence[RequestMetrics]]) -> Picture:
    """End-to-end latency of every request, a marker each, sorted by request."""
    figure, (ax,) = _figure(8, 3.4)
    for (name, metrics), color, marker in zip(named.items(), (RED, BLUE, GREEN, PURPLE), "sov^", strict=False):
        ordered = sorted(metrics, key=lambda one: one.request_id)
        xs, ys = [one.request_id for one in ordered], [one.e2e for one in ordered]
        ax.plot(xs, ys, marker, color=color, label=name, markersize=5)
    ax.set_xlabel("request, in order of arrival")
    ax.set_ylabel("latency (seconds)")
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color=PALE)
    ax.legend(frameon=False)
    described = "; ".join(f"{name}: up to {max(one.e2e for one in metrics):.2g} s" for name, metrics in named.items())
    return Picture(figure, f"Latency of {len(next(iter(named.values())))} requests. {described}.")


def who_waits(
    named: Mapping[str, Sequence[RequestMetrics]], groups: Mapping[str, Collection[Hashable]], unit: str = "seconds"
) -> Picture:
    """A mark for each request at its end-to-end latency, a panel for each policy; dashed lines are medians.

    Args:
        named: the requests' metrics under each policy.
        groups: which request ids belong together; each group has a colour and a marker.
        unit: of the latencies.
    """
    figure, axes = _figure(8, 1.15 * len(named) + 0.9, len(named), sharex=True, sharey=True)
    looks = list(zip(groups.items(), (BLUE, RED, GREEN), "osD", strict=False))
    described = []
    for ax, (title, metrics) in zip(axes, named.items(), strict=True):
        height: Counter = Counter()
        for (group, ids), color, marker in looks:
            values = sorted(one.e2e for one in metrics if one.request_id in ids)
            for value in values:
                ax.plot(value, height[value] + 0.6, marker, color=color, markersize=4.5)
                height[value] += 1
            middle = percentile(values, 50)
            ax.axvline(middle, color=color, linestyle="--", linewidth=1, zorder=0)
            described.append(f"{title}, {group}: {values[0]:.3g} to {values[-1]:.3g}, median {middle:.3g}")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    axes[0].set_xlim(left=0)
    axes[0].set_ylim(bottom=0)
    axes[-1].set_xlabel(f"latency ({unit})")
    handles = [Line2D([], [], linestyle="", marker=m, color=color, label=group) for (group, _), color, m in looks]
    handles.append(Line2D([], [], linestyle="--", linewidth=1, color=INK, label="median"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return Picture(figure, f"Dots for the latency of each request, in {unit}. {'; '.join(described)}.")


def tokens_read(traces: Mapping[str, Trace], first: int = 0, last: int | None = None) -> Picture:
    """How many tokens each forward pass read, a bar a pass: those of decodes below, those of prompts on top.

    Args:
        traces: the runs, a panel each.
        first, last: show these passes only.
    """
    figure, axes = _figure(9, 1.5 * len(traces) + 0.7, len(traces), sharex=True, sharey=True)
    described = []
    for ax, (title, trace) in zip(axes, traces.items(), strict=True):
        shown = trace.iterations[first : None if last is None else last + 1]
        totals, prompts = [0] * len(shown), 0
        for kind in ("decode", "prefill"):
            read = [sum(slot.tokens for slot in one.slots if slot.work == kind) for one in shown]
            ax.bar(range(first, first + len(read)), read, bottom=totals, width=0.85, color=WORK_COLORS[kind])
            totals = [below + more for below, more in zip(totals, read, strict=True)]
            prompts = sum(tokens > 0 for tokens in read)  # of the last kind
        described.append(f"{title}: at most {max(totals)} in a pass, passes that read from prompts: {prompts}")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_ylabel("tokens read")
    axes[-1].set_xlabel("forward pass")
    handles = [Patch(facecolor=WORK_COLORS[kind], label=f"tokens of a {kind}") for kind in ("prefill", "decode")]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return Picture(figure, f"Bars of the tokens that each forward pass read. {'; '.join(described)}.")


def tradeoff(points: Mapping[str, tuple[float, float]], xlabel: str, ylabel: str) -> Picture:
    """A named point for each way of doing something, on two scales of which less is better."""
    figure, (ax,) = _figure(6.5, 3.8)
    for (name, (x, y)), color, marker in zip(points.items(), (GRAY, ORANGE, PURPLE, BLUE), "soD^", strict=False):
        ax.plot(x, y, marker, color=color, markersize=9)
        ax.annotate(name, (x, y), xytext=(9, 5), textcoords="offset points", fontsize=10)
    ax.set_xlim(0, 1.3 * max(x for x, _ in points.values()))
    ax.set_ylim(0, 1.2 * max(y for _, y in points.values()))
    ax.text(0.01, 0.02, "↙ better", transform=ax.transAxes, color=GRAY, fontsize=9)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(color=PALE)
    listed = "; ".join(f"{name} at {x:.3g} and {y:.3g}" for name, (x, y) in points.items())
    return Picture(figure, f"Points by {xlabel} and {ylabel}: {listed}.")


class Player:
    """A timeline that plays in the browser: rows fill, decode and free, iteration by iteration.

    Plain HTML and a few lines of script, no server and no download. Where scripts do not run (a notebook that is
    not trusted yet, a preview) the whole timeline is shown, standing still.
    """

    def __init__(self, trace: Trace, title: str):
        self.trace, self.title = trace, title

    def __repr__(self) -> str:
        return f"Player: {self.title}, {self.trace.forward_passes} iterations on {self.trace.rows} rows"

    def _repr_html_(self) -> str:
        trace, unit, left, right = self.trace, 22, 190, 700
        scale = right / max(1, trace.forward_passes)
        marks = []
        for row in range(trace.rows):
            for start, length, work, nth in _runs(trace, row):
                color = SKY if work == "decode" and nth % 2 else WORK_COLORS[work]
                place = f'x="{left + start * scale:.2f}" y="{row * unit + 2}" width="{length * scale:.2f}"'
                marks.append(f'<rect {place} height="{unit - 4}" fill="{color}"/>')
        # A frame an iteration: for each row its request's name, kind of work and tokens so far.
        done: dict = {}
        frames = []
        for iteration in trace.iterations:
            frame = []
            for slot in iteration.slots:
                done[slot.request_id] = done.get(slot.request_id, 0) + slot.new_tokens
                name = "" if slot.request_id is None else str(slot.request_id)
                frame.append([name, WORK.index(slot.work), done[slot.request_id] if name else 0])
            frames.append(frame)
        data = json.dumps(frames, separators=(",", ":")).replace("</", "<\\/")
        legend = "".join(
            f'<span style="margin-right:14px"><span style="display:inline-block;width:11px;height:11px;'
            f'background:{WORK_COLORS[kind]};border:1px solid #999"></span> {html.escape(WORK_MEANING[kind])}</span>'
            for kind in WORK
        )
        id = "play" + sha256((data + self.title).encode()).hexdigest()[:10]
        return PLAYER.format(
            id=id, title=html.escape(self.title), marks="".join(marks), data=data, legend=legend,
            width=left + right, height=trace.rows * unit + 4, left=left, right=right, unit=unit, last=len(frames),
            colors=json.dumps([WORK_COLORS[kind] for kind in WORK]), kinds=json.dumps(list(WORK)),
            text=html.escape(repr(self)),
        )  # fmt: skip


PLAYER = textwrap.dedent("""\
    <div id="{id}" style="max-width:{width}px;font:13px sans-serif;color:#222;background:#fff;padding:6px">
    <div style="margin-bottom:4px"><b>{title}</b></div>
    <div style="display:flex;gap:8px;align-items:center;margin-bottom:4px">
    <button type="button" style="width:70px">Play</button>
    <input type="range" min="1" max="{last}" value="{last}" style="flex:1" aria-label="iteration">
    <span style="width:130px;text-align:right">iteration {last} of {last}</span></div>
    <svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{text}">
    <g class="timeline">{marks}</g><rect class="veil" x="{width}" y="0" width="0" height="{height}" fill="#fff"/>
    <g class="now"></g></svg>
    <div style="font-size:11px;margin-top:2px">{legend}</div>
    <script>(() => {{
    const root = document.getElementById("{id}"), frames = {data}, colors = {colors}, kinds = {kinds};
    const [button, slider] = [root.querySelector("button"), root.querySelector("input")];
    const label = root.querySelector("span"), now = root.querySelector(".now"), veil = root.querySelector(".veil");
    let timer = null;
    function mark(name, attributes, text) {{
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const key in attributes) node.setAttribute(key, attributes[key]);
      if (text) node.textContent = text;
      now.appendChild(node);
    }}
    function show() {{
      const n = +slider.value, edge = {left} + {right} * n / frames.length;
      label.textContent = "iteration " + n + " of " + frames.length;
      veil.setAttribute("x", edge); veil.setAttribute("width", {width} - edge);
      now.replaceChildren();
      frames[n - 1].forEach(([name, kind, tokens], row) => {{
        const y = row * {unit} + 2;
        mark("rect", {{x: 0, y, width: {left} - 12, height: {unit} - 4, fill: colors[kind], stroke: "#999"}});
        const dark = kinds[kind] == "decode" || kinds[kind] == "finished";
        mark("text", {{x: 6, y: y + 13, "font-size": 11, fill: dark ? "#fff" : "#222"}},
          name == "" ? "empty" : "request " + name + ": " + kinds[kind] + ", " + tokens + " tok");
      }});
    }}
    function stop() {{ clearInterval(timer); timer = null; button.textContent = "Play"; }}
    button.onclick = () => {{
      if (timer) return stop();
      if (+slider.value >= frames.length) slider.value = 1;
      button.textContent = "Pause";
      timer = setInterval(() => {{
        if (+slider.value >= frames.length) return stop();
        slider.value = +slider.value + 1; show();
      }}, 80);
    }};
    slider.oninput = () => {{ stop(); show(); }};
    show();
    }})()</script></div>""")


def play(trace: Trace, title: str = "Rows, iteration by iteration") -> Player:
    """An animation of a trace with a play button and a slider."""
    return Player(trace, title)


def padding(named: Mapping[str, tuple[Sequence[int], Sequence[int]]], ylabel: str) -> Picture:
    """What each forward pass did for the requests and what it did for padding, on top of each other: a panel a run.

    Args:
        named: for each run, useful counts and padding counts, one a pass.
        ylabel: what was counted.
    """
    figure, axes = _figure(9, 1.7 * len(named) + 0.7, len(named))
    described = []
    for ax, (title, (useful, pads)) in zip(axes, named.items(), strict=True):
        passes, both = range(len(useful)), [one + other for one, other in zip(useful, pads, strict=True)]
        ax.fill_between(passes, useful, step="post", color=BLUE, linewidth=0)
        ax.fill_between(passes, useful, both, step="post", facecolor="white", edgecolor=GRAY, hatch="////", linewidth=0)
        share = sum(pads) / max(1, sum(both))
        ax.set_title(f"{title}: {share:.0%} padding", loc="left", fontsize=10)
        ax.set_ylabel(ylabel)
        ax.set_xlim(0, max(1, len(useful) - 1))
        ax.set_ylim(bottom=0)
        described.append(f"{title}: {sum(useful):,} of the requests' own and {sum(pads):,} of padding")
    axes[-1].set_xlabel("forward pass")
    handles = [
        Patch(facecolor=BLUE, label="of the requests' own tokens"),
        Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="of padding"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return Picture(figure, f"Areas over forward passes, {ylabel}. {'; '.join(described)}.")


def token_row(named: Mapping[str, Sequence[tuple[str, Hashable, int]]]) -> Picture:
    """Tokens of several requests side by side in one row, coloured by request: (text, request, position) each.

    A request keeps its colour from row to row. Positions are small below the tokens.
    """
    columns = max(len(cells) for cells in named.values())
    figure, axes = _figure(min(11, 0.85 * columns + 0.6), 0.95 * len(named) + 0.4, len(named))
    requests = list(dict.fromkeys(request for cells in named.values() for _, request, _ in cells))
    color = {request: REQUEST_COLORS[index % 7] for index, request in enumerate(requests)}
    for ax, (title, cells) in zip(axes, named.items(), strict=True):
        for x, (token, request, position) in enumerate(cells):
            _cell(ax, x, 0, color[request])
            ax.text(x + 0.5, 0.4, token, ha="center", va="center", fontsize=9, color=INK)
            ax.text(x + 0.5, 0.8, str(position), ha="center", va="center", fontsize=7, color=INK)
        _grid_axes(ax, columns, 1, title)
        ax.set_yticks([])
    handles = [Patch(facecolor=color[request], label=str(request)) for request in requests]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    described = [
        f"{title}: " + ", ".join(f"{token.strip()} ({request}, {position})" for token, request, position in cells)
        for title, cells in named.items()
    ]
    return Picture(figure, f"Tokens in one row, each with its request and position. {'; '.join(described)}.")


def who_sees_whom(
    named: Mapping[str, Sequence[Sequence[bool]]], tokens: Sequence[str], owners: Sequence[int]
) -> Picture:
    """Attention masks side by side: a row is a token that looks, a column one that may be looked at.

    Args:
        named: masks [tokens, tokens], True to look.
        tokens: their texts.
        owners: the number of the request that each token belongs to. A look at somebody else's token is crossed.
    """
    count = len(tokens)
    figure = Figure(figsize=(min(11, 0.44 * count * len(named) + 2), 0.34 * count + 1.4), layout="constrained")
    described = []
    for ax, (title, mask) in zip(figure.subplots(1, len(named), squeeze=False)[0], named.items(), strict=True):
        ax.spines[:].set_visible(False)
        across = 0
        for y in range(count):
            for x in range(count):
                own = owners[x] == owners[y]
                color = REQUEST_COLORS[owners[y] % 7] if own else RED
                ax.add_patch(Rectangle((x, y), 0.94, 0.94, facecolor=color if mask[y][x] else PALE, linewidth=0))
                if mask[y][x] and not own:
                    across += 1
                    ax.text(x + 0.47, y + 0.47, "×", ha="center", va="center", color="white", fontsize=10)
        ax.set_xlim(0, count)
        ax.set_ylim(count, 0)
        ax.set_xticks([x + 0.5 for x in range(count)], [token.strip() for token in tokens], rotation=90, fontsize=8)
        ax.set_yticks([y + 0.5 for y in range(count)], [token.strip() for token in tokens], fontsize=8)
        ax.tick_params(length=0)
        ax.xaxis.tick_top()
        ax.set_ylabel("token that looks")
        ax.set_xlabel("token that is looked at")
        ax.set_title(title, loc="left", fontsize=10)
        seen = sum(map(sum, mask))
        described.append(f"{title}: {seen} of {count * count} cells looked at, {across} of them another request's")
    return Picture(figure, f"Grids of which token looks at which. {'; '.join(described)}.")


def memory_timeline(named: Mapping[str, tuple[Sequence[int], Sequence[int]]], capacity: int) -> Picture:
    """How much of a KV cache is taken and how much of that holds a token, iteration by iteration: a panel a way.

    Args:
        named: for each way of giving out memory, tokens held and tokens that there is room for, one an iteration.
        capacity: tokens that fit in all.
    """
    figure, axes = _figure(9, 1.6 * len(named) + 0.7, len(named), sharex=True, sharey=True)
    described = []
    for ax, (title, (held, room)) in zip(axes, named.items(), strict=True):
        # Each value lasts until the next iteration, and the last one for an iteration, too.
        iterations, held, room = range(len(held) + 1), [*held, held[-1]], [*room, room[-1]]
        ax.fill_between(iterations, held, step="post", color=BLUE, linewidth=0)
        ax.fill_between(iterations, held, room, step="post", facecolor="white", edgecolor=ORANGE, hatch="////", lw=0)
        ax.axhline(capacity, color=INK, linestyle="--", linewidth=1)
        share = sum(held[:-1]) / max(1, sum(room[:-1]))
        ax.set_title(f"{title}: {len(held) - 1} iterations, {share:.0%} of what is taken is used", loc="left", size=10)
        ax.set_ylabel("tokens")
        ax.set_ylim(0, 1.08 * capacity)
        described.append(f"{title}: {len(held) - 1} iterations, {share:.0%} of the memory taken holds tokens")
    axes[0].set_xlim(left=0)
    axes[-1].set_xlabel("iteration")
    handles = [
        Patch(facecolor=BLUE, label="holds a token"),
        Patch(facecolor="white", edgecolor=ORANGE, hatch="////", label="taken, but holds nothing"),
        Line2D([], [], color=INK, linestyle="--", linewidth=1, label="all memory"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return Picture(figure, f"Memory over iterations, {capacity:,} tokens in all. {'; '.join(described)}.")


def block_tables(
    named: Mapping[str, Mapping[Hashable, tuple[Sequence[int], int]]], blocks: int, block_size: int
) -> Picture:
    """Block tables on the left, and on the right the memory that they point into, coloured by request.

    Args:
        named: for each panel, by request its block table and how many tokens it has.
        blocks: how many there are.
        block_size: tokens in a block.
    """
    requests = list(dict.fromkeys(request for tables in named.values() for request in tables))
    color = {request: REQUEST_COLORS[index % 7] for index, request in enumerate(requests)}
    longest = max([1, *(len(table) for tables in named.values() for table, _ in tables.values())])
    heights = [0.34 * max(2, len(tables)) + 0.5 for tables in named.values()]
    figure = Figure(figsize=(10.5, sum(heights) + 0.35), layout="constrained")
    grid = figure.subplots(len(named), 2, squeeze=False, height_ratios=heights, width_ratios=[longest + 1, 11])
    described, shared_somewhere = [], False
    for (left, right), (title, tables) in zip(grid, named.items(), strict=True):
        owners: dict[int, list] = {}
        for request, (table, tokens) in tables.items():
            for place, block in enumerate(table):
                filled = max(0, min(block_size, tokens - place * block_size))
                owners.setdefault(block, []).append((request, filled))
        fill = {block: GRAY if len(whose) > 1 else color[whose[0][0]] for block, whose in owners.items()}
        shared_somewhere |= GRAY in fill.values()
        for y, (table, _) in enumerate(tables.values()):
            for x, block in enumerate(table):
                _cell(left, x, y, fill[block])
                left.text(x + 0.5, y + 0.52, str(block), ha="center", va="center", fontsize=9, color=INK)
        _grid_axes(left, longest, max(1, len(tables)), title)
        left.set_yticks([y + 0.5 for y in range(len(tables))], [str(request) for request in tables], fontsize=9)
        for block in range(blocks):
            filled = max((tokens for _, tokens in owners.get(block, [])), default=0)
            for slot in range(block_size):
                place, height = (block + slot / block_size * 0.88 + 0.04, 0.25), 0.5
                look = {"facecolor": fill.get(block, "white") if slot < filled else "white", "linewidth": 0.6}
                hatch = "/////" if block in owners and slot >= filled else None
                edge = fill.get(block, "#CCCCCC") if slot >= filled else "white"
                right.add_patch(Rectangle(place, 0.88 / block_size, height, edgecolor=edge, hatch=hatch, **look))
            right.text(block + 0.48, 0.98, str(block), ha="center", va="center", fontsize=8, color=INK)
        _grid_axes(right, blocks, 1, "memory, block by block")
        right.set_ylim(1.15, 0)
        right.set_yticks([])
        described.append(f"{title}: " + (", ".join(f"{name} has {list(table)}" for name, (table, _) in tables.items())))
    for ax in grid[-1]:
        ax.set_xlabel("block table" if ax is grid[-1][0] else "number of the block", fontsize=9)
    handles = [Patch(facecolor=color[request], label=str(request)) for request in requests]
    handles += [Patch(facecolor=GRAY, label="shared")] * shared_somewhere
    handles += [Patch(facecolor="white", edgecolor=GRAY, hatch="/////", label="taken, no token yet")]
    handles += [Patch(facecolor="white", edgecolor="#CCCCCC", label="free")]
    figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False, fontsize=9)
    return Picture(figure, f"Block tables and {blocks} blocks of {block_size} tokens. {'; '.join(described)}.")


def memory_shares(named: Mapping[str, Sequence[int]], capacity: int, unit: str) -> Picture:
    """How much memory each request has, iteration by iteration, on top of each other.

    Args:
        named: for each request, how much it has in each iteration; 0 where it has none.
        capacity: how much there is.
        unit: what is counted.
    """
    figure, (ax,) = _figure(9, 2.9)
    count = max(map(len, named.values()))
    below, described = [0] * (count + 1), []
    for index, (name, shares) in enumerate(named.items()):
        top = [under + more for under, more in zip(below, [*shares, shares[-1]], strict=True)]
        color = REQUEST_COLORS[index % 7]
        ax.fill_between(range(count + 1), below, top, step="post", color=color, linewidth=0, label=name)
        below = top
        there = [(index, index + 1) for index, share in enumerate(shares) if share]
        times = "".join(f"{first} to " * (first - 1 not in dict(there)) + f"{last}, " * (last not in dict(there))
                        for first, last in there)  # fmt: skip
        described.append(f"{name} from iteration {times}at most {max(shares)}")
    ax.axhline(capacity, color=INK, linestyle="--", linewidth=1, label=f"all {capacity} {unit}")
    ax.set_xlim(0, count)
    ax.set_ylim(0, 1.12 * capacity)
    ax.set_xlabel("iteration")
    ax.set_ylabel(unit)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    return Picture(figure, f"Stacked areas of {unit} over iterations, {capacity} in all. {'; '.join(described)}.")


def grouped_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    line: tuple[float, str] | None = None,
) -> Picture:
    """Upright bars side by side, a bar for each series in each group, with its value on top; and a line to compare."""
    figure, (ax,) = _figure(9, 3.8)
    width = 0.84 / len(series)
    for number, ((name, values), color) in enumerate(zip(series.items(), REQUEST_COLORS, strict=False)):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = ax.bar(places, values, 0.92 * width, color=color, label=name)
        ax.bar_label(drawn, fmt="%.1f", padding=2, fontsize=8.5)
    if line:
        ax.axhline(line[0], color=INK, linestyle="--", linewidth=1, label=f"{line[1]}: {line[0]:g}", zorder=0)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title, loc="left", fontsize=11)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    listed = "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in values)}" for name, values in series.items())
    return Picture(figure, f"Bars of {ylabel} by {xlabel} ({', '.join(groups)}). {listed}.")


def request_timeline(request: RequestMetrics) -> Picture:
    """One request from when it was meant to be sent to its last token, with its latencies as arrows.

    Args:
        request: with at least one token. If it says when it was really `sent`, as the load generator's do, that is
            marked, too.
    """
    sent = getattr(request, "sent", request.arrival)
    start, *times = (1000 * (time - request.arrival) for time in (sent, *request.token_times))
    figure, (ax,) = _figure(9, 2.8)
    ax.plot([0, times[-1]], [0, 0], color=GRAY, linewidth=1, zorder=0)
    ax.plot(0, 0, "|", color=INK, markersize=16, markeredgewidth=2, label="meant to be sent")
    ax.plot(start, 0, ">", color=GRAY, markersize=7, label="sent")
    ax.plot(times[0], 0, "D", color=ORANGE, markersize=8, label="first token")
    ax.plot(times[1:], [0] * len(times[1:]), "o", color=BLUE, markersize=5, label="later tokens")
    arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    spans = [("TTFT", 0, times[0], 2), ("E2E", 0, times[-1], 3)]
    if len(times) > 1:
        gap = max(range(1, len(times)), key=lambda number: times[number] - times[number - 1])
        spans.append(("longest gap (ITL)", times[gap - 1], times[gap], 1))
    for name, left, right, height in spans:
        ax.vlines([left, right], 0, height, color=PALE, zorder=0)
        ax.annotate("", (left, height), (right, height), arrowprops=arrow)
        ax.text((left + right) / 2, height + 0.12, f"{name} {right - left:.0f} ms", ha="center", fontsize=9)
    ax.set_ylim(-0.6, 3.6)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("milliseconds since the request was meant to be sent")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    said = "; ".join(f"{name} {right - left:.0f} ms" for name, left, right, _ in spans)
    alt = f"Timeline of a request with {len(times)} chunks of tokens, sent after {start:.0f} ms: {said}."
    return Picture(figure, alt)


def load_run(result) -> Picture:
    """A line for each request of a load test, from when it was meant to be sent until its end: how queues build up.

    Args:
        result: a `LoadResult` of the load generator.
    """
    figure, (ax,) = _figure(9, 4)
    for answer in result.answers:
        y = answer.request_id
        if answer.status == "ok":
            ax.hlines(y, answer.arrival, answer.token_times[0], color=ORANGE, linewidth=1.6)
            ax.hlines(y, answer.token_times[0], answer.ended, color=BLUE, linewidth=1.6)
        else:
            ax.plot(answer.ended, y, "x", color=INK, markersize=4)
    ax.invert_yaxis()
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(left=0)
    ax.set_xlabel("seconds since the first request was due")
    ax.set_ylabel("request, in order of arrival")
    handles = [
        Line2D([], [], color=ORANGE, label="waits for the first token"),
        Line2D([], [], color=BLUE, label="answered"),
        Line2D([], [], linestyle="", marker="x", color=INK, label="refused or failed"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    count = len(result.answers)
    alt = f"A line for each of {count} requests, {len(result.ok)} of them answered, in {result.duration:.2f} s."
    if result.ok:
        first, last = (f"{1000 * result.percentile(name, 50):.0f} ms" for name in ("ttft", "e2e"))
        alt += f" Median TTFT {first}, median end-to-end latency {last}."
    return Picture(figure, alt)


def load_sweep(named: Mapping[str, Sequence]) -> Picture:
    """Latency over throughput, a curve for each server: flat while load brings throughput, steep once it does not.

    Above the end-to-end latency, below the time to the first token: medians as lines, 99th percentiles dashed. A ring
    marks the knee, where throughput divided by the median end-to-end latency is greatest (see `load_test.sweep`).

    Args:
        named: what `load_test.sweep` returned for each server.
    """
    from .load_test.sweep import knee

    figure, axes = _figure(8, 5.6, 2, sharex=True)
    handles, described = [], []
    for (name, results), color, marker in zip(named.items(), (RED, BLUE, GREEN, PURPLE), "osD^", strict=False):
        results = [result for result in sorted(results, key=lambda one: one.rate) if result.ok]
        best = knee(results)
        throughput = [result.output_throughput for result in results]
        for ax, latency in zip(axes, ("e2e", "ttft"), strict=True):
            for percent, style in ((50, "-"), (99, "--")):
                values = [result.percentile(latency, percent) for result in results]
                ax.plot(throughput, values, style, color=color, marker=marker, markersize=4, linewidth=1.2)
            place = best.output_throughput, best.percentile(latency, 50)
            ax.plot(*place, "o", color=INK, markersize=13, fillstyle="none")
            ax.annotate(f"{best.rate:.3g}/s", place, (0, 11), textcoords="offset points", ha="center", fontsize=9)
        handles.append(Line2D([], [], color=color, marker=marker, markersize=4, label=name))
        middles = [result.percentile("e2e", 50) for result in results]
        described.append(
            f"{name}: rates {results[0].rate:.3g} to {results[-1].rate:.3g}/s, at most {max(throughput):.3g} tokens/s, "
            f"median end-to-end latency {middles[0]:.2g} to {middles[-1]:.2g} s, knee at {best.rate:.3g}/s with "
            f"{best.output_throughput:.3g} tokens/s and {best.percentile('e2e', 50):.2g} s"
        )
    for ax, title in zip(axes, ("end to end (seconds)", "time to first token (seconds)"), strict=True):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_ylabel(title)
        ax.grid(color=PALE)
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("throughput (output tokens a second)")
    handles += [Line2D([], [], color=INK, label="median"), Line2D([], [], color=INK, linestyle="--", label="p99")]
    ring = {"linestyle": "", "marker": "o", "markersize": 10, "fillstyle": "none"}
    handles.append(Line2D([], [], color=INK, label="knee: greatest throughput / latency", **ring))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    return Picture(figure, f"Latency over throughput. {'; '.join(described)}.")
