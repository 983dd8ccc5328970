"""Bar charts, line plots and scatter plots, for numbers of any kind."""

from collections.abc import Collection, Mapping, Sequence

from matplotlib.lines import Line2D

from .colors import BLUE, GRAY, INK, LIGHT_BLUE, SERIES_COLORS
from .picture import Picture, add_key, label_ends, new_figure


def bars(values: Mapping[str, float], xlabel: str, title: str = "") -> Picture:
    """Draw horizontal bars from top to bottom, the first one highlighted."""
    figure, (ax,) = new_figure(0.32 * len(values) + 1.1, title=title)
    names = list(values)
    colors = [BLUE] + [LIGHT_BLUE] * (len(names) - 1)
    drawn = ax.barh(names, list(values.values()), color=colors)
    labels = [f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for value in values.values()]
    ax.bar_label(drawn, labels=labels, padding=3)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(xlabel)
    # Tests compare stored outputs with new ones, and more decimals would differ between processors.
    listed = ", ".join(f"{name} {_to_hundredths(value)}" for name, value in values.items())
    return Picture(figure, f"Bar chart, {title or xlabel}: {listed}.")


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
    yscale: str = "linear",
    dashed: Collection[str] = (),
    measured: Mapping[str, tuple[Sequence, Sequence]] | None = None,
    rings: Mapping[str, int] | None = None,
) -> Picture:
    """Draw a line for each named (xs, ys), at most four, with its name at its end.

    Args:
        series: xs and ys for each name.
        xlabel, ylabel, title: the labels of the axes and the title of the picture.
        xscale: "linear", or "log2" for xs that double.
        yscale: "linear" from 0 on, or "log".
        dashed: the names of series that are not measured, for example bounds; they are dashed and have no markers.
        measured: (xs, ys) to compare with the series of that name, drawn as large hollow markers.
        rings: the index of the knee of a series, which a ring marks.
    """
    figure, (ax,) = new_figure(3.6, title=title)
    ends, described = [], []
    for (name, (xs, ys)), color, marker in zip(series.items(), SERIES_COLORS, "os^D", strict=False):
        look = {"marker": marker if len(xs) <= 40 else "", "markersize": 3.5, "linewidth": 1.4}
        if name in dashed:
            look = {"linestyle": "--", "linewidth": 1.1}
        ax.plot(xs, ys, color=color, label=name, **look)
        ends.append((xs[-1], ys[-1], name, color))
        peak = f", at most {max(ys):.3g}" if max(ys) > max(ys[0], ys[-1]) else ""
        line = f"from {ys[0]:.3g} to {ys[-1]:.3g}{peak}" if len(xs) > 1 else f"at {xs[0]:.3g} and {ys[0]:.3g}"
        described.append(f"{name} {line}")
        if measured and name in measured:
            ax.plot(*measured[name], marker, color=color, markersize=9, fillstyle="none")
            points = zip(*measured[name], strict=True)
            described.append(f"{name}, measured: {', '.join(f'{y:.3g} at {x:.3g}' for x, y in points)}")
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
    if yscale == "log":
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
    else:
        ax.set_ylim(bottom=0)
    label_ends(figure, ax, ends)
    return Picture(figure, f"Line plot of {ylabel} over {xlabel}: {'; '.join(described)}.")


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
