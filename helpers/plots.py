"""The pictures of the lessons: masks and caches, timelines of rows, throughput against latency.

Every function returns a `Picture` (or a `Player`), which shows itself as a cell's last expression and carries a
text that says in words what it shows. Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

import base64
import html
import io
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .batching import Batch
from .metrics import RequestMetrics
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
    ends = "; ".join(f"{name} from {ys[0]:.3g} to {ys[-1]:.3g}" for name, (_, ys) in series.items())
    return Picture(figure, f"Line plot of {ylabel} over {xlabel}: {ends}.")


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
