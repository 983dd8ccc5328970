"""Grids: batches token by token, and attention masks."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

from matplotlib.figure import Figure

from .colors import INK, LABEL, LINE, MUTED, PAGE, PALE, RED, REQUEST_COLORS, SKY, SMALL, ink_on, request_colors, wasted
from .picture import Picture, add_key, draw_box, empty_figure, new_figure, set_panel_title, write


def token_grid(
    grids: Mapping[str, Sequence[Sequence[str]]],
    masks: Mapping[str, Sequence[Sequence[int]]],
    positions: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Picture:
    """Draw tokens as grids with one row per request: real tokens in color, pads hatched.

    Args:
        grids: for each panel, the texts of the tokens.
        masks: for each panel, its attention mask: 1 for a real token, 0 for a pad.
        positions: for each panel, the position ids, drawn in small digits below the tokens.
    """
    height = sum(0.5 * len(grid) + 0.45 for grid in grids.values())
    columns = max(len(row) for grid in grids.values() for row in grid)
    figure, axes = new_figure(height, len(grids), width=0.95 * columns + 1)
    room = (figure.get_figwidth() - 0.9) / columns
    size = _font_size([token for grid in grids.values() for row in grid for token in row], room)
    for ax, (name, grid) in zip(axes, grids.items(), strict=True):
        for y, row in enumerate(grid):
            for x, token in enumerate(row):
                real, color = masks[name][y][x], REQUEST_COLORS[y % 7]
                draw_cell(ax, x, y, color if real else None)
                ink = ink_on(color) if real else MUTED
                write(ax, x + 0.5, y + (0.4 if positions else 0.5), token.strip(), size, color=ink)
                if positions:
                    write(ax, x + 0.5, y + 0.78, str(positions[name][y][x]), SMALL - 1, color=ink)
        set_up_grid(ax, max(map(len, grid)), len(grid), name, [f"request {y}" for y in range(len(grid))])
    described = [f"{name}: pads per row {[len(row) - sum(row) for row in masks[name]]}" for name in grids]
    return Picture(figure, f"Grid of tokens. {'; '.join(described)}.")


def _font_size(texts: Sequence[str], inches: float) -> float:
    """Return the size at which the longest text fits into this many inches, at most LABEL."""
    return min(LABEL, 72 * 0.92 * inches / (0.62 * max([1, *(len(text.strip()) for text in texts)])))


def batches(named: Mapping[str, Mapping], title: str = "") -> Picture:
    """Draw batches below each other, for example before and after a verb: a row per request and a column per token.

    Tokens are colored, those that the next forward pass reads are framed, and padding is hatched.
    """
    columns = max(batch["attention_mask"].size(1) for batch in named.values())
    rows = [max(1, len(batch["request_ids"])) + 0.9 for batch in named.values()]
    height = 0.38 * sum(rows) + 0.45 + 0.3 * bool(title)
    figure, axes = new_figure(height, len(named), title, 0.42 * columns + 3.4, height_ratios=rows)
    color = request_colors(request_id for batch in named.values() for request_id in batch["request_ids"])
    for ax, (name, batch) in zip(axes, named.items(), strict=True):
        mask = batch["attention_mask"].tolist()
        cached = batch["attention_mask"].size(1) - batch["input_ids"].size(1)
        for y, request_id in enumerate(batch["request_ids"]):
            for x, real in enumerate(mask[y]):
                draw_cell(ax, x, y, color[request_id] if real else None, framed=bool(real) and x >= cached)
        labels = [
            f"{request_id}: {'done' if left == 0 else f'{left} to go'}"
            for request_id, left in zip(batch["request_ids"], batch["tokens_remaining"], strict=True)
        ]
        set_up_grid(ax, columns, max(1, len(mask)), name, labels)
    key = {
        "in the cache": {"facecolor": next(iter(color.values()), SKY), "edgecolor": PAGE},
        "token to compute next": {"facecolor": PAGE, "edgecolor": INK, "linewidth": 1.6},
    }
    is_padded = not all(batch["attention_mask"].all() for batch in named.values())
    add_key(figure, key | ({"padding (mask 0)": wasted()} if is_padded else {}))
    return Picture(figure, " ".join(f"{name}: {_describe(batch)}." for name, batch in named.items()))


def compare(
    expected: Sequence[Sequence], actual: Sequence[Sequence], title: str = "", pads: Sequence = (None,)
) -> Picture:
    """Draw the expected and the actual grid side by side; frame and mark each cell that differs.

    Rows may have unequal lengths. They are aligned at their right edges, where a batch grows.

    Args:
        expected, actual: rows of cells (numbers or text).
        title: the title of the picture.
        pads: the cell contents that are drawn as padding; None stands for an empty cell.
    """
    columns = max([1, *(len(row) for row in [*expected, *actual])])
    rows = max(1, len(expected), len(actual))
    figure = Figure(figsize=(min(11, 1.0 * columns + 2), 0.42 * rows + 0.95), layout="constrained")
    cells = {}
    for name, grid in (("expected", expected), ("yours", actual)):
        cells[name] = {
            (y, x + columns - len(row)): "" if cell is None else str(cell)
            for y, row in enumerate(grid)
            for x, cell in enumerate(row)
        }
    positions = sorted(cells["expected"] | cells["yours"])
    different = [position for position in positions if cells["expected"].get(position) != cells["yours"].get(position)]
    hatched = {"" if pad is None else str(pad) for pad in pads}
    for ax, name in zip(figure.subplots(1, 2), cells, strict=True):
        for (y, x), text in cells[name].items():
            draw_cell(ax, x, y, None if text in hatched else REQUEST_COLORS[y % 7])
            write(ax, x + 0.5, y + 0.5, text, 9, color=INK if text in hatched else ink_on(REQUEST_COLORS[y % 7]))
        if name == "yours":
            for y, x in different:
                draw_box(ax, x + 0.06, y + 0.08, 0.88, 0.84, edgecolor=INK, linewidth=1.8, linestyle="--")
                ax.text(x + 0.88, y + 0.16, "≠", ha="right", va="top", fontsize=9)
        set_up_grid(ax, columns, rows, name, [f"row {y}" for y in range(rows)])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    described = []
    for y, x in different[:8]:
        expected_text, actual_text = (cells[name].get((y, x), "nothing") or "a pad" for name in ("expected", "yours"))
        described.append(f"row {y}, column {x}: expected {expected_text}, got {actual_text}")
    return Picture(figure, f"{title or 'Two grids'}: {'; '.join(described) or 'no difference'}.")


def _describe(batch: Mapping) -> str:
    pads = (batch["attention_mask"] == 0).sum(dim=1).tolist()
    cached = batch["attention_mask"].size(1) - batch["input_ids"].size(1)
    rows = ", ".join(
        f"request {id} with {n} pad{'s' * (n != 1)}" for id, n in zip(batch["request_ids"], pads, strict=True)
    )
    return f"{cached} cached columns, {batch['input_ids'].size(1)} to compute; {rows}"


def draw_cell(ax, x: int, y: int, color: str | None, framed: bool = False) -> None:
    """Draw a cell in a color, or hatched if the color is None."""
    look = {"facecolor": color, "edgecolor": INK, "linewidth": 1.8 if framed else 0} if color else wasted(LINE)
    draw_box(ax, x + 0.04, y + 0.06, 0.92, 0.88, **look)


def set_up_grid(ax, columns: float, rows: float, title: str, names: Sequence[str] = ()) -> None:
    """Prepare axes for a grid of cells, its first row on top, with the names of its rows."""
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[])
    ax.set_yticks([y + 0.5 for y in range(len(names))], names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    set_panel_title(ax, title)


def token_row(named: Mapping[str, Sequence[tuple[str, Hashable, int]]]) -> Picture:
    """Draw the tokens of several requests side by side in one row per panel, colored by request.

    A request keeps its color from panel to panel. Below its tokens are its name and its columns, as in a slice.

    Args:
        named: for each panel, (text, request, position) of each token.
    """
    columns = max(len(cells) for cells in named.values())
    figure, axes = new_figure(1.4 * len(named) + 0.1, len(named), width=max(3.2, 0.85 * columns + 1))
    color = request_colors(request for cells in named.values() for _, request, _ in cells)
    size = _font_size(
        [token for cells in named.values() for token, _, _ in cells], (figure.get_figwidth() - 0.8) / columns
    )
    described = []
    for ax, (name, cells) in zip(axes, named.items(), strict=True):
        for x, (token, request, position) in enumerate(cells):
            draw_cell(ax, x, 0, color[request])
            write(ax, x + 0.5, -0.2, str(x), SMALL - 1)
            write(ax, x + 0.5, 0.38, token.strip(), size, color=ink_on(color[request]))
            write(ax, x + 0.5, 0.78, str(position), SMALL - 1, color=ink_on(color[request]))
        start, owned = 0, []
        for request, group in groupby(cells, key=lambda cell: cell[1]):
            group = list(group)
            end = start + len(group)
            ax.plot([start + 0.08, end - 0.08], [1.06, 1.06], color=color[request], linewidth=2)
            write(ax, (start + end) / 2, 1.32, f"{request} {start}:{end}")
            texts = " ".join(token.strip() for token, _, _ in group)
            owned.append(f"{request} has columns {start}:{end} ({texts}), from position {group[0][2]}")
            start = end
        set_up_grid(ax, columns, 1, name)
        ax.set(ylim=(1.5, -0.4))
        ax.set_yticks([-0.2, 0.38, 0.78], ["column", "token", "position"])
        described.append(f"{name}: {', '.join(owned)}")
    return Picture(figure, f"Tokens in one row. {'; '.join(described)}.")


def visible_keys(
    named: Mapping[str, Sequence[Sequence[bool]]], tokens: Sequence[str], owners: Sequence[int], title: str = ""
) -> Picture:
    """Draw attention masks side by side: rows are queries, columns are the keys that they attend to.

    Args:
        named: masks [tokens, tokens], True where a query attends to a key.
        tokens: the texts of the tokens.
        owners: the number of each token's request. A cross marks attention to a token of another request.
    """
    count = len(tokens)
    figure = empty_figure(1, title, 0.44 * count * len(named) + 2)
    figure.set_figheight(figure.get_figwidth() / len(named) + 0.5 + 0.3 * bool(title))
    described = []
    panels = figure.subplots(1, len(named), squeeze=False)[0]
    for ax, (name, mask) in zip(panels, named.items(), strict=True):
        set_up_grid(ax, count, count, name)
        across = 0
        for y in range(count):
            for x in range(count):
                own = owners[x] == owners[y]
                color = REQUEST_COLORS[owners[y] % 7] if own else RED
                draw_box(ax, x, y, 0.94, 0.94, color if mask[y][x] else PALE)
                if mask[y][x] and not own:
                    across += 1
                    write(ax, x + 0.47, y + 0.47, "×", color=ink_on(RED))
        ax.set_aspect("equal")
        ax.set_xticks([x + 0.5 for x in range(count)], [token.strip() for token in tokens], rotation=90, fontsize=SMALL)
        names = [token.strip() for token in tokens] if ax is panels[0] else []
        ax.set_yticks([y + 0.5 for y in range(len(names))], names, fontsize=SMALL)
        ax.xaxis.tick_top()
        if ax is panels[0]:
            ax.set_ylabel("query token")
        ax.set_xlabel("key token")
        attended = sum(map(sum, mask))
        described.append(f"{name}: {attended} of {count * count} pairs attend, {across} of them across requests")
    return Picture(figure, f"Attention masks, queries by keys. {'; '.join(described)}.")
