"""Pictures of the KV cache: how much memory is allocated, used and shared."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

from .colors import BLUE, GRAY, INK, LINE, PAGE, SMALL, ink_on, request_colors, wasted
from .grids import draw_cell, set_up_grid
from .picture import Picture, add_key, draw_box, empty_figure, new_figure, set_panel_title, write


def memory_timeline(
    named: Mapping[str, tuple[Sequence[int], Sequence[int]]], capacity: int, title: str = ""
) -> Picture:
    """Draw how much of a KV cache is allocated in each iteration, and how much of that holds tokens.

    Args:
        named: for each panel, two counts per iteration: the tokens held, and the tokens for which memory is allocated.
        capacity: the tokens for which there is memory.
    """
    figure, axes = new_figure(1.6 * len(named) + 0.7, len(named), title, sharex=True, sharey=True)
    longest = max(len(held) for held, _ in named.values())
    axes[0].set(xlim=(0, longest), ylim=(0, 1.3 * capacity))
    described = []
    for ax, (name, (held, room)) in zip(axes, named.items(), strict=True):
        # Each value lasts until the next iteration begins, so the last one is repeated.
        iterations, until, allocated = range(len(held) + 1), [*held, held[-1]], [*room, room[-1]]
        ax.fill_between(iterations, until, step="post", color=BLUE, linewidth=0)
        ax.fill_between(iterations, until, allocated, step="post", **wasted())
        ax.axhline(capacity, color=INK, linestyle="--", linewidth=1)
        ax.text(longest, 1.05 * capacity, f"whole memory: {capacity:,}", ha="right", va="bottom", fontsize=SMALL)
        ax.set_ylabel("tokens")
        of_allocated = f"{len(held):,} iterations, {sum(held) / max(1, sum(room)):.0%} of the allocated memory"
        set_panel_title(ax, f"{name}: {of_allocated} is used")
        described.append(f"{name}: {of_allocated} holds tokens")
    axes[-1].set_xlabel("iteration")
    for axis in (axes[-1].xaxis, axes[-1].yaxis):
        axis.set_major_formatter("{x:,.0f}")
    add_key(figure, {"holds tokens": BLUE, "allocated, but empty": wasted()})
    return Picture(figure, f"Memory over iterations, room for {capacity:,} tokens. {'; '.join(described)}.")


def block_tables(
    named: Mapping[str, Mapping[Hashable, tuple[Sequence[int], int]]],
    blocks: int,
    block_size: int,
    title: str = "",
    entries: int = 1,
) -> Picture:
    """Draw block tables on the left and the memory that they point into on the right, colored by request.

    Args:
        named: for each panel, the block table of each request and its number of tokens.
        blocks: the number of blocks.
        block_size: the number of tokens that fit in a block.
        entries: leave room for at least this many entries per table, so that several pictures have the same layout.
    """
    color = request_colors(request for tables in named.values() for request in tables)
    longest = max([entries, *(len(table) for tables in named.values() for table, _ in tables.values())])
    heights = [0.34 * max(2, len(tables)) + 0.5 for tables in named.values()]
    figure = empty_figure(sum(heights) + 0.7 + 0.3 * bool(title), title)
    grid = figure.subplots(len(named), 2, squeeze=False, height_ratios=heights, width_ratios=[longest + 1, 12])
    described, shared_somewhere = [], False
    for (left, right), (name, tables) in zip(grid, named.items(), strict=True):
        owners: dict[int, list] = {}
        for request, (table, tokens) in tables.items():
            for index, block in enumerate(table):
                filled = max(0, min(block_size, tokens - index * block_size))
                owners.setdefault(block, []).append((request, filled))
        fill = {block: GRAY if len(sharing) > 1 else color[sharing[0][0]] for block, sharing in owners.items()}
        shared_somewhere |= GRAY in fill.values()
        for y, (table, _) in enumerate(tables.values()):
            for x, block in enumerate(table):
                draw_cell(left, x, y, fill[block])
                write(left, x + 0.5, y + 0.52, str(block), SMALL, color=ink_on(fill[block]))
        set_up_grid(left, longest, max(1, len(tables)), name)
        left.set_yticks([y + 0.5 for y in range(len(tables))], [str(request) for request in tables], fontsize=SMALL)
        for block in range(blocks):
            filled = max((tokens for _, tokens in owners.get(block, [])), default=0)
            for slot in range(block_size):
                face = fill.get(block, PAGE) if slot < filled else PAGE
                edge = fill.get(block, LINE) if slot >= filled else PAGE
                look = {"edgecolor": edge, "linewidth": 0.6}
                look |= {"hatch": "/////"} if block in owners and slot >= filled else {}
                draw_box(right, block + slot / block_size * 0.88 + 0.04, 0.25, 0.88 / block_size, 0.5, face, **look)
            write(right, block + 0.48, 0.98, str(block), SMALL)
            # The last word is enough for "answer 0" and "answer 1".
            holders = " ".join(str(request).split()[-1] for request, _ in owners.get(block, []))
            if len(holders) < 7:
                write(right, block + 0.48, 0.12, holders, SMALL - 2)
        set_up_grid(right, blocks, 1, "")
        right.set_ylim(1.15, 0)
        described.append(f"{name}: " + (", ".join(f"{name} has {list(table)}" for name, (table, _) in tables.items())))
    for ax in grid[-1]:
        ax.set_xlabel("block table" if ax is grid[-1][0] else "memory: block number", fontsize=SMALL)
    key = {"holds tokens": color[next(iter(color))]} if color else {}
    key |= {"shared": GRAY} if shared_somewhere else {}
    key |= {"allocated, no token yet": wasted() | {"hatch": "/////"}, "free": PAGE}
    add_key(figure, key, 4)
    return Picture(figure, f"Block tables and {blocks} blocks of {block_size} tokens. {'; '.join(described)}.")


def memory_shares(named: Mapping[str, Sequence[int]], capacity: int, unit: str, title: str = "") -> Picture:
    """Draw how much memory each request holds in each iteration, as stacked areas with the requests' names in them.

    Args:
        named: for each request, the amount of memory that it holds in each iteration.
        capacity: the total amount of memory.
        unit: the unit of these amounts.
    """
    figure, (ax,) = new_figure(3.2, title=title)
    count = max(map(len, named.values()))
    color = request_colors(named)
    below, described, areas = [0] * (count + 1), [], []
    for name, shares in named.items():
        top = [under + more for under, more in zip(below, [*shares, shares[-1]], strict=True)]
        ax.fill_between(range(count + 1), below, top, step="post", color=color[name], linewidth=0)
        runs = [list(run) for is_held, run in groupby(enumerate(shares), key=lambda pair: pair[1] > 0) if is_held]
        stretches = [(run[0][0], run[-1][0] + 1) for run in runs]
        areas += [(str(name), color[name], start, end, below, top) for start, end in stretches]
        below = top
        times = "".join(f"{start} to {end}, " for start, end in stretches)
        described.append(f"{name} from iteration {times}at most {max(shares)}")
    ax.axhline(capacity, color=INK, linestyle="--", linewidth=1)
    ax.set(xlim=(0, count), ylim=(0, 1.2 * capacity))
    for name, fill, start, end, low, high in areas:  # a preempted request has its name in each stretch that has room
        half = 0.006 * len(name) * count  # of the name's width, in iterations
        x = max(range(start, end), key=lambda x, low=low, high=high: high[x] - low[x])
        if high[x] - low[x] > 0.06 * capacity and end - start >= 2 * half:
            middle = min(max(x + 0.5, start + half), end - half)
            under = slice(int(middle - half), min(end, int(middle + half) + 1))
            write(ax, middle, (max(low[under]) + min(high[under])) / 2, name, color=ink_on(fill))
    ax.text(count, 1.02 * capacity, f"all {capacity} {unit}", ha="right", va="bottom")
    ax.set(xlabel="iteration", ylabel=unit)
    return Picture(figure, f"Stacked areas of {unit} over iterations, {capacity} in all. {'; '.join(described)}.")
