"""Pictures of quantization: levels of rounding, a weight's way to the processor, changed texts, and large inputs."""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence

from matplotlib.colors import BoundaryNorm, ListedColormap

from ..trace import num_matching
from .colors import BLUE, LABEL, LIGHT_SKY, LINE, ORANGE, PAGE, PALE, RED, SKY, SMALL, ink_on, wasted
from .picture import Picture, add_key, draw_box, empty_figure, new_figure, set_panel_title, write

LEVEL_COLORS = (LIGHT_SKY, BLUE, ORANGE)  # also in gray, each differs from its neighbors, and on a dark page, too
LEVELS = (1, 2, 4)  # where these colors begin; smaller magnitudes stay pale
CELL = 4  # neighboring channels share a cell, which shows the largest of them


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
    add_key(figure, {"weight": BLUE, "level": LINE, "error": RED})
    alt = f"{len(weights)} weights and the levels to which they are rounded. {'; '.join(described)}."
    return Picture(figure, alt)


def weight_path(weights: tuple[float, float], integers: tuple[int, int], scale: float, title: str = "") -> Picture:
    """Draw how two weights come from memory to the processor: as floats of 4 bytes, and as integers that share a byte.

    Args:
        weights: the floats.
        integers: what they are rounded to, as multiples of the scale; from -8 to 7.
        scale: the size of a step; a group of 32 weights has one, of 2 bytes.
    """
    figure, (ax,) = new_figure(2.7, title=title)
    rounded = [integer * scale for integer in integers]
    for y, name, width, stored, arrived in (
        (0.7, "float32: 8 bytes", 4, [f"{weight:.5f}" for weight in weights], [f"{weight:.5f}" for weight in weights]),
        (2.0, "int4: 1 byte, and a\nshare of a scale", 0.5, map(str, integers), [f"{level:.3f}" for level in rounded]),
    ):
        for number, (color, text, value) in enumerate(zip((SKY, ORANGE), stored, arrived, strict=True)):
            x = 8.2 - (2 - number) * width
            draw_box(ax, x + 0.03, y, width - 0.06, 0.5, color)
            ax.vlines([x + byte for byte in range(1, int(width))], y, y + 0.5, color=PAGE, linewidth=0.8)
            write(ax, x + width / 2 + (number - 0.5) * 0.5 * (width < 1), y - 0.17, text)
            draw_box(ax, 10.6, y - 0.18 + 0.45 * number, 5.2, 0.4, color)
            line = value if width > 1 else f"{integers[number]} × {scale:.4f} = {value}"
            write(ax, 13.2, y + 0.02 + 0.45 * number, line, color=ink_on(color))
        ax.annotate("", (10.4, y + 0.25), (8.5, y + 0.25), arrowprops={"arrowstyle": "->", "linewidth": 1 + width})
        ax.text(-0.2, y + 0.25, name, ha="right", va="center", fontsize=LABEL)
    for x, text in ((4.2, "in memory"), (9.45, "the wait"), (13.2, "in registers")):
        write(ax, x, 0.0, text, weight="bold")
    ax.set(xlim=(-5.4, 16), ylim=(2.75, -0.2))
    ax.axis("off")
    alt = (
        f"Two weights come to the processor. As float32, {weights[0]:.5f} and {weights[1]:.5f} take 8 bytes. As "
        f"int4, {integers[0]} and {integers[1]} share 1 byte; with a scale of {scale:.4f}, they become "
        f"{rounded[0]:.3f} and {rounded[1]:.3f} in registers."
    )
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
            draw_box(ax, 0, y + 0.1, first, 0.8, SKY)
            if first < length:
                draw_box(ax, first + 1, y + 0.1, length - first - 1, 0.8, **wasted(LINE))
                draw_box(ax, first, y + 0.1, 1, 0.8, RED)
        set_panel_title(ax, f"{name}: {changed} of {len(expected)} texts change")
        ax.set(xlim=(0, columns), ylim=(len(expected), 0), yticks=[], ylabel="text")
        described.append(f"{name}: {changed} of {len(expected)} texts change")
    axes[-1].set_xlabel("position in the output (tokens)")
    key = {"the same token": SKY, "the first that differs": RED, "after it": wasted()}
    add_key(figure, key)
    return Picture(figure, f"Texts, token by token, against those without quantization. {'; '.join(described)}.")


def activation_map(magnitudes: Sequence[Sequence[float]], tokens: Sequence[str], title: str = "") -> Picture:
    """Draw the magnitudes of a layer's inputs, a row per token, and beside it the largest one of each token.

    Args:
        magnitudes: [tokens, channels], at least 0.
        tokens: the text of each token.
    """
    figure = empty_figure(0.175 * len(tokens) + 1.35, title)
    cells_ax, largest_ax = figure.subplots(1, 2, sharey=True, width_ratios=[3.4, 1])
    width = -(-len(magnitudes[0]) // CELL) * CELL
    draw_box(cells_ax, 0, 0, width, len(tokens), PALE)
    cells = [[max(row[x : x + CELL]) for x in range(0, width, CELL)] for row in magnitudes]
    colors, bounds = ListedColormap([(0, 0, 0, 0), *LEVEL_COLORS]), [0, *LEVELS, math.inf]
    look = {"extent": (0, width, len(tokens), 0), "aspect": "auto", "interpolation": "nearest", "zorder": 2}
    cells_ax.imshow(cells, cmap=colors, norm=BoundaryNorm(bounds, 4), **look)
    largest = [max(row) for row in magnitudes]
    for y, value in enumerate(largest):
        draw_box(largest_ax, 0, y, value, 0.9, _level_color(value))
        largest_ax.text(value + 0.02 * max(largest), y + 0.5, f"{value:.1f}", va="center", fontsize=SMALL)
    cells_ax.set_yticks([y + 0.45 for y in range(len(tokens))], [token.strip() for token in tokens])
    cells_ax.set(xlim=(0, width), ylim=(len(tokens), 0), xlabel="input channel", ylabel="token")
    largest_ax.set(xlim=(0, 1.3 * max(largest)), xlabel="largest input")
    largest_ax.tick_params(axis="y", length=0)
    for ax, name in ((cells_ax, "magnitude of the inputs"), (largest_ax, "per token")):
        set_panel_title(ax, name)
    add_key(figure, dict(zip(("0 to 1", "1 to 2", "2 to 4", "4 or more"), (PALE, *LEVEL_COLORS), strict=True)), 4)
    listed = ", ".join(f"{token!r} {value:.1f}" for token, value in zip(tokens, largest, strict=True))
    return Picture(figure, f"Magnitudes of {len(magnitudes[0])} inputs. The largest of each token: {listed}.")


def _level_color(value: float) -> str:
    return (PALE, *LEVEL_COLORS)[bisect(LEVELS, value)]
