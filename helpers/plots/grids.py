"""Grids: batches token by token, and attention masks."""

from collections.abc import Hashable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .picture import GRAY, INK, PALE, RED, REQUEST_COLORS, SKY, Picture, new_figure


def token_grid(
    grids: Mapping[str, Sequence[Sequence[str]]],
    masks: Mapping[str, Sequence[Sequence[int]]],
    positions: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Picture:
    """Draw tokens as grids with one row per request: real tokens in colour, pads hatched.

    Args:
        grids: for each panel, the texts of the tokens.
        masks: for each panel, its attention mask: 1 for a real token, 0 for a pad.
        positions: for each panel, the position ids, drawn in small digits below the tokens.
    """
    height = sum(0.5 * len(grid) + 0.55 for grid in grids.values())
    columns = max(len(row) for grid in grids.values() for row in grid)
    figure, axes = new_figure(min(11, 0.95 * columns + 1), height, len(grids))
    for ax, (title, grid) in zip(axes, grids.items(), strict=True):
        for y, row in enumerate(grid):
            for x, token in enumerate(row):
                real = masks[title][y][x]
                draw_cell(ax, x, y, REQUEST_COLORS[y % 7] if real else None)
                style = {"ha": "center", "va": "center", "color": INK if real else GRAY}
                ax.text(x + 0.5, y + (0.4 if positions else 0.5), token, fontsize=9, **style)
                if positions:
                    ax.text(x + 0.5, y + 0.8, str(positions[title][y][x]), fontsize=7, **style)
        set_up_grid(ax, max(map(len, grid)), len(grid), title)
        ax.set_yticks([y + 0.5 for y in range(len(grid))], [f"request {y}" for y in range(len(grid))])
    described = []
    for title in grids:
        pads = [len(row) - sum(row) for row in masks[title]]
        described.append(f"{title}: pads per row {pads}")
    return Picture(figure, f"Grid of tokens. {'; '.join(described)}.")


def batches(named: Mapping[str, Mapping]) -> Picture:
    """Draw batches below each other, for example before and after a verb: a row per request and a column per token.

    Tokens are coloured, those that the next forward pass reads are framed, and left padding is hatched.
    """
    columns = max(batch["attention_mask"].size(1) for batch in named.values())
    rows = [max(1, len(batch["request_ids"])) + 0.9 for batch in named.values()]
    figure, axes = new_figure(min(10, 0.42 * columns + 3.4), 0.38 * sum(rows) + 0.45, len(named), height_ratios=rows)
    ids = list(dict.fromkeys(request_id for batch in named.values() for request_id in batch["request_ids"]))
    color = {request_id: REQUEST_COLORS[index % 7] for index, request_id in enumerate(ids)}
    for ax, (title, batch) in zip(axes, named.items(), strict=True):
        mask = batch["attention_mask"].tolist()
        cached = batch["attention_mask"].size(1) - batch["input_ids"].size(1)
        for y, request_id in enumerate(batch["request_ids"]):
            for x, real in enumerate(mask[y]):
                draw_cell(ax, x, y, color[request_id] if real else None, framed=bool(real) and x >= cached)
        set_up_grid(ax, columns, max(1, len(mask)), title)
        labels = [
            f"{request_id}: {'done' if left == 0 else f'{left} to go'}"
            for request_id, left in zip(batch["request_ids"], batch["tokens_remaining"], strict=True)
        ]
        ax.set_yticks([y + 0.5 for y in range(len(labels))], labels)
        if not labels:
            ax.text(columns / 2, 0.5, "no rows", ha="center", va="center", color=GRAY)
    figure.legend(
        handles=[
            Patch(facecolor=SKY, edgecolor="white", label="key and value in the cache"),
            Patch(facecolor="white", edgecolor=INK, linewidth=1.6, label="token to read next"),
            Patch(facecolor="white", edgecolor=GRAY, hatch="////", label="left padding (mask 0)"),
        ],
        loc="outside lower left", ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    return Picture(figure, " ".join(f"{title}: {_describe(batch)}." for title, batch in named.items()))


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
    cells, different = {}, []
    for name, grid in (("expected", expected), ("yours", actual)):
        cells[name] = {
            (y, x + columns - len(row)): "" if cell is None else str(cell)
            for y, row in enumerate(grid)
            for x, cell in enumerate(row)
        }
    for cell in sorted(cells["expected"] | cells["yours"]):
        if cells["expected"].get(cell) != cells["yours"].get(cell):
            different.append(cell)
    hatched = {"" if pad is None else str(pad) for pad in pads}
    for ax, name in zip(figure.subplots(1, 2), cells, strict=True):
        for (y, x), text in cells[name].items():
            draw_cell(ax, x, y, None if text in hatched else REQUEST_COLORS[y % 7])
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9, color=INK)
        if name == "yours":
            for y, x in different:
                frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8, "linestyle": "--"}
                ax.add_patch(Rectangle((x + 0.06, y + 0.08), 0.88, 0.84, **frame))
                ax.text(x + 0.93, y + 0.14, "≠", ha="right", va="top", fontsize=9, color=INK, weight="bold")
        set_up_grid(ax, columns, rows, name)
        ax.set_yticks([y + 0.5 for y in range(rows)], [f"row {y}" for y in range(rows)])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    described = []
    for y, x in different[:8]:
        one, other = (cells[name].get((y, x), "nothing") or "a pad" for name in ("expected", "yours"))
        described.append(f"row {y}, column {x}: expected {one}, got {other}")
    more = f"; and {len(different) - 8} more" if len(different) > 8 else ""
    return Picture(figure, f"{title or 'Two grids'}: {'; '.join(described) or 'no difference'}{more}.")


