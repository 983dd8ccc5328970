"""A picture for planning: the requests that each size of a fleet serves late."""

from collections.abc import Mapping, Sequence

from .colors import GRAY, MUTED, SERIES_COLORS, SMALL
from .picture import Picture, label_ends, new_figure


def missed_requests(
    fleets: Mapping[str, Mapping[int, float]], promises: Sequence[float] = (0.9, 0.99, 0.999), title: str = ""
) -> Picture:
    """Draw the share of requests that miss a limit over the number of replicas, on a log scale.

    Args:
        fleets: for each load, at most four, the share that misses a limit by the number of replicas.
        promises: shares of requests that are promised to be within the limits; a dashed line for each, and a ring
            around the smallest fleet that keeps it.
    """
    figure, (ax,) = new_figure(3.9, title=title)
    floor = (1 - max(promises)) / 4  # where a fleet is drawn that misses nothing
    described, ends = [], []
    for (name, shares), color, marker in zip(fleets.items(), SERIES_COLORS, "os^D", strict=False):
        sizes = sorted(shares)
        heights = [max(floor, shares[size]) for size in sizes]
        ax.plot(sizes, heights, color=color, marker=marker, markersize=4, linewidth=1.4)
        ends.append((sizes[-1], heights[-1], name, color))
        kept = []
        for promise in promises:
            enough = [size for size in sizes if 1 - shares[size] >= promise]
            if enough:
                ax.plot(enough[0], max(floor, shares[enough[0]]), "o", color=color, markersize=12, fillstyle="none")
                kept.append(f"{enough[0]} for {promise:.1%}")
        described.append(f"{name}: smallest fleets {', '.join(kept) or 'none'}")
    tried = [size for shares in fleets.values() for size in shares]
    least, most = min(tried), max(tried)
    for promise in promises:
        ax.hlines(1 - promise, least - 1.2, most, color=GRAY, linewidth=0.8, linestyle="--", zorder=0)
        style = {"textcoords": "offset points", "fontsize": SMALL, "color": MUTED}
        ax.annotate(f"{100 * promise:g}% promised", (least - 1.2, 1 - promise), (3, 3), **style)
    ax.set(yscale="log", ylim=(floor, 1.3))
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.3%}".rstrip("0%").rstrip(".") + "%")
    ax.set_xticks(range(least, most + 1))
    ax.set_xlim(least - 1.2, most + 0.4)  # room for the names of the promises
    ax.set_xlabel("replicas (a ring: the smallest fleet that keeps a promise)")
    ax.set_ylabel("requests that miss a limit (log scale)")
    label_ends(figure, ax, ends)
    return Picture(figure, f"Share of requests that miss a limit over the number of replicas. {'; '.join(described)}.")
