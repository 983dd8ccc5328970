"""Bar charts, line plots and scatter plots, for numbers of any kind."""

import math
from collections.abc import Collection, Mapping, Sequence

from matplotlib.lines import Line2D

from ..metrics import percentile
from .colors import BLUE, GRAY, INK, LIGHT_BLUE, MUTED, SERIES_COLORS, SMALL
from .picture import Picture, add_key, label_ends, new_figure


def bars(values: Mapping[str, float], xlabel: str, title: str = "") -> Picture:
    """Draw horizontal bars from top to bottom, the first one highlighted."""
    figure, (ax,) = new_figure(0.32 * len(values) + 1.1, title=title)
    names = list(values)
    colors = [BLUE] + [LIGHT_BLUE] * (len(names) - 1)
    drawn = ax.barh(names, list(values.values()), color=colors)
    ax.bar_label(drawn, labels=_equally_precise(values.values()), padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(xlabel)
    # Tests compare stored outputs with new ones, and more decimals would differ between processors.
    listed = ", ".join(f"{name} {_to_hundredths(value)}" for name, value in values.items())
    return Picture(figure, f"Bar chart, {title or xlabel}: {listed}.")


def _equally_precise(values: Collection[float]) -> list[str]:
    """Return the values with the decimals that give the largest one three digits."""
    largest = max(map(abs, values), default=0)
    decimals = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
    least = 10**-decimals
    return [f"under {least:g}" if 0 < value < least else f"{value:,.{decimals}f}" for value in values]


def _to_hundredths(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "under 0.01" if 0 < value < 0.005 else f"{value:,.2f}"


def lines(
    series: Mapping[str, tuple[Sequence, Sequence]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    xscale: str = "linear",
    dashed: Collection[str] = (),
    measured: Mapping[str, tuple[Sequence, Sequence]] | None = None,
    rings: Mapping[str, int] | None = None,
) -> Picture:
    """Draw a line for each named (xs, ys), at most four, with its name at its end.

    Args:
        series: xs and ys for each name. A y is a number, or a list of measurements: then the line goes through their
            medians, and a band spans the middle half of them.
        xlabel, ylabel, title: the labels of the axes and the title of the picture.
        xscale: "linear", or "log2" for xs that double.
        dashed: the names of series that are not measured, for example bounds; they are dashed and have no markers.
        measured: (xs, ys) to compare with the series of that name, drawn as large hollow markers.
        rings: the index of the knee of a series, which a ring marks.
    """
    figure, (ax,) = new_figure(3.6, title=title)
    ends, described = [], []
    for (name, (xs, ys)), color, marker in zip(series.items(), SERIES_COLORS, "os^D", strict=False):
        if isinstance(ys[0], Sequence):
            low, ys, high = ([percentile(many, percent) for many in ys] for percent in (25, 50, 75))
            ax.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
        look = {"marker": marker if len(xs) <= 40 else "", "markersize": 3.5, "linewidth": 1.4}
        if name in dashed:
            look = {"linestyle": "--", "linewidth": 1.1}
        ax.plot(xs, ys, color=color, label=name, **look)
        ends.append((xs[-1], ys[-1], name, color))
        peak = f", at most {max(ys):.3g}" if max(ys) > max(ys[0], ys[-1]) else ""
        described.append(f"{name} from {ys[0]:.3g} to {ys[-1]:.3g}{peak}")
        if measured and name in measured:
            ax.plot(*measured[name], marker, color=color, markersize=9, fillstyle="none")
            many = zip(*measured[name], strict=True)
            described.append(f"{name}, measured: {', '.join(f'{y:.3g} at {x:.3g}' for x, y in many)}")
        if rings and name in rings:
            knee = xs[rings[name]], ys[rings[name]]
            ax.plot(*knee, "o", color=INK, markersize=14, fillstyle="none")
            ax.annotate("knee", knee, (0, -19), textcoords="offset points", ha="center")
            described.append(f"knee of {name} at {knee[0]:.3g} and {knee[1]:.3g}")
    if measured:
        shape = {"linestyle": "", "marker": "o", "markersize": 9, "fillstyle": "none", "color": GRAY}
        add_key(figure, {"large and hollow: measured": Line2D([], [], **shape)})
    if xscale == "log2":
        ax.set_xscale("log", base=2)
        ticks = sorted({x for xs, _ in series.values() for x in xs})
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(axis="y")
    ax.set_ylim(bottom=0)
    label_ends(figure, ax, ends)
    return Picture(figure, f"Line plot of {ylabel} over {xlabel}: {'; '.join(described)}.")


def grouped_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    line: tuple[float, str] | None = None,
) -> Picture:
    """Draw vertical bars in groups, one bar per series in each group, each with its value on top.

    Args:
        groups: the names of the groups.
        series: for each series, at most seven, one value per group.
        xlabel, ylabel, title: the labels of the axes and the title of the picture.
        line: a value to compare the bars with, drawn as a horizontal line, and its name.
    """
    figure, (ax,) = new_figure(3.9, title=title)
    width = 0.84 / len(series)
    whole = all(isinstance(value, int) for values in series.values() for value in values)
    for number, ((name, values), color) in enumerate(zip(series.items(), SERIES_COLORS, strict=False)):
        centers = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = ax.bar(centers, values, 0.92 * width, color=color, label=name)
        ax.bar_label(drawn, fmt="%d" if whole else "%.1f", padding=2, fontsize=SMALL)
    if line:
        ax.axhline(line[0], color=INK, linestyle="--", linewidth=1, zorder=0)
        ax.annotate(f"{line[1]}: {line[0]:g}", (-0.42, line[0]), (0, 4), textcoords="offset points")
    ax.set_xticks(range(len(groups)), groups)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    add_key(figure, dict(zip(series, SERIES_COLORS, strict=False)), 2)
    listed = "; ".join(f"{name}: {', '.join(f'{value:.2f}' for value in values)}" for name, values in series.items())
    return Picture(figure, f"Bars of {ylabel} by {xlabel} ({', '.join(groups)}). {listed}.")


def tradeoff(points: Mapping[str, tuple[float, float]], xlabel: str, ylabel: str, title: str = "") -> Picture:
    """Draw a named point for each of at most four configurations on two axes; on both, less is better."""
    figure, (ax,) = new_figure(3.8, title=title)
    for (name, (x, y)), color, marker in zip(points.items(), SERIES_COLORS, "soD^", strict=False):
        ax.plot(x, y, marker, color=color, markersize=9)
        ax.annotate(name, (x, y), xytext=(9, 5), textcoords="offset points")
    ax.set(xlim=(0, 1.3 * max(x for x, _ in points.values())), ylim=(0, 1.2 * max(y for _, y in points.values())))
    ax.text(0.01, 0.02, "↙ better", transform=ax.transAxes, color=MUTED)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid()
    listed = "; ".join(f"{name} at {x:.3g} and {y:.3g}" for name, (x, y) in points.items())
    return Picture(figure, f"Points by {xlabel} and {ylabel}: {listed}.")


def throughput_latency(
    batch_sizes: Sequence[int], throughput: Sequence[float], latency: Sequence[float], title: str = ""
) -> Picture:
    """Draw the latency of a batch against its throughput, one point per batch size.

    Args:
        batch_sizes: rows of each batch, in ascending order.
        throughput: output tokens per second of each batch.
        latency: seconds until each batch finishes.
    """
    figure, (ax,) = new_figure(3.9, title=title)
    ax.plot(throughput, latency, color=BLUE, marker="o", linewidth=1.2)
    for size, x, y in zip(batch_sizes, throughput, latency, strict=True):
        text = f"{size} row{'s' * (size != 1)}" if size in (batch_sizes[0], batch_sizes[-1]) else str(size)
        ax.annotate(text, (x, y), (-4, 7), textcoords="offset points", ha="right")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.margins(x=0.12)
    ax.set(ylim=(0, 1.15 * max(latency)), xlabel="throughput (output tokens per second, log scale)")
    ax.set_ylabel("latency (seconds until the batch finishes)")
    ax.grid()
    alt = (
        f"Latency against throughput for batch sizes {batch_sizes[0]} to {batch_sizes[-1]}: throughput goes from "
        f"{throughput[0]:.0f} to {throughput[-1]:.0f} tokens per second, latency from {latency[0]:.2g} to "
        f"{latency[-1]:.2g} seconds."
    )
    return Picture(figure, alt)


def missed_requests(
    fleets: Mapping[str, Mapping[int, float]], promises: Sequence[float] = (0.9, 0.99, 0.999), title: str = ""
) -> Picture:
    """Draw the share of requests that miss a limit over the number of replicas, on a log scale.

    Args:
        fleets: for each load, at most four, the share that misses a limit by the number of replicas.
        promises: shares of requests that are promised to be within the limits; a dashed line for each, and a ring
            around the smallest fleet that keeps it.
    """
    figure, (ax,) = new_figure(3.9, title=title)
    floor = (1 - max(promises)) / 4  # where a fleet is drawn that misses nothing
    described, ends = [], []
    for (name, shares), color, marker in zip(fleets.items(), SERIES_COLORS, "os^D", strict=False):
        sizes = sorted(shares)
        heights = [max(floor, shares[size]) for size in sizes]
        ax.plot(sizes, heights, color=color, marker=marker, markersize=4, linewidth=1.4)
        ends.append((sizes[-1], heights[-1], name, color))
        kept = []
        for promise in promises:
            enough = [size for size in sizes if 1 - shares[size] >= promise]
            if enough:
                ax.plot(enough[0], max(floor, shares[enough[0]]), "o", color=color, markersize=12, fillstyle="none")
                kept.append(f"{enough[0]} for {promise:.1%}")
        described.append(f"{name}: smallest fleets {', '.join(kept) or 'none'}")
    tried = [size for shares in fleets.values() for size in shares]
    least, most = min(tried), max(tried)
    for promise in promises:
        ax.hlines(1 - promise, least - 1.2, most, color=GRAY, linewidth=0.8, linestyle="--", zorder=0)
        style = {"textcoords": "offset points", "fontsize": SMALL, "color": MUTED}
        ax.annotate(f"{100 * promise:g}% promised", (least - 1.2, 1 - promise), (3, 3), **style)
    ax.set(yscale="log", ylim=(floor, 1.3))
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.3%}".rstrip("0%").rstrip(".") + "%")
    ax.set_xticks(range(least, most + 1))
    ax.set_xlim(least - 1.2, most + 0.4)  # room for the names of the promises
    ax.set_xlabel("replicas (a ring: the smallest fleet that keeps a promise)")
    ax.set_ylabel("requests that miss a limit (log scale)")
    label_ends(figure, ax, ends)
    return Picture(figure, f"Share of requests that miss a limit over the number of replicas. {'; '.join(described)}.")
