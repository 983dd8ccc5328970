"""A server under load: one request, all requests of a load test, and a sweep over rates."""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ..metrics import RequestMetrics, knee
from .colors import BLUE, GRAY, INK, LINE, ORANGE, PALE, SERIES_COLORS, SMALL
from .picture import Picture, add_key, draw_arrow, label_ends, new_figure


def request_timeline(request: RequestMetrics, title: str = "") -> Picture:
    """Draw one request from its intended send time to its last token, with its latencies as arrows.

    Args:
        request: a request with at least one token. If it has an attribute `sent`, the actual send time is also marked.
    """
    sent = getattr(request, "sent", request.arrival)
    start, *times = (1000 * (time - request.arrival) for time in (sent, *request.token_times))
    figure, (ax,) = new_figure(2.8, title=title)
    ax.plot([0, times[-1]], [0, 0], color=GRAY, linewidth=1, zorder=0)
    marks = [(0, "|", INK, 16, "due"), (times[0], "D", ORANGE, 8, "first token")]
    if start > 0.06 * times[-1]:
        marks.append((start, ">", GRAY, 7, "sent"))
    for x, marker, color, size, name in marks:
        ax.plot(x, 0, marker, color=color, markersize=size, markeredgewidth=2 if marker == "|" else 1)
        ax.text(x, -0.4, name, ha="left" if x == 0 else "center", va="top", fontsize=SMALL)
    ax.plot(times[1:], [0] * len(times[1:]), "o", color=BLUE, markersize=5)
    if len(times) > 2:
        ax.text(times[-1], -0.4, "later tokens", ha="right", va="top", fontsize=SMALL)
    spans = [("TTFT", 0, times[0], 2), ("E2E", 0, times[-1], 3)]
    if len(times) > 1:
        gap = max(range(1, len(times)), key=lambda number: times[number] - times[number - 1])
        spans.append(("longest gap (ITL)", times[gap - 1], times[gap], 1))
    for name, left, right, height in spans:
        ax.vlines([left, right], 0, height, color=PALE, zorder=0)
        draw_arrow(ax, (right, height), (left, height), "<->", linewidth=0.7)
        # A text that is wider than its arrow ends where the arrow ends, inside the picture.
        side, x = ("right", right) if left > 0.6 * times[-1] else ("center", (left + right) / 2)
        ax.text(x, height + 0.12, f"{name} {right - left:.0f} ms", ha=side, fontsize=SMALL)
    ax.set(ylim=(-1.1, 3.7), yticks=[])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("milliseconds since the request was due")
    listed = "; ".join(f"{name} {right - left:.0f} ms" for name, left, right, _ in spans)
    alt = f"Timeline of a request with {len(times)} chunks of tokens, sent after {start:.0f} ms: {listed}."
    return Picture(figure, alt)


def load_run(result, title: str = "") -> Picture:
    """Draw a line for each request of a load test, from its intended send time to its end. This makes queues visible.

    Args:
        result: a `LoadResult` of the load generator.
    """
    figure, (ax,) = new_figure(4, title=title)
    for request in result.requests:
        y = request.request_id
        if request.status == "ok":
            ax.hlines(y, request.arrival, request.token_times[0], color=LINE, linewidth=1.6)
            ax.hlines(y, request.token_times[0], request.ended, color=BLUE, linewidth=1.6)
        else:
            ax.plot(request.ended, y, "x", color=INK, markersize=4)
    ax.invert_yaxis()
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlim=(0, None), xlabel="seconds since the first request was due", ylabel="request, in order of arrival")
    meanings = {"waits for the first token": LINE, "receives tokens": BLUE}
    key = {meaning: Line2D([], [], color=color, linewidth=3) for meaning, color in meanings.items()}
    if len(result.ok) < len(result.requests):
        key["refused or failed"] = Line2D([], [], linestyle="", marker="x", color=INK)
    add_key(figure, key)
    count = len(result.requests)
    alt = f"A line for each of {count} requests, {len(result.ok)} of them completed, in {result.duration:.2f} s."
    if result.ok:
        first, last = (f"{1000 * result.percentile(name, 50):.0f} ms" for name in ("ttft", "e2e"))
        alt += f" Median TTFT {first}, median end-to-end latency {last}."
    return Picture(figure, alt)


def load_sweep(named: Mapping[str, Sequence]) -> Picture:
    """Draw latency over throughput, one curve per server: flat while more load adds throughput, then steep.

    The upper panel shows the end-to-end latency, the lower one the time to first token. Solid lines are medians, and
    dashed lines are 99th percentiles. A ring marks the knee: the greatest ratio of request throughput to the median
    end-to-end latency (see `metrics.knee`).

    Args:
        named: for each server, at most four, the results of a sweep: one `LoadResult` per rate.
    """
    figure, axes = new_figure(6, 2, sharex=True)
    ends: list[list] = [[], []]
    described = []
    for (name, results), color, marker in zip(named.items(), SERIES_COLORS, "osD^", strict=False):
        results = [result for result in sorted(results, key=lambda result: result.rate) if result.ok]
        best = results[knee([(result.request_throughput, result.percentile("e2e", 50)) for result in results])]
        throughput = [result.output_throughput for result in results]
        for ax, latency, names in zip(axes, ("e2e", "ttft"), ends, strict=True):
            for percent, style, kind in ((50, "-", "median"), (99, "--", "p99")):
                values = [result.percentile(latency, percent) for result in results]
                ax.plot(throughput, values, style, color=color, marker=marker, markersize=4, linewidth=1.2)
                names.append((throughput[-1], values[-1], f"{name}, {kind}", color))
            point = best.output_throughput, best.percentile(latency, 50)
            ax.plot(*point, "o", color=INK, markersize=13, fillstyle="none")
            text = f"knee: {best.rate:.3g}/s"
            ax.annotate(text, point, (0, -17), textcoords="offset points", ha="center", fontsize=SMALL)
        medians = [result.percentile("e2e", 50) for result in results]
        described.append(
            f"{name}: rates {results[0].rate:.3g} to {results[-1].rate:.3g}/s, at most {max(throughput):.3g} tokens/s, "
            f"median end-to-end latency {medians[0]:.2g} to {medians[-1]:.2g} s, knee at {best.rate:.3g}/s with "
            f"{best.output_throughput:.3g} tokens/s and {best.percentile('e2e', 50):.2g} s"
        )
    for ax, label in zip(axes, ("end-to-end latency (seconds)", "time to first token (seconds)"), strict=True):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.margins(y=0.15)
        ax.set_ylabel(label)
        ax.grid()
    axes[-1].set(xlim=(0, None), xlabel="throughput (output tokens per second)")
    for ax, names in zip(axes, ends, strict=True):
        label_ends(figure, ax, names)
    return Picture(figure, f"Latency over throughput. {'; '.join(described)}.")
