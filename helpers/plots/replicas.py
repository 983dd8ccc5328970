"""Pictures of fleets: drawings of a router and a virtual clock, and charts of what replicas did.

In the charts, each replica has a color of its own, and colors do not stand for requests.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from matplotlib.patches import FancyBboxPatch

from .colors import GRAY, INK, PAGE, PALE, RED, REQUEST_COLORS, SMALL, ink_on, request_colors, shade
from .picture import Picture, add_key, draw_arrow, draw_box, name_lanes, new_figure, set_panel_title, write

FLEET = (("A, B", (0, 1, 2), (3, 4)), ("C", (5, None, None), ()))  # cached prefixes, the rows' requests, those waiting


def routed_fleet() -> Picture:
    """Draw a front end and three replicas: one has a prefix and a queue, one has a free row, and one has died."""
    figure, (ax,) = new_figure(4.1, title="One replica has the prefix, one has free rows, and one has died")
    ax.set_axis_off()
    _box(ax, 3.7, 3.2, 2.9, 4.2, "front end", PAGE)
    for y, text in ((4.2, "router: chooses\na replica"), (6.0, "dispatcher:\nreplica, tokens\nof each request")):
        write(ax, 5.15, y, text, SMALL)
    _request(ax, 0.3, 4.8, 6)
    write(ax, 0.75, 6.3, "prefix A", SMALL)
    write(ax, 0.75, 4.0, "client", SMALL)
    draw_arrow(ax, (1.3, 5.1), (3.65, 5.1), "<->")
    write(ax, 2.5, 4.6, "tokens", SMALL)
    states = []
    for number, (cached, rows, queue) in enumerate(FLEET):
        y = 3.6 * number
        _box(ax, 8.6, y, 4.1, 2.9, f"replica {number}", PAGE)
        for x, request in enumerate(rows):
            _request(ax, 9.25 + 0.95 * x, y + 0.45, request)
        for x, request in enumerate(queue):
            _request(ax, 13.2 + 0.95 * x, y + 0.45, request, GRAY)
        write(ax, 10.65, y + 2.2, f"cached: {cached}", SMALL)
        draw_arrow(ax, (6.65, 5.3), (8.55, y + 1.45), "<->")
        taken, waiting = sum(row is not None for row in rows), len(queue)
        states.append(f"Replica {number} has cached {cached}; rows taken: {taken} of 3, requests waiting: {waiting}.")
    write(ax, 14.1, 2.2, "waiting", SMALL)
    _box(ax, 8.6, 7.2, 4.1, 2.9, "replica 2 has died", PALE, RED)
    write(ax, 10.65, 8.65, "rows, queue and\ncache are lost", SMALL)
    draw_arrow(ax, (6.65, 5.3), (8.55, 8.65), "-", linestyle=(0, (2, 2)), color=RED)
    ax.set(xlim=(-0.3, 15.2), ylim=(10.3, -0.8))
    alt = f"A client's request 6, with prefix A, reaches a front end with a router and a dispatcher. {' '.join(states)}"
    return Picture(figure, f"{alt} Replica 2 has died, and its rows, queue and cache are lost.")


def virtual_clock(
    arrivals: Mapping[int, float], iterations: Sequence[tuple[float, float, Mapping[int, int]]], title: str = ""
) -> Picture:
    """Draw how iterations and idle times move a clock.

    Args:
        arrivals: the arrival of each request.
        iterations: (start, end, tokens of each request), in order of time.
    """
    figure, (ax,) = new_figure(0.45 * len(arrivals) + 1.9, title=title)
    colors, rows = request_colors(arrivals), {request: y for y, request in enumerate(arrivals, start=1)}
    for number, (start, end, tokens) in enumerate(iterations):
        draw_box(ax, start, 0.1, end - start, 0.8, PAGE, edgecolor=INK, linewidth=1)
        write(ax, (start + end) / 2, 0.5, str(number), SMALL)
        for request, count in tokens.items():
            face = shade(colors[request]) if count > 1 else colors[request]
            draw_box(ax, start, rows[request] + 0.1, end - start, 0.8, face, edgecolor=PAGE, linewidth=0.7)
            write(ax, (start + end) / 2, rows[request] + 0.5, str(count), SMALL, color=ink_on(face))
    jumps = []
    for (_, end, _), (start, _, _) in pairwise(iterations):
        if start > end:
            draw_arrow(ax, (end, 0.5), (start, 0.5), linestyle=(0, (3, 2)))
            write(ax, (start + end) / 2, 0.15, "jumps", SMALL)
            jumps.append(f"from {end:g} to {start:g}")
    for request, arrival in arrivals.items():
        begins = next(start for start, _, tokens in iterations if request in tokens)
        draw_box(ax, arrival, rows[request] + 0.35, begins - arrival, 0.3, GRAY)
        ax.plot(arrival, rows[request] + 0.5, marker=">", color=INK, markersize=7, clip_on=False, zorder=3)
    ax.set(xlim=(0, 1.01 * iterations[-1][1]), ylim=(len(arrivals) + 1, 0), xlabel="time on the virtual clock")
    ax.set_yticks([y + 0.5 for y in range(len(arrivals) + 1)], ["iteration", *(f"request {name}" for name in arrivals)])
    some = list(REQUEST_COLORS[:3])
    add_key(figure, {"prefill, with its tokens": [*map(shade, some)], "decode": some, "waits": GRAY})
    arrive = ", ".join(f"request {request} at {arrival:g}" for request, arrival in arrivals.items())
    ends = ", ".join(f"{end:g}" for _, end, _ in iterations)
    alt = f"Arrivals: {arrive}. {len(iterations)} iterations end at {ends}."
    return Picture(figure, f"{alt} The clock jumps {', '.join(jumps) or 'never'}.")


def _box(ax, x: float, y: float, wide: float, high: float, name: str, face: str, edge: str = INK) -> None:
    """Draw a box with its name above it."""
    look = {"facecolor": face, "edgecolor": edge, "linewidth": 1.2}
    ax.add_patch(FancyBboxPatch((x, y), wide, high, boxstyle="round,pad=0,rounding_size=0.25", **look))
    write(ax, x + wide / 2, y - 0.35, name, SMALL, weight="bold", color=edge)


def _request(ax, x: float, y: float, request: int | None, face: str = "") -> None:
    """Draw a request as a square with its number, or an empty row."""
    face = PALE if request is None else face or REQUEST_COLORS[request % 7]
    draw_box(ax, x, y, 0.85, 1.05, face, edgecolor=PAGE, linewidth=0.7)
    if request is not None:
        write(ax, x + 0.42, y + 0.52, str(request), color=ink_on(face))


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
