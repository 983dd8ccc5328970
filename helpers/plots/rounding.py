"""Pictures of quantization: levels and errors of rounding, numbers in bits, and texts that rounding changes."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from ..trace import num_matching
from .colors import BLUE, LABEL, LINE, ORANGE, RED, SKY, ink_on, wasted
from .grids import set_up_grid
from .picture import Picture, add_key, empty_figure, new_figure, set_panel_title, write


def rounding_levels(
    weights: Sequence[float], scales: Mapping[str, Sequence[float]], largest: int, title: str = ""
) -> Picture:
    """Draw the weights of one output, and the levels that quantization can store, a panel per choice of scales.

    Args:
        weights: a weight per input.
        scales: for each panel, the scales of its groups. The groups are equally large.
        largest: the largest integer; a level is an integer from -largest to largest, times the scale of its group.
    """
    figure, axes = new_figure(1.55 * len(scales) + 1.0, len(scales), title, sharex=True, sharey=True)
    edge, described = 1.12 * max(map(abs, weights)), []
    for ax, (name, of_groups) in zip(axes, scales.items(), strict=True):
        size, used, errors = len(weights) // len(of_groups), set(), []
        for group, scale in enumerate(of_groups):
            start, end = group * size, (group + 1) * size
            levels = [integer * scale for integer in range(-largest, largest + 1) if abs(integer * scale) < edge]
            ax.hlines(levels, start - 0.3, end - 0.7, color=LINE, linewidth=0.8, zorder=0)
            for index in range(start, end):
                level = max(-largest, min(largest, round(weights[index] / scale))) * scale
                ax.plot([index, index], [weights[index], level], color=RED, linewidth=1.4)
                used.add((group, level))
                errors.append(abs(weights[index] - level))
        ax.plot(range(len(weights)), weights, "o", color=BLUE, markersize=3.2)
        mean = sum(errors) / len(errors)
        set_panel_title(ax, f"{name}: mean error {mean:.3f}")
        ax.set(ylim=(-edge, edge), ylabel="weight")
        described.append(f"{name}: {len(of_groups)} scale{'s' * (len(of_groups) > 1)}, mean error {mean:.3f}")
    axes[-1].set_xlabel("input")
    add_key(figure, {"weight": {"facecolor": BLUE}, "level": {"facecolor": LINE}, "error": {"facecolor": RED}})
    alt = f"{len(weights)} weights and the levels to which they are rounded. {'; '.join(described)}."
    return Picture(figure, alt)


def error_map(named: Mapping[str, Sequence[Sequence[float]]], title: str = "") -> Picture:
    """Draw the size of the error of each weight, a panel per choice of scales: the darker, the larger.

    Args:
        named: for each panel, the errors [out, in], as nested lists.
    """
    rows, columns = len(first := next(iter(named.values()))), len(first[0])
    height = len(named) * (5.6 * rows / columns + 0.42) + 1.0
    figure = empty_figure(height, title)
    axes = figure.subplots(len(named), 1, sharex=True, squeeze=False)[:, 0]
    largest = max(abs(error) for grid in named.values() for row in grid for error in row)
    described = []
    for ax, (name, grid) in zip(axes, named.items(), strict=True):
        sizes = [[abs(error) for error in row] for row in grid]
        image = ax.imshow(sizes, cmap="Oranges", vmin=0, vmax=largest, aspect="auto", interpolation="nearest")
        mean = sum(map(sum, sizes)) / (rows * columns)
        set_panel_title(ax, f"{name}: mean error {mean:.4f}")
        ax.set_ylabel("output")
        described.append(f"{name}: mean error {mean:.4f}")
    axes[-1].set_xlabel("input")
    bar = figure.colorbar(image, ax=list(axes), fraction=0.05, pad=0.02)
    bar.set_label("size of the error")
    return Picture(figure, f"Errors of {rows} by {columns} weights. {'; '.join(described)}.")


def packed_byte(low: int, high: int, title: str = "") -> Picture:
    """Draw two integers of 4 bits, each in two's complement, and the byte that holds both.

    Raises:
        ValueError: an integer does not fit into 4 bits.
    """
    for number in (low, high):
        if not -8 <= number <= 7:
            raise ValueError(f"{number} does not fit into 4 bits, which hold -8 to 7.")
    figure, (ax,) = new_figure(2.3, title=title, width=5.2)
    byte = (high & 15) << 4 | low & 15
    for bit in range(8):  # from the lowest one
        color, aside = (SKY, 0.35) if bit < 4 else (ORANGE, -0.35)
        for y, x in ((0, 7 - bit + aside), (2, 7 - bit)):
            ax.add_patch(Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=color, linewidth=0))
            write(ax, x + 0.5, y + 0.52, f"{byte >> bit & 1}", LABEL + 1, color=ink_on(color))
    for x, end, text in ((1.65, 2, f"upper half: {high}"), (6.35, 6, f"lower half: {low}")):
        write(ax, x, -0.32, text)
        ax.annotate("", (end, 1.96), (x, 1.02), arrowprops={"arrowstyle": "->"})
    set_up_grid(ax, 8, 3, "")
    ax.set(xlim=(-0.4, 8.4), ylim=(3.0, -0.7))
    ax.set_yticks([0.5, 2.5], ["4 bits\neach", "1 byte"])
    alt = f"The integers {low} and {high} have the bits {low & 15:04b} and {high & 15:04b}. Their byte is {byte:08b}."
    return Picture(figure, alt)


def agreement(expected: Sequence[Sequence], named: Mapping[str, Sequence[Sequence]], title: str = "") -> Picture:
    """Draw where texts begin to differ from the expected ones, a row per text and a column per token.

    Args:
        expected: the tokens of each text.
        named: for each panel, the tokens of the same texts as another model generates them.
    """
    columns = max(len(text) for texts in [expected, *named.values()] for text in texts)
    height = len(named) * (0.105 * len(expected) + 0.5) + 0.9
    figure, axes = new_figure(height, len(named), title, sharex=True)
    described = []
    for ax, (name, texts) in zip(axes, named.items(), strict=True):
        changed = 0
        for y, (right, text) in enumerate(zip(expected, texts, strict=True)):
            length = max(len(right), len(text))
            first = num_matching(right, text)
            changed += first < length
            ax.add_patch(Rectangle((0, y + 0.1), first, 0.8, facecolor=SKY, linewidth=0))
            if first < length:
                ax.add_patch(Rectangle((first + 1, y + 0.1), length - first - 1, 0.8, **wasted(LINE)))
                ax.add_patch(Rectangle((first, y + 0.1), 1, 0.8, facecolor=RED, linewidth=0))
        set_panel_title(ax, f"{name}: {changed} of {len(expected)} texts change")
        ax.set(xlim=(0, columns), ylim=(len(expected), 0), yticks=[], ylabel="text")
        described.append(f"{name}: {changed} of {len(expected)} texts change")
    axes[-1].set_xlabel("position in the output (tokens)")
    key = {"the same token": {"facecolor": SKY}, "the first that differs": {"facecolor": RED}, "after it": wasted()}
    add_key(figure, key)
    return Picture(figure, f"Texts, token by token, against those without quantization. {'; '.join(described)}.")