def _describe(batch: Mapping) -> str:
    if not batch["request_ids"]:
        return "no rows"
    pads = (batch["attention_mask"] == 0).sum(dim=1).tolist()
    cached = batch["attention_mask"].size(1) - batch["input_ids"].size(1)
    rows = ", ".join(
        f"request {id} with {n} pad{'s' * (n != 1)}" for id, n in zip(batch["request_ids"], pads, strict=True)
    )
    return f"{cached} cached columns, {batch['input_ids'].size(1)} to read; {rows}"


def draw_cell(ax, x: int, y: int, color: str | None, framed: bool = False) -> None:
    """Draw a cell in a colour, or hatched if the colour is None."""
    if color is None:
        look = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}
    else:
        look = {"facecolor": color, "edgecolor": INK, "linewidth": 1.8 if framed else 0}
    ax.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, **look))


def set_up_grid(ax, columns: int, rows: int, title: str) -> None:
    """Prepare axes for a grid of cells, its first row on top."""
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, loc="left", fontsize=10)


def token_row(named: Mapping[str, Sequence[tuple[str, Hashable, int]]]) -> Picture:
    """Draw the tokens of several requests side by side in one row per panel, coloured by request.

    A request keeps its colour from panel to panel.

    Args:
        named: for each panel, (text, request, position) of each token. The position is drawn below the text.
    """
    columns = max(len(cells) for cells in named.values())
    figure, axes = new_figure(min(11, 0.85 * columns + 0.6), 0.95 * len(named) + 0.4, len(named))
    requests = list(dict.fromkeys(request for cells in named.values() for _, request, _ in cells))
    color = {request: REQUEST_COLORS[index % 7] for index, request in enumerate(requests)}
    for ax, (title, cells) in zip(axes, named.items(), strict=True):
        for x, (token, request, position) in enumerate(cells):
            draw_cell(ax, x, 0, color[request])
            ax.text(x + 0.5, 0.4, token, ha="center", va="center", fontsize=9, color=INK)
            ax.text(x + 0.5, 0.8, str(position), ha="center", va="center", fontsize=7, color=INK)
        set_up_grid(ax, columns, 1, title)
        ax.set_yticks([])
    handles = [Patch(facecolor=color[request], label=str(request)) for request in requests]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    described = [
        f"{title}: " + ", ".join(f"{token.strip()} ({request}, {position})" for token, request, position in cells)
        for title, cells in named.items()
    ]
    return Picture(figure, f"Tokens in one row, each with its request and position. {'; '.join(described)}.")


def who_sees_whom(
    named: Mapping[str, Sequence[Sequence[bool]]], tokens: Sequence[str], owners: Sequence[int]
) -> Picture:
    """Draw attention masks side by side: rows are queries, columns are the keys that they attend to.

    Args:
        named: masks [tokens, tokens], True where a query attends to a key.
        tokens: the texts of the tokens.
        owners: the number of each token's request. A cross marks attention to a token of another request.
    """
    count = len(tokens)
    figure = Figure(figsize=(min(11, 0.44 * count * len(named) + 2), 0.34 * count + 1.4), layout="constrained")
    described = []
    for ax, (title, mask) in zip(figure.subplots(1, len(named), squeeze=False)[0], named.items(), strict=True):
        ax.spines[:].set_visible(False)
        across = 0
        for y in range(count):
            for x in range(count):
                own = owners[x] == owners[y]
                color = REQUEST_COLORS[owners[y] % 7] if own else RED
                ax.add_patch(Rectangle((x, y), 0.94, 0.94, facecolor=color if mask[y][x] else PALE, linewidth=0))
                if mask[y][x] and not own:
                    across += 1
                    ax.text(x + 0.47, y + 0.47, "×", ha="center", va="center", color="white", fontsize=10)
        ax.set_xlim(0, count)
        ax.set_ylim(count, 0)
        ax.set_xticks([x + 0.5 for x in range(count)], [token.strip() for token in tokens], rotation=90, fontsize=8)
        ax.set_yticks([y + 0.5 for y in range(count)], [token.strip() for token in tokens], fontsize=8)
        ax.tick_params(length=0)
        ax.xaxis.tick_top()
        ax.set_ylabel("query token")
        ax.set_xlabel("key token")
        ax.set_title(title, loc="left", fontsize=10)
        attended = sum(map(sum, mask))
        described.append(f"{title}: {attended} of {count * count} pairs attend, {across} of them across requests")
    return Picture(figure, f"Attention masks, queries by keys. {'; '.join(described)}.")
