"""A drawing of two requests in a server: what its event loop and its engine thread do for them, one after the other."""

from itertools import pairwise

from .colors import INK, MUTED, ORANGE, PALE, SKY, SMALL, ink_on, shade
from .picture import Picture, draw_arrow, draw_box, new_figure, write

LANES = ("clients", "server's event loop", "engine thread")
LIFE = (  # (from lane, to lane, what happens, the requests): a step within one lane, or a message to another one
    (0, 1, "POST A", "A"),
    (1, 1, "validate A", "A"),
    (1, 2, "inbox: add A", "A"),
    (2, 2, "step(): prefill A", "A"),
    (0, 1, "POST B", "B"),
    (2, 1, "token 1 of A", "A"),
    (1, 0, "A: chunk 1", "A"),
    (1, 2, "inbox: add B", "B"),
    (2, 2, "step(): decode A, prefill B", "AB"),
    (2, 1, "tokens of A and B", "AB"),
    (1, 0, "A: chunk 2, B: chunk 1", "AB"),
    (0, 1, "B disconnects", "B"),
    (1, 2, "inbox: abort B", "B"),
    (2, 2, "step(): decode A", "A"),
    (2, 1, "token 3 of A, finished", "A"),
    (1, 0, "A: chunk 3, done", "A"),
)


def life_of_a_request() -> Picture:
    """Draw two requests in a server from top to bottom: A runs to its end, and B's client disconnects."""
    figure, (ax,) = new_figure(6.3, title="The engine computes while clients connect and disconnect")
    ax.set_axis_off()
    xs, colors = (2.5, 6.1, 9.9), {"A": SKY, "B": ORANGE, "AB": INK}
    for x, lane in zip(xs, LANES, strict=True):
        write(ax, x, -0.9, lane, weight="bold")
        ax.plot([x, x], [-0.4, len(LIFE) - 0.4], color=PALE, linewidth=8, zorder=0, solid_capstyle="round")
    chunks = []
    for y, (start, end, text, owner) in enumerate(LIFE):
        if start == end:
            parts = sorted(set(owner))
            for number, part in enumerate(parts):
                wide = 3.5 / len(parts)
                draw_box(ax, xs[start] - 1.75 + number * wide, y - 0.38, wide, 0.76, colors[part])
            write(ax, xs[start], y, text, SMALL, color=ink_on(SKY))
        else:
            color = INK if owner == "AB" else shade(colors[owner], 0.8)
            draw_arrow(ax, (xs[start], y), (xs[end], y), color=color, linewidth=1.5)
            ax.text((xs[start] + xs[end]) / 2, y - 0.08, text, ha="center", va="bottom", fontsize=SMALL)
            if end == 0:
                chunks.append(y)
    spans = [("TTFT", 0, chunks[0], 1.7), ("E2E", 0, chunks[-1], 0.5)]
    spans += [("ITL", top, bottom, 1.7) for top, bottom in pairwise(chunks)]
    for name, top, bottom, x in spans:
        draw_arrow(ax, (x, top), (x, bottom), "<->", color=MUTED, linewidth=0.7)
        ax.text(x - 0.1, (top + bottom) / 2, f"{name}\nof A", ha="right", va="center", fontsize=SMALL)
    ax.set(xlim=(-0.6, 11.7), ylim=(len(LIFE) - 0.3, -1.3))
    steps = "; ".join(
        f"{LANES[start]}: {text}" if start == end else f"{LANES[start]} to {LANES[end]}: {text}"
        for start, end, text, _ in LIFE
    )
    alt = (
        f"Two requests in a server, from top to bottom. {steps}. TTFT of A ends with its first chunk, ITL is the time "
        "between two chunks, and E2E ends with the last one."
    )
    return Picture(figure, alt)
