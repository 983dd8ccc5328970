"""Bar charts, line plots and scatter plots, for numbers of any kind."""

from collections.abc import Mapping, Sequence

from ..metrics import RequestMetrics
from .picture import BLUE, GRAY, GREEN, INK, ORANGE, PALE, PURPLE, RED, REQUEST_COLORS, SKY, Picture, new_figure


def bars(values: Mapping[str, float], xlabel: str, title: str = "") -> Picture:
    """Draw horizontal bars from top to bottom, the first one highlighted."""
    figure, (ax,) = new_figure(7, 0.34 * len(values) + 1.1)
    names = list(values)
    colors = [BLUE] + [SKY] * (len(names) - 1)
    drawn = ax.barh(names, list(values.values()), color=colors)
    ax.bar_label(drawn, fmt="%.3g", padding=3, fontsize=9)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set_xlabel(xlabel)
    ax.set_title(title, loc="left", fontsize=11)
    # Tests compare stored outputs with new ones, and more decimals would differ between processors.
    listed = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    return Picture(figure, f"Bar chart, {title or xlabel}: {listed}.")


def lines(series: Mapping[str, tuple[Sequence, Sequence]], xlabel: str, ylabel: str, title: str = "") -> Picture:
    """Draw a line with markers for each named (xs, ys), at most four."""
    figure, (ax,) = new_figure(7.5, 3.6)
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
    figure, (ax,) = new_figure(9, 3.8)
    width = 0.84 / len(series)
    for number, ((name, values), color) in enumerate(zip(series.items(), REQUEST_COLORS, strict=False)):
        centers = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = ax.bar(centers, values, 0.92 * width, color=color, label=name)
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


def tradeoff(points: Mapping[str, tuple[float, float]], xlabel: str, ylabel: str) -> Picture:
    """Draw a named point for each of at most four configurations on two axes; on both, less is better."""
    figure, (ax,) = new_figure(6.5, 3.8)
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


def throughput_latency(batch_sizes: Sequence[int], throughput: Sequence[float], latency: Sequence[float]) -> Picture:
    """Draw tokens per second (left axis) and seconds until a batch finishes (right axis) over the batch size."""
    figure, (left,) = new_figure(7.5, 3.8)
    right = left.twinx()
    (first,) = left.plot(batch_sizes, throughput, color=BLUE, marker="o", label="throughput (left)")
    (second,) = right.plot(batch_sizes, latency, color=RED, marker="s", linestyle="--", label="latency (right)")
    left.set_xscale("log", base=2)
    left.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
    left.set_xlabel("batch size (rows)")
    left.set_ylabel("throughput (output tokens per second)", color=BLUE)
    right.set_ylabel("latency (seconds until the batch finishes)", color=RED)
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.legend(handles=[first, second], frameon=False, loc="upper left")
    alt = (
        f"Two curves over batch sizes {batch_sizes[0]} to {batch_sizes[-1]}: throughput goes from {throughput[0]:.0f} "
        f"to {throughput[-1]:.0f} tokens per second, latency from {latency[0]:.2g} to {latency[-1]:.2g} seconds."
    )
    return Picture(figure, alt)


def latencies(named: Mapping[str, Sequence[RequestMetrics]]) -> Picture:
    """Draw a marker at the end-to-end latency of every request, for at most four runs.

    Request ids must be numbers in order of arrival.
    """
    figure, (ax,) = new_figure(8, 3.4)
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
