"""Pictures of what the rows of a batch do in each iteration, and of how long requests wait."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import groupby

from ..metrics import RequestMetrics, percentile
from ..trace import WORK, Trace
from .colors import BLUE, PAGE, SERIES_COLORS, SMALL, WIDTH, WORK_MEANING, ink_on, request_colors, work_key, work_look
from .picture import Picture, add_key, name_lanes, new_figure, set_panel_title, write


def slot_timeline(traces: Mapping[str, Trace], title: str = "", zoom: tuple[int, int] | None = None) -> Picture:
    """Draw what every row did in every forward pass, with one panel per trace on a common axis.

    A request has the same color in all panels, and its number where that fits.

    Args:
        traces: the runs by name.
        zoom: the first and the last forward pass of one more panel, which shows a part of the last trace in detail.
    """
    longest = max(1, *(trace.forward_passes for trace in traces.values()))
    panels = [(_summary(name, trace), trace, 0, longest) for name, trace in traces.items()]
    if zoom:
        name, trace = list(traces.items())[-1]
        last = min(zoom[1], trace.forward_passes - 1)
        panels.append((f"{name}, enlarged: forward passes {zoom[0]} to {last}", trace, zoom[0], last + 1))
    height = sum(0.26 * trace.rows + 0.6 for _, trace, _, _ in panels) + 0.75 + 0.3 * bool(title)
    ratios = [trace.rows for _, trace, _, _ in panels]
    figure, axes = new_figure(height, len(panels), title, height_ratios=ratios)
    colors = request_colors(
        row.request_id
        for trace in traces.values()
        for traced in trace.passes
        for row in traced.row_steps
        if row.request_id is not None
    )
    for ax, (heading, trace, first, end) in zip(axes, panels, strict=True):
        _draw_rows(ax, trace, first, end, colors)
        ax.set_xlim(first, end)
        name_lanes(ax, range(trace.rows), "row")
        set_panel_title(ax, heading)
    axes[-1].set_xlabel("forward pass (the numbers on the bars are requests)")
    seen = [kind for kind in WORK if any(trace.work[kind] for trace in traces.values())]
    if seen:
        add_key(figure, {WORK_MEANING[kind]: work_key(kind) for kind in seen})
    described = []
    for name, trace in traces.items():
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(trace.work.items()))
        described.append(f"{name}: {trace.forward_passes} forward passes on {trace.rows} rows; {counts}")
    return Picture(figure, f"Timeline of rows, slot-steps by kind. {'; '.join(described)}.")


def _summary(name: str, trace: Trace) -> str:
    num_useful = trace.slot_steps - trace.wasted_slot_steps  # with drafts, fewer than the output tokens
    share = num_useful / max(1, trace.slot_steps)
    useful = f"{num_useful:,} of {trace.slot_steps:,} slot-steps useful ({share:.0%})"
    return f"{name}: {trace.forward_passes} forward passes, {useful}"


def _draw_rows(ax, trace: Trace, first: int, end: int, colors: Mapping[Hashable, str]) -> None:
    """Draw the forward passes `first` to `end` of each row, and the number of each request where it fits."""
    points = 72 * (WIDTH - 0.65) / (end - first)  # of one forward pass on the page
    for row in range(trace.rows):
        for request_id, stretches in groupby(runs_of(trace, row), key=lambda run: run[3]):
            parts = []
            for start, length, work, _ in stretches:
                start, stop = max(start, first), min(start + length, end)
                if start < stop:
                    color = colors.get(request_id, BLUE)
                    ax.broken_barh([(start, stop - start)], (row + 0.08, 0.84), **work_look(work, color))
                    parts.append((stop - start, start, work))
            if not parts or request_id is None:
                continue
            ax.vlines(parts[0][1], row + 0.08, row + 0.92, color=PAGE, linewidth=1)
            length, start, work = max(parts)
            text = str(request_id)
            if 5.5 * len(text) + 2 < length * points:
                box = {"facecolor": PAGE, "linewidth": 0, "pad": 0.8} if work == "finished" else None
                ink = ink_on(work_look(work, color)["facecolor"])
                write(ax, start + length / 2, row + 0.52, text, SMALL - 0.5, color=ink, bbox=box)


def runs_of(trace: Trace, row: int) -> Iterator[tuple[int, int, str, Hashable]]:
    """Yield the stretches of forward passes in which a row's request and work stay the same.

    Yields:
        (start, length, work, request id) for each stretch; the id is None where the row is empty.
    """
    steps = [(traced.row_steps[row].work, traced.row_steps[row].request_id) for traced in trace.passes]
    start = 0
    for (work, request_id), stretch in groupby(steps):
        length = len(list(stretch))
        yield start, length, work, request_id
        start += length


def waiting_requests(
    named: Mapping[str, Sequence[RequestMetrics]],
    groups: Mapping[str, Collection[Hashable]],
    unit: str = "seconds",
    title: str = "",
) -> Picture:
    """Draw a marker at the end-to-end latency of each request, with a panel per policy. Dashed lines are medians.

    Args:
        named: the metrics of the requests under each policy.
        groups: the request ids of each group, at most three; each group has its own color and marker.
        unit: the unit of the latencies.
    """
    figure, axes = new_figure(1.25 * len(named) + 0.9, len(named), title, sharex=True, sharey=True)
    described, key, tallest = [], {}, 0
    for ax, (name, metrics) in zip(axes, named.items(), strict=True):
        height: Counter = Counter()
        medians = []
        for (group, ids), color, marker in zip(groups.items(), SERIES_COLORS, "osD", strict=False):
            values = sorted(request.e2e for request in metrics if request.request_id in ids)
            for value in values:
                dots = ax.plot(value, height[value] + 0.6, marker, color=color, markersize=4.5)
                height[value] += 1
            key[group] = dots[0]
            median = percentile(values, 50)
            ax.axvline(median, color=color, linestyle="--", linewidth=1, zorder=0)
            medians.append(f"{median:.3g} for {group}")
            described.append(f"{name}, {group}: {values[0]:.3g} to {values[-1]:.3g}, median {median:.3g}")
        tallest = max(tallest, *height.values())
        set_panel_title(ax, f"{name} (medians: {', '.join(medians)})")
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    axes[0].set(xlim=(0, None), ylim=(0, tallest + 0.6))
    axes[-1].set_xlabel(f"latency ({unit})")
    add_key(figure, key)
    return Picture(figure, f"Dots for the latency of each request, in {unit}. {'; '.join(described)}.")


def tokens_read(traces: Mapping[str, Trace], first: int = 0, last: int | None = None, title: str = "") -> Picture:
    """Draw how many tokens each forward pass read: those of decodes below, and those of prefills on top.

    Args:
        traces: the runs, one panel each.
        first, last: the first and the last pass to draw.
    """
    figure, axes = new_figure(1.5 * len(traces) + 0.7, len(traces), title, sharex=True, sharey=True)
    described = []
    for ax, (name, trace) in zip(axes, traces.items(), strict=True):
        shown = list(trace.passes)[first : None if last is None else last + 1]
        totals, prompts = [0] * len(shown), 0
        for kind in ("decode", "prefill"):
            read = [sum(row.tokens for row in traced.row_steps if row.work == kind) for traced in shown]
            ax.bar(range(first, first + len(read)), read, bottom=totals, width=0.85, **work_look(kind))
            totals = [below + more for below, more in zip(totals, read, strict=True)]
            prompts = sum(tokens > 0 for tokens in read)  # those of the last kind, prefill
        described.append(f"{name}: at most {max(totals)} per pass, passes with prompt tokens: {prompts}")
        set_panel_title(ax, name)
        ax.set_ylabel("tokens computed")
    axes[-1].set_xlabel("forward pass")
    add_key(figure, {f"tokens of a {kind}": work_look(kind) for kind in ("prefill", "decode")})
    return Picture(figure, f"Bars of the tokens that each forward pass computed. {'; '.join(described)}.")
