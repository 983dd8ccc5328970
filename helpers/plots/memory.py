"""Pictures of the KV cache: how much memory is allocated, used and shared."""

from collections.abc import Hashable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from .grids import draw_cell, set_up_grid
from .picture import BLUE, GRAY, INK, ORANGE, REQUEST_COLORS, Picture, new_figure


def memory_timeline(named: Mapping[str, tuple[Sequence[int], Sequence[int]]], capacity: int) -> Picture:
    """Draw how much of a KV cache is allocated in each iteration, and how much of that holds tokens.

    Args:
        named: for each panel, two counts per iteration: the tokens held, and the tokens for which memory is allocated.
        capacity: the tokens for which there is memory.
    """
    figure, axes = new_figure(9, 1.6 * len(named) + 0.7, len(named), sharex=True, sharey=True)
    described = []
    for ax, (title, (held, room)) in zip(axes, named.items(), strict=True):
        # Each value lasts until the next iteration begins, so the last one is repeated.
        iterations, held, room = range(len(held) + 1), [*held, held[-1]], [*room, room[-1]]
        ax.fill_between(iterations, held, step="post", color=BLUE, linewidth=0)
        ax.fill_between(iterations, held, room, step="post", facecolor="white", edgecolor=ORANGE, hatch="////", lw=0)
        ax.axhline(capacity, color=INK, linestyle="--", linewidth=1)
        share = sum(held[:-1]) / max(1, sum(room[:-1]))
        heading = f"{title}: {len(held) - 1} iterations, {share:.0%} of the allocated memory is used"
        ax.set_title(heading, loc="left", fontsize=10)
        ax.set_ylabel("tokens")
        ax.set_ylim(0, 1.08 * capacity)
        described.append(f"{title}: {len(held) - 1} iterations, {share:.0%} of the allocated memory holds tokens")
    axes[0].set_xlim(left=0)
    axes[-1].set_xlabel("iteration")
    handles = [
        Patch(facecolor=BLUE, label="holds tokens"),
        Patch(facecolor="white", edgecolor=ORANGE, hatch="////", label="allocated, but empty"),
        Line2D([], [], color=INK, linestyle="--", linewidth=1, label="whole memory"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return Picture(figure, f"Memory over iterations, room for {capacity:,} tokens. {'; '.join(described)}.")


def block_tables(
    named: Mapping[str, Mapping[Hashable, tuple[Sequence[int], int]]], blocks: int, block_size: int
) -> Picture:
    """Draw block tables on the left and the memory that they point into on the right, coloured by request.

    Args:
        named: for each panel, the block table of each request and its number of tokens.
        blocks: the number of blocks.
        block_size: the number of tokens that fit in a block.
    """
    requests = list(dict.fromkeys(request for tables in named.values() for request in tables))
    color = {request: REQUEST_COLORS[index % 7] for index, request in enumerate(requests)}
    longest = max([1, *(len(table) for tables in named.values() for table, _ in tables.values())])
    heights = [0.34 * max(2, len(tables)) + 0.5 for tables in named.values()]
    figure = Figure(figsize=(10.5, sum(heights) + 0.35), layout="constrained")
    grid = figure.subplots(len(named), 2, squeeze=False, height_ratios=heights, width_ratios=[longest + 1, 11])
    described, shared_somewhere = [], False
    for (left, right), (title, tables) in zip(grid, named.items(), strict=True):
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
                left.text(x + 0.5, y + 0.52, str(block), ha="center", va="center", fontsize=9, color=INK)
        set_up_grid(left, longest, max(1, len(tables)), title)
        left.set_yticks([y + 0.5 for y in range(len(tables))], [str(request) for request in tables], fontsize=9)
        for block in range(blocks):
            filled = max((tokens for _, tokens in owners.get(block, [])), default=0)
            for slot in range(block_size):
                corner, height = (block + slot / block_size * 0.88 + 0.04, 0.25), 0.5
                look = {"facecolor": fill.get(block, "white") if slot < filled else "white", "linewidth": 0.6}
                hatch = "/////" if block in owners and slot >= filled else None
                edge = fill.get(block, "#CCCCCC") if slot >= filled else "white"
                right.add_patch(Rectangle(corner, 0.88 / block_size, height, edgecolor=edge, hatch=hatch, **look))
            right.text(block + 0.48, 0.98, str(block), ha="center", va="center", fontsize=8, color=INK)
        set_up_grid(right, blocks, 1, "memory, block by block")
        right.set_ylim(1.15, 0)
        right.set_yticks([])
        described.append(f"{title}: " + (", ".join(f"{name} has {list(table)}" for name, (table, _) in tables.items())))
    for ax in grid[-1]:
        ax.set_xlabel("block table" if ax is grid[-1][0] else "block number", fontsize=9)
    handles = [Patch(facecolor=color[request], label=str(request)) for request in requests]
    handles += [Patch(facecolor=GRAY, label="shared")] * shared_somewhere
    handles += [Patch(facecolor="white", edgecolor=GRAY, hatch="/////", label="allocated, no token yet")]
    handles += [Patch(facecolor="white", edgecolor="#CCCCCC", label="free")]
    figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False, fontsize=9)
    return Picture(figure, f"Block tables and {blocks} blocks of {block_size} tokens. {'; '.join(described)}.")


def memory_shares(named: Mapping[str, Sequence[int]], capacity: int, unit: str) -> Picture:
    """Draw how much memory each request holds in each iteration, as stacked areas.

    Args:
        named: for each request, the amount of memory that it holds in each iteration.
        capacity: the total amount of memory.
        unit: the unit of these amounts.
    """
    figure, (ax,) = new_figure(9, 2.9)
    count = max(map(len, named.values()))
    below, described = [0] * (count + 1), []
    for index, (name, shares) in enumerate(named.items()):
        top = [under + more for under, more in zip(below, [*shares, shares[-1]], strict=True)]
        color = REQUEST_COLORS[index % 7]
        ax.fill_between(range(count + 1), below, top, step="post", color=color, linewidth=0, label=name)
        below = top
        held = [(iteration, iteration + 1) for iteration, share in enumerate(shares) if share]
        times = "".join(f"{first} to " * (first - 1 not in dict(held)) + f"{last}, " * (last not in dict(held))
                        for first, last in held)  # fmt: skip
        described.append(f"{name} from iteration {times}at most {max(shares)}")
    ax.axhline(capacity, color=INK, linestyle="--", linewidth=1, label=f"all {capacity} {unit}")
    ax.set_xlim(0, count)
    ax.set_ylim(0, 1.12 * capacity)
    ax.set_xlabel("iteration")
    ax.set_ylabel(unit)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    return Picture(figure, f"Stacked areas of {unit} over iterations, {capacity} in all. {'; '.join(described)}.")
