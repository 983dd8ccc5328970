"""What the rows of a batch do, iteration by iteration, and whom that keeps waiting."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..metrics import RequestMetrics, percentile
from ..trace import WORK, Trace
from .picture import BLUE, GRAY, GREEN, INK, RED, SKY, WORK_COLORS, WORK_MEANING, Picture, new_figure


def slot_timeline(traces: Mapping[str, Trace]) -> Picture:
    """What every row did in every forward pass, for each named trace, on one common axis.

    Decoding requests that follow each other in a row are drawn in two blues, so that one can see them change.
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
        f"{title}: {trace.forward_passes} forward passes on {trace.rows} rows; "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(trace.work.items()))
        for title, trace in traces.items()
    ]
    return Picture(figure, f"Timeline of rows, slot-steps by kind. {'; '.join(described)}.")


def runs_of(trace: Trace, row: int) -> Iterable[tuple[int, int, str, int]]:
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
    described = "; ".join(f"{name}: {dict(sorted(trace.work.items()))}" for name, trace in traces.items())
    return Picture(figure, f"Stacked bars of slot-steps. {described}.")


def who_waits(
    named: Mapping[str, Sequence[RequestMetrics]], groups: Mapping[str, Collection[Hashable]], unit: str = "seconds"
) -> Picture:
    """A mark for each request at its end-to-end latency, a panel for each policy; dashed lines are medians.

    Args:
        named: the requests' metrics under each policy.
        groups: which request ids belong together; each group has a colour and a marker.
        unit: of the latencies.
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
    figure, axes = new_figure(9, 1.5 * len(traces) + 0.7, len(traces), sharex=True, sharey=True)
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


def padding(named: Mapping[str, tuple[Sequence[int], Sequence[int]]], ylabel: str) -> Picture:
    """What each forward pass did for the requests and what it did for padding, on top of each other: a panel a run.

    Args:
        named: for each run, useful counts and padding counts, one a pass.
        ylabel: what was counted.
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
        described.append(f"{title}: {sum(useful):,} of the requests' own and {sum(pads):,} of padding")
    axes[-1].set_xlabel("forward pass")
    handles = [
        Patch(facecolor=BLUE, label="of the requests' own tokens"),
        Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="of padding"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return Picture(figure, f"Areas over forward passes, {ylabel}. {'; '.join(described)}.")
