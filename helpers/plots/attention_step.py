"""One step of attention: which keys and values a new token reads, and what of them has to be computed."""

from .colors import INK, LABEL, LIGHT_SKY, PAGE, SKY, SMALL
from .grids import draw_cell, set_up_grid
from .picture import Picture, add_key, draw_box, new_figure, write

# How much of each token's value the newest one, the last, takes in. The shares are made up.
SHARES = dict(The=0.04, quick=0.08, brown=0.09, fox=0.31, jumped=0.16, over=0.06, the=0.11, lazy=0.15)


def attention_step(title: str = "") -> Picture:
    """Draw how the newest token of a text attends to all of its tokens, and what of that the KV cache holds."""
    figure, (ax,) = new_figure(4.0, title=title)
    last, most = len(SHARES) - 1, max(SHARES.values())
    for x, (token, share) in enumerate(SHARES.items()):
        strength, line = share / most, {"color": INK, "linewidth": 0.5 + 4.5 * share / most, "alpha": 0.45}
        write(ax, x + 0.5, 0.3, token, weight="bold" if x == last else "normal")
        ax.plot((last + 0.5, x + 0.5), (1.52, 2.26), **line)
        for y in (2.2, 4.4):
            draw_cell(ax, x, y, SKY if x == last else LIGHT_SKY)
        write(ax, x + 0.5, 3.3, f"{share:.0%}", SMALL)
        draw_box(ax, x + 0.3, 4.1 - 0.62 * strength, 0.4, 0.62 * strength, INK, linewidth=0.7)
        ax.plot((x + 0.5, last + 0.5), (5.36, 6.14), **line)
    for y in (0.6, 6.1):
        draw_cell(ax, last, y, PAGE, framed=True)
    ax.text(last - 0.1, 6.58, "the rest of the pass, then the next token: dog", ha="right", va="center", fontsize=LABEL)
    set_up_grid(ax, len(SHARES), 7.15, "")
    ax.set_yticks([1.06, 2.66, 3.7, 4.86, 6.56], ["query", "keys", "shares", "values", "sum"], fontsize=LABEL)
    key = {
        "read from the KV cache": LIGHT_SKY,
        "computed and kept": SKY,
        "computed, not kept": {"facecolor": PAGE, "edgecolor": INK, "linewidth": 1.6},
    }
    add_key(figure, key)
    listed = ", ".join(f"{token} {share:.0%}" for token, share in SHARES.items())
    alt = (
        f"One step of attention over {len(SHARES)} tokens. The query of the newest one, lazy, is compared with the "
        f"keys of all. The better a key matches, the more of its token's value is taken in: {listed}. The sum leads "
        f"to the next token, dog. The cache holds {last} of the {len(SHARES)} keys and values."
    )
    return Picture(figure, alt)
