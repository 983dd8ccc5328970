"""A server under load: one request, and all requests of a load test."""

from matplotlib.lines import Line2D

from ..metrics import RequestMetrics
from .colors import BLUE, GRAY, INK, LINE, ORANGE, PALE, SMALL
from .picture import Picture, add_key, draw_arrow, new_figure


def request_timeline(request: RequestMetrics, title: str = "") -> Picture:
    """Draw one request from its intended send time to its last token, with its latencies as arrows.

    Args:
        request: a request with at least one token. If it has an attribute `sent`, the text says when that was.
    """
    sent = getattr(request, "sent", request.arrival)
    start, *times = (1000 * (time - request.arrival) for time in (sent, *request.token_times))
    figure, (ax,) = new_figure(2.8, title=title)
    ax.plot([0, times[-1]], [0, 0], color=GRAY, linewidth=1, zorder=0)
    marks = [(0, "|", INK, 16, "due"), (times[0], "D", ORANGE, 8, "first token")]
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
