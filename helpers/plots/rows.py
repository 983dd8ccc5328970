"""Pictures of what the rows of a batch do in each iteration, and of how long requests wait."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..metrics import RequestMetrics, percentile
from ..trace import WORK, Trace
from .picture import BLUE, GRAY, GREEN, INK, RED, SKY, WORK_COLORS, WORK_MEANING, Picture, new_figure


def slot_timeline(traces: Mapping[str, Trace]) -> Picture:
    """Draw what every row did in every forward pass, with one panel per trace on a common axis.

    Two alternating blues mark the decodes of consecutive requests on a row, to show where one follows another.
    """
    longest = max(trace.forward_passes for trace in traces.values())
    rows = sum(trace.rows for trace in traces.values())
    figure, axes = new_figure(10, 0.22 * rows + 0.75 * len(traces) + 0.5, len(traces), sharex=True)
    for ax, (title, trace) in zip(axes, traces.items(), strict=True):
        for row in range(trace.rows):
            for start, length, work, nth in runs_of(trace, row):
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
        f"{title}: {trace.forward_passes} forward passes on {trace.rows} rows; {_counts(trace)}"
        for title, trace in traces.items()
    ]
    return Picture(figure, f"Timeline of rows, slot-steps by kind. {'; '.join(described)}.")


def runs_of(trace: Trace, row: int) -> Iterable[tuple[int, int, str, int]]:
    """Yield the stretches of iterations in which a row's request and work stay the same.

    Yields:
        (start, length, work, number of the row's latest request) for each stretch; the number is -1 before the first.
    """
    start, last, nth = 0, None, -1
    for index, iteration in enumerate([*trace.passes, None]):
        row_step = iteration.row_steps[row] if iteration else None
        key = (row_step.work, row_step.request_id) if row_step else None
        if key != last:
            if last is not None:
                yield start, index - start, last[0], nth
            if key is not None and key[1] is not None and (last is None or key[1] != last[1]):
                nth += 1
            start, last = index, key


def work_bars(traces: Mapping[str, Trace]) -> Picture:
    """Draw how the slot-steps of each trace were spent, as one stacked bar per trace."""
    figure, (ax,) = new_figure(9, 0.5 * len(traces) + 1.5)
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
    described = "; ".join(f"{name}: {_counts(trace)}" for name, trace in traces.items())
    return Picture(figure, f"Stacked bars of slot-steps. {described}.")


def _counts(trace: Trace) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(trace.work.items()))


def who_waits(
    named: Mapping[str, Sequence[RequestMetrics]], groups: Mapping[str, Collection[Hashable]], unit: str = "seconds"
) -> Picture:
    """Draw a marker at the end-to-end latency of each request, with a panel per policy. Dashed lines are medians.

    Args:
        named: the metrics of the requests under each policy.
        groups: the request ids of each group, at most three; each group has its own colour and marker.
        unit: the unit of the latencies.
    """
    figure, axes = new_figure(8, 1.15 * len(named) + 0.9, len(named), sharex=True, sharey=True)
    looks = list(zip(groups.items(), (BLUE, RED, GREEN), "osD", strict=False))
    described = []
    for ax, (title, metrics) in zip(axes, named.items(), strict=True):
        height: Counter = Counter()
        for (group, ids), color, marker in looks:
            values = sorted(one.e2e for one in metrics if one.request_id in ids)
            for value in values:
                ax.plot(value, height[value] + 0.6, marker, color=color, markersize=4.5)
                height[value] += 1
            median = percentile(values, 50)
            ax.axvline(median, color=color, linestyle="--", linewidth=1, zorder=0)
            described.append(f"{title}, {group}: {values[0]:.3g} to {values[-1]:.3g}, median {median:.3g}")
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
    """Draw how many tokens each forward pass read: those of decodes below, and those of prefills on top.

    Args:
        traces: the runs, one panel each.
        first, last: the first and the last pass to draw.
    """
    figure, axes = new_figure(9, 1.5 * len(traces) + 0.7, len(traces), sharex=True, sharey=True)
    described = []
    for ax, (title, trace) in zip(axes, traces.items(), strict=True):
        shown = trace.passes[first : None if last is None else last + 1]
        totals, prompts = [0] * len(shown), 0
        for kind in ("decode", "prefill"):
            read = [sum(row.tokens for row in one.row_steps if row.work == kind) for one in shown]
            ax.bar(range(first, first + len(read)), read, bottom=totals, width=0.85, color=WORK_COLORS[kind])
            totals = [below + more for below, more in zip(totals, read, strict=True)]
            prompts = sum(tokens > 0 for tokens in read)  # those of the last kind, prefill
        described.append(f"{title}: at most {max(totals)} per pass, passes with prompt tokens: {prompts}")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_ylabel("tokens read")
    axes[-1].set_xlabel("forward pass")
    handles = [Patch(facecolor=WORK_COLORS[kind], label=f"tokens of a {kind}") for kind in ("prefill", "decode")]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return Picture(figure, f"Bars of the tokens that each forward pass read. {'; '.join(described)}.")


def padding(named: Mapping[str, tuple[Sequence[int], Sequence[int]]], ylabel: str) -> Picture:
    """Draw what each forward pass computed for requests and for padding, stacked, with one panel per run.

    Args:
        named: for each run, the useful and the padding count of each pass.
        ylabel: what is counted.
    """
    figure, axes = new_figure(9, 1.7 * len(named) + 0.7, len(named))
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
        described.append(f"{title}: {sum(useful):,} for the requests' tokens and {sum(pads):,} for padding")
    axes[-1].set_xlabel("forward pass")
    handles = [
        Patch(facecolor=BLUE, label="for the requests' tokens"),
        Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="for padding"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return Picture(figure, f"Areas over forward passes, {ylabel}. {'; '.join(described)}.")
