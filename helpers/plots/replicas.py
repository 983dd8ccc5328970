"""Pictures of many replicas: which prefixes each one computes, its work over time, and streams that survive.

A replica keeps its color: the colors of the requests would say something else here.
"""

from collections.abc import Hashable, Mapping, Sequence

from .colors import GRAY, INK, PALE, REQUEST_COLORS, SMALL, ink_on, shade
from .picture import Picture, add_key, draw_box, name_lanes, new_figure, set_panel_title, write


def prefix_map(runs: Mapping[str, Sequence[Sequence[int]]], title: str = "") -> Picture:
    """Draw how many requests with each prefix each replica got; a filled cell is a prefix that the replica computes.

    Args:
        runs: for each run a row per replica with a number of requests per prefix, [replicas, prefixes].
    """
    most = max(len(rows) for rows in runs.values())
    figure, axes = new_figure((0.32 * most + 0.75) * len(runs) + 0.3, len(runs), title)
    described = []
    for ax, (name, rows) in zip(axes, runs.items(), strict=True):
        for y, row in enumerate(rows):
            color = _color(y)
            for x, count in enumerate(row):
                face = color if count else PALE
                draw_box(ax, x + 0.03, y + 0.06, 0.94, 0.88, face)
                if count:
                    write(ax, x + 0.5, y + 0.5, str(count), SMALL, color=ink_on(color))
        computed = sum(count > 0 for row in rows for count in row)
        set_panel_title(ax, f"{name}: {computed} filled cells")
        name_lanes(ax, range(len(rows)), "replica")
        ax.set_xlim(0, len(rows[0]))
        ax.set_xticks([x + 0.5 for x in range(len(rows[0]))], [str(x) for x in range(len(rows[0]))])
        described.append(
            f"{name}: {computed} filled cells; requests per replica {', '.join(str(sum(r)) for r in rows)}"
        )
    axes[-1].set_xlabel("prefix (in a cell: the requests with it)")
    return Picture(figure, f"A row per replica and a column per prefix. {'. '.join(described)}.")


def replica_work(runs: Mapping[str, Sequence[Sequence[int]]], top: int, title: str = "") -> Picture:
    """Draw how many tokens each replica computed in each iteration.

    Args:
        runs: for each run a row per iteration with the tokens of each replica, [iterations, replicas].
        top: the tokens that fill the height of a lane; more of them look the same.
    """
    lanes = sum(len(work[0]) for work in runs.values())
    figure, axes = new_figure(0.38 * lanes + 0.75 * len(runs) + 0.3, len(runs), title, sharex=True)
    described = []
    for ax, (name, work) in zip(axes, runs.items(), strict=True):
        totals = []
        for lane, tokens in enumerate(zip(*work, strict=True)):
            heights = [lane + 0.94 - 0.88 * min(1, count / top) for count in tokens]
            steps = range(len(heights) + 1)
            ax.fill_between(steps, [*heights, heights[-1]], lane + 0.94, step="post", color=_color(lane), linewidth=0)
            ax.axhline(lane + 0.94, color=GRAY, linewidth=0.6)
            totals.append(f"{sum(tokens):,}")
        name_lanes(ax, range(len(work[0])), "replica")
        set_panel_title(ax, f"{name}: {len(work)} iterations")
        described.append(f"{name}: {len(work)} iterations; tokens per replica {', '.join(totals)}")
    axes[-1].set(xlim=(0, max(map(len, runs.values()))), xlabel=f"iteration (a full lane is {top} tokens or more)")
    return Picture(figure, f"A lane per replica with the tokens of each iteration. {'. '.join(described)}.")


def resumed_streams(
    streams: Mapping[Hashable, Sequence[tuple[int, int, int]]], lost: Mapping[int, int], title: str = ""
) -> Picture:
    """Draw from which replica the tokens of each stream came, and when.

    Args:
        streams: for each request its outputs in order: (iteration, replica, number of tokens).
        lost: the replica that was lost before an iteration, by the number of the iteration.
    """
    figure, (ax,) = new_figure(0.3 * len(streams) + 1.6, title=title)
    last = max(step for outputs in streams.values() for step, _, _ in outputs)
    described = []
    for y, (name, outputs) in enumerate(streams.items()):
        draw_box(ax, 0, y + 0.06, outputs[-1][0] + 1, 0.88, PALE)
        for step, replica, _ in outputs:
            draw_box(ax, step + 0.06, y + 0.06, 0.88, 0.88, _color(replica))
        path = list(dict.fromkeys(replica for _, replica, _ in outputs))
        tokens = sum(number for _, _, number in outputs)
        described.append(f"{name}: {tokens} tokens from replica {' and then '.join(map(str, path))}")
    for step, replica in lost.items():
        ax.axvline(step, color=INK, linewidth=1.4, linestyle=(0, (3, 2)))
        style = {"textcoords": "offset points", "color": INK, "annotation_clip": False}
        ax.annotate(f"replica {replica} is lost", (step, 0), (3, 4), **style)
    ax.set(xlim=(0, last + 1), xlabel="iteration")
    name_lanes(ax, streams, "request")
    replicas = sorted({replica for outputs in streams.values() for _, replica, _ in outputs})
    key = {f"token from replica {replica}": _color(replica) for replica in replicas}
    add_key(figure, key | {"no token": PALE}, columns=2)
    lost = ", ".join(f"replica {replica} before iteration {step}" for step, replica in lost.items())
    return Picture(figure, f"A row per request and a column per iteration. Lost: {lost}. {'; '.join(described)}.")


def _color(replica: int) -> str:
    return shade(REQUEST_COLORS[replica % 7], 0.8)
