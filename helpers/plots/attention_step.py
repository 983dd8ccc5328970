"""One step of attention: which keys and values a new token reads, and what of them has to be computed."""

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from .colors import INK, LABEL, SKY, SMALL
from .drawings import CACHED
from .grids import draw_cell
from .picture import Picture, add_key, new_figure, write

TOKENS = ("The", "quick", "brown", "fox", "jumped", "over", "the", "lazy")
SHARES = (0.04, 0.08, 0.09, 0.31, 0.16, 0.06, 0.11, 0.15)


def attention_step(
    tokens: Sequence[str] = TOKENS, shares: Sequence[float] = SHARES, then: str = "dog", title: str = ""
) -> Picture:
    """Draw how the newest token attends to all tokens, and what of that the KV cache holds.

    Args:
        tokens: the texts of the tokens; the last one is computed, and the cache holds the others.
        shares: for each token, how much of its value the newest one takes in; they add up to 1.
        then: the next token, which the last layer's result leads to.
    """
    figure, (ax,) = new_figure(4.0, title=title)
    last, most = len(tokens) - 1, max(shares)
    for x, (token, share) in enumerate(zip(tokens, shares, strict=True)):
        color = SKY if x == last else CACHED
        write(ax, x + 0.5, 0.3, token, weight="bold" if x == last else "normal")
        ax.plot((last + 0.5, x + 0.5), (1.52, 2.26), color=INK, linewidth=0.5 + 4.5 * share / most, alpha=0.45)
        for y in (2.2, 4.4):
            draw_cell(ax, x, y, color)
        ax.add_patch(Rectangle((x + 0.3, 4.1 - 0.62 * share / most), 0.4, 0.62 * share / most, facecolor=INK))
        write(ax, x + 0.5, 3.3, f"{share:.0%}", SMALL)
        ax.plot((x + 0.5, last + 0.5), (5.36, 6.14), color=INK, linewidth=0.5 + 4.5 * share / most, alpha=0.45)
    for y in (0.6, 6.1):
        draw_cell(ax, last, y, "white", framed=True)
    ax.text(
        last - 0.1, 6.58, f"the rest of the pass, then the next token: {then}", ha="right", va="center", fontsize=LABEL
    )
    ax.set(xlim=(0, len(tokens)), ylim=(7.15, 0), xticks=[])
    ax.set_yticks([1.06, 2.66, 3.7, 4.86, 6.56], ["query", "keys", "shares", "values", "sum"], fontsize=LABEL)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    key = {
        "read from the KV cache": {"facecolor": CACHED},
        "computed and kept": {"facecolor": SKY},
        "computed, not kept": {"facecolor": "white", "edgecolor": INK, "linewidth": 1.6},
    }
    add_key(figure, key)
    listed = ", ".join(f"{token} {share:.0%}" for token, share in zip(tokens, shares, strict=True))
    alt = (
        f"One step of attention over {len(tokens)} tokens. The query of the newest one, {tokens[-1]}, is compared with "
        f"the keys of all. The better a key matches, the more of its token's value is taken in: {listed}. The sum "
        f"leads to the next token, {then}. The cache holds {last} of the {len(tokens)} keys and values."
    )
    return Picture(figure, alt)
