"""A drawing of requests with adapters: as merged models that run one after another, and in one pass."""

from collections.abc import Sequence

from .colors import GRAY, INK, LIGHT_SKY, LINE, REQUEST_COLORS, ink_on
from .grids import set_up_grid
from .picture import Picture, draw_box, new_figure, write


def merged_and_adapted(adapters: Sequence[str | None] = ("sea", "honest", None, "sea"), title: str = "") -> Picture:
    """Draw what is read for a token of each request: a merged model per adapter, or the base once and the adapters.

    Args:
        adapters: the adapter of each request; None for the base model alone.
        title: the title of the picture.
    """
    rows, models = len(adapters), list(dict.fromkeys(adapters))
    named = [name for name in models if name is not None]
    width = 1.3 * len(models)
    figure, axes = new_figure(0.72 * rows + 1.5 + 0.3 * bool(title), 2, title)
    for number, name in enumerate(models):
        own = f"all weights,\n{name}\nmerged in" if name else "all\nweights"
        _read(axes[0], 1.3 * number, 0.86, rows, own, GRAY)
        for row in _rows_with(adapters, name):
            _request(axes[0], 1.3 * number + 0.9, row)
    passes = f"merged: {len(models)} models, so {len(models)} forward passes, each of which reads all weights"
    names = [name or "no adapter" for name in adapters]
    set_up_grid(axes[0], width, rows, passes, names)
    ticks = {1.3 * number + 0.55: f"pass {number + 1}" for number in range(len(models))}
    axes[0].set_xticks(list(ticks), list(ticks.values()))
    _read(axes[1], 0, 0.86, rows, "all weights,\nonce", GRAY)
    for number, name in enumerate(named):
        left = 0.94 + 0.42 * number
        _read(axes[1], left, 0.34, rows, "", LIGHT_SKY)
        for row in _rows_with(adapters, name):
            _request(axes[1], left + 0.06, row, "")
    last = 0.94 + 0.42 * len(named)
    for row in range(rows):
        _request(axes[1], last, row)
    passes = "adapters: 1 forward pass reads all weights once, and each adapter once"
    set_up_grid(axes[1], width, rows, passes, names)
    ticks = [0.43, *(1.11 + 0.42 * number for number in range(len(named))), last + 0.14]
    axes[1].set_xticks(ticks, ["pass 1", *named, ""])
    users = "; ".join(f"{name}: requests {', '.join(map(str, _rows_with(adapters, name)))}" for name in named)
    alt = (
        f"Two drawings of {rows} requests that each get a token. With merged weights, {len(models)} models run in "
        f"{len(models)} forward passes, and each of them reads all weights. With adapters, 1 forward pass reads all "
        f"weights once, and each adapter once for its own requests. {users}."
    )
    return Picture(figure, alt)


def _rows_with(adapters: Sequence[str | None], name: str | None) -> list[int]:
    return [row for row, own in enumerate(adapters) if own == name]


def _read(ax, left: float, width: float, rows: int, text: str, color: str) -> None:
    """Draw a box as high as all rows: weights that are read."""
    draw_box(ax, left, 0.04, width, rows - 0.08, color, edgecolor=LINE, linewidth=0.6)
    write(ax, left + width / 2, rows / 2, text, color=ink_on(color))


def _request(ax, left: float, row: int, text: str | None = None) -> None:
    color = REQUEST_COLORS[row % 7]
    width = 0.22 if text == "" else 0.28
    draw_box(ax, left, row + 0.08, width, 0.84, color, edgecolor=INK, linewidth=0.6)
    write(ax, left + width / 2, row + 0.52, str(row) if text is None else text, color=ink_on(color))
