"""Pictures of speculative decoding: the draft tokens that a pass verifies, and those that it accepts."""

from collections.abc import Sequence

from ..trace import num_matching
from .colors import GREEN, LABEL, MUTED, ORANGE, PAGE, PALE, RED, SKY, ink_on, shade, wasted
from .grids import set_up_grid
from .picture import Picture, add_key, draw_arrow, draw_box, new_figure, write

NEWEST, ACCEPTED = shade(SKY), SKY
REJECTED = wasted(RED)
DRAFT_KEY = {"newest token": NEWEST, "accepted": ACCEPTED, "rejected": REJECTED}


def verified_draft(newest: str, draft: Sequence[str], chosen: Sequence[str], title: str = "") -> Picture:
    """Draw the tokens of one pass below the tokens that the model chose after each of them.

    Args:
        newest: the newest token of the text.
        draft: the draft tokens.
        chosen: the model's token after the newest one, and after each draft token.
    """
    accepted = num_matching(draft, chosen)
    columns = len(chosen)
    figure, (ax,) = new_figure(2.5, title=title)
    for x, token in enumerate([newest, *draft]):
        look = REJECTED if x > accepted else {"facecolor": ACCEPTED if x else NEWEST}
        draw_box(ax, x + 0.04, 2.06, 0.92, 0.88, **look)
        _write_token(ax, x, 2.5, token, ink_on(look["facecolor"]), boxed=x > accepted)
    for x, token in enumerate(chosen):
        gained = x <= accepted
        draw_box(ax, x + 0.04, 0.06, 0.92, 0.88, ORANGE if gained else PALE)
        _write_token(ax, x, 0.5, token, ink_on(ORANGE) if gained else MUTED)
        draw_arrow(ax, (x + 0.5, 2.0), (x + 0.5, 1.0), linewidth=1.1, shrinkA=2, shrinkB=2)
    for x in range(min(accepted + 1, len(draft))):  # the model's token is compared with the next draft token
        same = x < accepted
        color = GREEN if same else RED
        draw_arrow(ax, (x + 0.75, 0.98), (x + 1.25, 2.02), "<->", color=color, linewidth=1.3, mutation_scale=9)
        box = {"facecolor": PAGE, "linewidth": 0, "pad": 0.8}
        write(ax, x + 1.0, 1.5, "=" if same else "≠", color=shade(color, 0.75), weight="bold", bbox=box)
    set_up_grid(ax, columns, 3, "")
    ax.set_yticks([0.5, 2.5], ["the model\nchooses", "the pass\ncomputes"])
    key = DRAFT_KEY | {"gained by the output": ORANGE, "chosen after a rejected token": PALE}
    add_key(figure, key)
    alt = (
        f"One pass computes the newest token, {newest!r}, and the draft {_listed(draft)}. After these, the model "
        f"chooses {_listed(chosen)}. {accepted} of {len(draft)} draft tokens are accepted. The output gains "
        f"{_listed(chosen[: accepted + 1])}."
    )
    return Picture(figure, alt)


def _listed(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens)) or "(empty)"


def _write_token(ax, x: float, y: float, text: str, color: str, boxed: bool = False) -> None:
    size = min(LABEL, 85 / max(1, len(text.strip())))
    box = {"facecolor": PAGE, "linewidth": 0, "pad": 0.8} if boxed else None
    write(ax, x + 0.5, y, text.strip(), size, color=color, bbox=box)


def draft_staircase(passes: Sequence[tuple[int, int]], title: str = "") -> Picture:
    """Draw which places of an output each pass computed, and what became of its draft tokens.

    Args:
        passes: for each pass after the prefill, the numbers of drafted and of accepted tokens.
    """
    figure, (ax,) = new_figure(0.105 * len(passes) + 1.5, title=title)
    position, furthest = 0, 0
    for y, (drafted, accepted) in enumerate(passes):
        for x in range(position, position + drafted + 1):
            own = {"color": NEWEST if x == position else ACCEPTED}
            look = REJECTED | {"hatch": "//////"} if x > position + accepted else own
            draw_box(ax, x + 0.05, y + 0.05, 0.9, 0.9, **look)
        furthest = max(furthest, position + drafted + 1)
        position += accepted + 1
    ax.set(xlim=(0, furthest), ylim=(len(passes), 0), xlabel="position in the output (tokens)", ylabel="decode pass")
    ticks = range(0, len(passes), 5)
    ax.set_yticks([tick + 0.5 for tick in ticks], [str(tick + 1) for tick in ticks])
    ax.grid(axis="x")
    add_key(figure, DRAFT_KEY)
    drafted, accepted = (sum(column) for column in zip(*passes, strict=True))
    alt = (
        f"A row per decode pass and a column per token of the output. {len(passes)} passes yield {position} tokens: of "
        f"{drafted} draft tokens, {accepted} are accepted and {drafted - accepted} are rejected."
    )
    return Picture(figure, alt)
