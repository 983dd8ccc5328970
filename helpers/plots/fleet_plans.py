"""Pictures of planning: predicted times, the requests that each fleet serves late, and fleets over time."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter

from .colors import BLUE, GRAY, INK, LIGHT_BLUE, MUTED, PALE, SERIES_COLORS, SMALL
from .picture import Picture, add_key, label_ends, new_figure, set_panel_title


def predicted_times(models: Mapping[str, Sequence[tuple[float, float, bool]]], unit: str, title: str = "") -> Picture:
    """Draw the predicted time of each iteration over its measured time, in a panel for each cost model.

    Args:
        models: for each cost model (measured, predicted, has_prefill) for each iteration, both times above 0.
        unit: of the times.
    """
    figure, axes = new_figure(2.7 * len(models) + 0.5, len(models), title, sharex=True, sharey=True)
    ends = [time for points in models.values() for point in points for time in point[:2]]
    low, high = 0.8 * min(ends), 1.25 * max(ends)
    looks = {"only decodes": ("o", BLUE), "has a prefill": ("^", SERIES_COLORS[1])}
    for ax, (name, points) in zip(axes, models.items(), strict=True):
        ax.plot([low, high], [low, high], color=GRAY, linewidth=1)
        for kind, (marker, color) in looks.items():
            chosen = [point[:2] for point in points if point[2] == (kind == "has a prefill")]
            ax.plot(*zip(*chosen, strict=True) if chosen else ([], []), marker, color=color, markersize=4, alpha=0.7)
        ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), ylabel=f"predicted ({unit}, log scale)")
        ax.grid()
        ax.tick_params(which="both", labelsize=SMALL)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(LogFormatter())  # 20, not 2 × 10¹
        set_panel_title(ax, name)
    axes[-1].set_xlabel(f"measured ({unit}, log scale)")
    key = {kind: Line2D([], [], linestyle="", marker=marker, color=color) for kind, (marker, color) in looks.items()}
    add_key(figure, key | {"measured = predicted": Line2D([], [], color=GRAY)})
    count = max(map(len, models.values()))
    errors = {name: median(abs(predicted / time - 1) for time, predicted, _ in models[name]) for name in models}
    described = "; ".join(f"{name}: off by {error:.0%} in the median" for name, error in errors.items())
    return Picture(figure, f"Predicted over measured times of {count} iterations. {described}.")


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


def arrivals_and_departures(requests: Sequence[tuple[float, float]], title: str = "") -> Picture:
    """Draw how many requests have arrived and how many have finished, over time.

    The vertical distance of the curves is the number of requests in the system.

    Args:
        requests: (arrival, end) of each request, in seconds.
    """
    figure, (ax,) = new_figure(3.7, title=title)
    arrivals, ends = (sorted(times) for times in zip(*requests, strict=True))
    times = sorted({*arrivals, *ends})
    counts = [[bisect_right(moments, time) for time in times] for moments in (arrivals, ends)]
    gaps = [arrived - finished for arrived, finished in zip(*counts, strict=True)]
    most = gaps.index(max(gaps))
    ax.fill_between(times, counts[1], counts[0], step="post", color=LIGHT_BLUE, alpha=0.45, linewidth=0)
    for name, color, values in zip(("arrived", "finished"), SERIES_COLORS, counts, strict=False):
        ax.step(times, values, where="post", color=color, linewidth=1.4)
        level = 0.8 if counts[0][most] < 0.6 * len(requests) else 0.35  # away from the other label
        at = next(i for i, value in enumerate(values) if value >= level * len(requests))
        side = {"ha": "right", "xytext": (-8, 8)} if name == "arrived" else {"ha": "left", "xytext": (8, -12)}
        style = {"textcoords": "offset points", "color": color}
        ax.annotate(name, (times[at], values[at]), **side, **style)
    arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (times[most], counts[0][most]), (times[most], counts[1][most]), arrowprops=arrow)
    style = {"textcoords": "offset points", "ha": "right"}
    ax.annotate(f"{gaps[most]} in the system", (times[most], counts[0][most]), (-4, 2), **style)
    ax.set(xlim=(0, times[-1]), ylim=(0, 1.03 * len(requests)), xlabel="simulated seconds", ylabel="requests so far")
    ax.grid()
    alt = (
        f"Two rising curves of {len(requests)} requests: arrived and finished. At most {gaps[most]} are in the system."
    )
    return Picture(figure, alt)


def fleet_over_time(sizes: Sequence[tuple[float, int, int]], arrivals: Sequence[float], title: str = "") -> Picture:
    """Draw the load of a fleet, and how many replicas are paid for and are ready.

    Args:
        sizes: (time, paid, ready): the numbers of replicas from that time on, in ascending order of time.
        arrivals: when requests arrive, in seconds.
    """
    figure, (above, below) = new_figure(4.6, 2, title, sharex=True)
    last = max(sizes[-1][0], *arrivals)
    width = last / 40
    counts = [0] * 41
    for arrival in arrivals:
        counts[int(arrival / width)] += 1
    above.bar(
        [width * (number + 0.5) for number in range(41)], [count / width for count in counts], width, color=LIGHT_BLUE
    )
    above.set_ylabel("requests per second")
    times = [time for time, _, _ in sizes] + [last]
    paid, ready = ([size[part] for size in sizes] + [sizes[-1][part]] for part in (1, 2))
    below.fill_between(times, paid, step="post", color=PALE, linewidth=0)
    below.step(times, paid, where="post", color=SERIES_COLORS[1], linewidth=1.6)
    below.step(times, ready, where="post", color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)))
    key = {
        "paid for": Line2D([], [], color=SERIES_COLORS[1], linewidth=2),
        "ready": Line2D([], [], color=BLUE, linewidth=2, linestyle=(0, (4, 2))),
    }
    add_key(figure, key)
    below.set(ylim=(0, max(paid) + 0.6), yticks=range(max(paid) + 1), ylabel="replicas", xlabel="simulated seconds")
    for ax in (above, below):
        ax.set_xlim(0, last)
        ax.grid(axis="y")
    alt = (
        f"{len(arrivals)} arrivals until {arrivals[-1]:.0f}, and the replicas over time: at most {max(paid)} paid for, "
    )
    return Picture(figure, f"{alt}at most {max(ready)} ready.")
