"""Where the inputs of a layer are large: a picture of tokens by input channels."""

from bisect import bisect
from collections.abc import Sequence

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from .colors import BLUE, LIGHT_SKY, ORANGE, PALE, SMALL
from .picture import Picture, add_key, draw_box, empty_figure, set_panel_title

COLORS = (LIGHT_SKY, BLUE, ORANGE)  # also in gray, each differs from its neighbors, and on a dark page, too
LEVELS = (1, 2, 4)  # where these colors begin; smaller magnitudes stay pale
CELL = 4  # neighboring channels share a cell, which shows the largest of them


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
    boxes: dict[str, list[Path]] = {color: [] for color in (*COLORS, PALE)}
    for y, row in enumerate(magnitudes):
        for x in range(0, width, CELL):
            corners = [(x, y), (x + CELL, y), (x + CELL, y + 0.9), (x, y + 0.9), (x, y)]
            boxes[_color(max(row[x : x + CELL]))].append(Path(corners, closed=True))
    for color in COLORS:
        if boxes[color]:  # one patch for all cells of a color keeps the file small
            cells_ax.add_patch(PathPatch(Path.make_compound_path(*boxes[color]), facecolor=color, linewidth=0))
    largest = [max(row) for row in magnitudes]
    for y, value in enumerate(largest):
        draw_box(largest_ax, 0, y, value, 0.9, _color(value))
        largest_ax.text(value + 0.02 * max(largest), y + 0.5, f"{value:.1f}", va="center", fontsize=SMALL)
    cells_ax.set_yticks([y + 0.45 for y in range(len(tokens))], [token.strip() for token in tokens])
    cells_ax.set(xlim=(0, width), ylim=(len(tokens), 0), xlabel="input channel", ylabel="token")
    largest_ax.set(xlim=(0, 1.3 * max(largest)), xlabel="largest input")
    largest_ax.tick_params(axis="y", length=0)
    for ax, name in ((cells_ax, "magnitude of the inputs"), (largest_ax, "per token")):
        set_panel_title(ax, name)
    add_key(figure, dict(zip(("0 to 1", "1 to 2", "2 to 4", "4 or more"), (PALE, *COLORS), strict=True)), 4)
    listed = ", ".join(f"{token!r} {value:.1f}" for token, value in zip(tokens, largest, strict=True))
    return Picture(figure, f"Magnitudes of {len(magnitudes[0])} inputs. The largest of each token: {listed}.")


def _color(value: float) -> str:
    return (PALE, *COLORS)[bisect(LEVELS, value)]
