"""Pictures of a model on several workers: what each one has of a block, and what a split pass waits for."""

from collections.abc import Mapping, Sequence

from .colors import BLUE, GRAY, INK, LIGHT_BLUE, LINE, MUTED, ORANGE, PAGE, SMALL, ink_on
from .grids import set_up_grid
from .picture import Picture, add_key, draw_arrow, draw_box, new_figure, set_panel_title, write

WORKERS = (BLUE, ORANGE)
WAITS = (BLUE, ORANGE, LIGHT_BLUE)
ARROW = {"linewidth": 1, "mutation_scale": 9}


def split_block(title: str = "") -> Picture:
    """Draw one block of a transformer on two workers: attention above, the MLP below, and a sum after each."""
    figure, axes = new_figure(4.6 + 0.3 * bool(title), 2, title)
    set_up_grid(axes[0], 1, 1, "attention: its heads are shared out")
    _draw_pair(axes[0], (3, 2), 3, ("q, k, v", "output", "heads 0–2", "heads 3–4"))
    set_up_grid(axes[1], 1, 1, "MLP: its inner numbers are shared out")
    _draw_pair(axes[1], (1, 1), 1, ("in", "out", "half 0", "half 1"))
    alt = (
        "One block on two workers. Both have a copy of the input x. In attention, the matrix for queries, keys and "
        "values is split by columns: worker 0 has those of heads 0–2, worker 1 those of heads 3–4. The output "
        "matrix is split by rows, and the two partial results are added. In the MLP, the first matrix is split by "
        "columns, the second one by rows, and the partial results are added. After each sum, both workers have a copy."
    )
    return Picture(figure, alt)


def _draw_pair(ax, shares: tuple[int, int], parts: int, names: tuple[str, str, str, str]) -> None:
    """Draw a lane per worker: input, a matrix split by columns, its result, one split by rows, the partial result.

    Args:
        ax: the axes of the panel.
        shares: how much each worker has.
        parts: into how many equal parts the first matrix is divided before it is split.
        names: of the two matrices, and of what each worker has between them.
    """
    count = sum(shares)
    for lane, (own, color) in enumerate(zip(shares, WORKERS, strict=True)):
        start, top = sum(shares[:lane]), 1.5 * lane
        middle = top + 0.5
        _vector(ax, 0, middle, "x", GRAY)
        for left, width in ((1.75, 1.5), (5.75, 1.2)):
            draw_box(ax, left, top, width, 1, PAGE, edgecolor=LINE, linewidth=0.7)
        for part in range(parts):
            left, unit = 1.75 + part * 1.5 / parts, 1.5 / parts / count
            draw_box(ax, left + start * unit, top, own * unit, 1, color)
            if part:
                ax.vlines(left, top, top + 1, color=INK, linewidth=0.7)
        draw_box(ax, 3.85, middle - 0.14, 1.3, 0.28, PAGE, edgecolor=LINE, linewidth=0.7)
        draw_box(ax, 3.85 + 1.3 * start / count, middle - 0.14, 1.3 * own / count, 0.28, color)
        write(ax, 4.5, middle + 0.36, names[2 + lane], SMALL)
        draw_box(ax, 5.75, top + start / count, 1.2, own / count, color)
        _vector(ax, 7.55, middle, "part", color)
        _vector(ax, 10.0, middle, "sum", GRAY)
        for left, right in ((1.25, 1.7), (3.3, 3.8), (5.2, 5.7), (7.0, 7.5)):
            draw_arrow(ax, (left, middle), (right, middle), **ARROW)
        inward = 1.25 + 0.22 * (1 if lane else -1)
        draw_arrow(ax, (8.8, middle), (9.12, inward), **ARROW)
        draw_arrow(ax, (9.5, inward), (9.95, middle), **ARROW)
    ax.plot(9.31, 1.25, "o", markersize=20, markerfacecolor=PAGE, markeredgecolor=INK, markeredgewidth=1)
    write(ax, 9.31, 1.25, "+", 13)
    for x, text in ((2.5, f"{names[0]}: by columns"), (6.35, f"{names[1]}: by rows")):
        write(ax, x, -0.22, text, SMALL, color=MUTED)
    ax.set(xlim=(-0.05, 11.3), ylim=(2.62, -0.42))
    ax.set_yticks([0.5, 2.0], ["worker 0", "worker 1"])


def _vector(ax, left: float, middle: float, text: str, color: str) -> None:
    draw_box(ax, left, middle - 0.19, 1.2, 0.38, color)
    write(ax, left + 0.6, middle, text, SMALL, color=ink_on(color))


def pass_shares(
    passes: Mapping[str, Mapping[str, Sequence[float]]], meanings: tuple[str, str, str], title: str = ""
) -> Picture:
    """Draw how the time of a pass divides into three parts, a bar per machine, with its milliseconds at the end.

    Args:
        passes: for each panel and each machine, three times in seconds.
        meanings: what the three times are.
        title: the title of the picture.
    """
    rows = sum(map(len, passes.values()))
    figure, axes = new_figure(0.34 * rows + 0.5 * len(passes) + 1.1, len(passes), title, sharex=True)
    described = []
    for ax, (name, machines) in zip(axes, passes.items(), strict=True):
        for y, (machine, seconds) in enumerate(machines.items()):
            left, whole = 0.0, sum(seconds)
            shares = [100 * part / whole for part in seconds]
            for share, color in zip(shares, WAITS, strict=True):
                ax.barh(y, share, left=left, color=color, height=0.78, linewidth=0)
                if share >= 7:
                    write(ax, left + share / 2, y, f"{share:.0f}%", SMALL, color=ink_on(color))
                left += share
            ax.text(101, y, f"{whole:.1f} s" if whole >= 1 else f"{1000 * whole:.1f} ms", va="center")
            listed = ", ".join(f"{meaning} {share:.0f}%" for meaning, share in zip(meanings, shares, strict=True))
            described.append(f"{name}, {machine}, in milliseconds {1000 * whole:,.1f}: {listed}")
        set_panel_title(ax, name)
        ax.set_yticks(range(len(machines)), list(machines))
        ax.set(xlim=(0, 118), ylim=(len(machines) - 0.5, -0.5))
        ax.set_xticks(range(0, 101, 25))
        ax.tick_params(axis="y", length=0)
        ax.spines["bottom"].set_bounds(0, 100)
    axes[-1].set_xlabel("share of the pass's time (percent)")
    add_key(figure, dict(zip(meanings, WAITS, strict=True)))
    return Picture(figure, f"What passes wait for. {'. '.join(described)}.")
