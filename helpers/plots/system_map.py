"""The map that opens each lesson: the parts of a serving system, and which of them the lesson builds."""

from collections.abc import Collection

from matplotlib.patches import FancyBboxPatch

from .colors import INK, LIGHT_SKY, LINE, MUTED, ORANGE, PAGE, ink_on
from .picture import Picture, draw_arrow, new_figure, set_panel_title, write

# For each part: column and row on the map, and what each lesson adds to it.
PARTS = {
    "Clients": (0, 0, {9: "stream", 10: "send and measure", 18: "arrivals to plan for"}),
    "Router": (1, 0, {17: "chooses a replica", 18: "the real code"}),
    "Server": (2, 0, {9: "HTTP, validation", 10: "a bounded queue"}),
    "Outputs": (0, 1, {9: "text, streamed"}),
    "Block manager": (1, 1, {7: "block tables", 8: "shared blocks", 18: "the real code"}),
    "Scheduler": (2, 1, {3: "fills free rows", 4: "order", 5: "token budget", 18: "the real code"}),
    "Next token": (0, 2, {1: "the largest logit", 11: "sampling", 12: "a mask"}),
    "Forward pass": (1, 2, {1: "tokens to logits", 6: "ragged attention", 16: "2 sums per block", 18: "a cost model"}),
    "Batch": (2, 2, {2: "left-padded rows", 3: "merge, filter", 6: "tokens, no pads"}),
    "Drafts": (0, 3, {13: "guesses to verify"}),
    "KV cache": (1, 3, {1: "keys and values", 7: "in blocks", 16: "shared out by heads"}),
    "Weights": (2, 3, {14: "quantized", 15: "adapters, updates", 16: "shared out"}),
}
# What flows from part to part: a request's path first, then what the forward pass reads.
ARROWS = (
    ("Clients", "Router", "->"), ("Router", "Server", "->"), ("Server", "Scheduler", "->"),
    ("Scheduler", "Batch", "->"), ("Batch", "Forward pass", "->"), ("Forward pass", "Next token", "->"),
    ("Next token", "Outputs", "->"), ("Outputs", "Clients", "->"),
    ("Scheduler", "Block manager", "<->"), ("Block manager", "Forward pass", "->"),
    ("Forward pass", "KV cache", "<->"), ("Weights", "Forward pass", "->"), ("Drafts", "Forward pass", "->"),
)  # fmt: skip
WIDTH, HEIGHT, ACROSS, DOWN = 1.66, 0.62, 2.16, 0.98  # of a box, and from box to box, in inches


def system_map(lesson: int | None = None) -> Picture:
    """Draw the parts of a serving system: framed those that a lesson builds, and dashed those of later lessons.

    Without a lesson, draw all parts and the numbers of the lessons that build them.
    """
    figure, (ax,) = new_figure(4.25)
    ax.set_axis_off()
    ax.set(xlim=(-0.06, 2 * ACROSS + WIDTH + 0.06), ylim=(3 * DOWN + HEIGHT + 0.08, -0.08), aspect="equal")
    for name, (column, row, notes) in PARTS.items():
        left, top = column * ACROSS, row * DOWN
        here, built = lesson in notes, lesson is None or min(notes) < lesson
        look = {"facecolor": ORANGE if here else LIGHT_SKY if built else PAGE, "edgecolor": INK if here else LINE}
        look |= {"linewidth": 2.2 if here else 1, "linestyle": "-" if here or built else (0, (4, 3))}
        style = "round,pad=0,rounding_size=0.1"
        ax.add_patch(FancyBboxPatch((left, top), WIDTH, HEIGHT, boxstyle=style, mutation_aspect=1, **look))
        color = ink_on(look["facecolor"]) if here or built else MUTED
        known = [number for number in notes if lesson is not None and number <= lesson]
        note = notes[max(known)] if known else _lessons(notes if lesson is None else [min(notes)])
        for text, y, size in ((name, 0.21, 11.5), (note, 0.45, 9.5)):
            weight = "bold" if here and text == name else "normal"
            write(ax, left + WIDTH / 2, top + y, text, size, color=color, weight=weight)
    for start, end, kind in ARROWS:
        _draw_arrow(ax, PARTS[start][:2], PARTS[end][:2], kind)
    alt = (
        "Map of a serving system. A request goes from Clients through Router, Server, Scheduler, Batch, Forward pass "
        "and Next token to Outputs, and back to its client."
    )
    if lesson is None:
        set_panel_title(ax, "The parts of a serving system, and the lessons that build them")
        listed = ", ".join(f"{name} ({_lessons(notes)})" for name, (_, _, notes) in PARTS.items())
        return Picture(figure, f"{alt} The lessons that build each part: {listed}.")
    set_panel_title(ax, f"You are here: lesson {lesson} builds the framed parts")
    framed = ", ".join(f"{name} ({notes[lesson]})" for name, (_, _, notes) in PARTS.items() if lesson in notes)
    known = [name for name, (_, _, notes) in PARTS.items() if min(notes) < lesson and lesson not in notes]
    alt += f" Lesson {lesson} builds: {framed}."
    return Picture(figure, alt + f" Built before: {', '.join(known)}." * bool(known))


def _lessons(numbers: Collection[int]) -> str:
    return f"lesson{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _draw_arrow(ax, start: tuple[int, int], end: tuple[int, int], kind: str) -> None:
    """Draw an arrow between two neighboring boxes, (column, row) each, from edge to edge."""
    right, down = end[0] - start[0], end[1] - start[1]
    points = []
    for (column, row), sign in ((start, 1), (end, -1)):
        # Two neighbors on a diagonal meet at their corners.
        x = column * ACROSS + WIDTH / 2 + sign * right * (WIDTH / 2 - 0.1 * bool(down))
        y = row * DOWN + HEIGHT / 2 + sign * down * HEIGHT / 2
        points.append((x, y))
    draw_arrow(ax, *points, kind, shrinkA=2, shrinkB=2, linewidth=1.1, mutation_scale=11)
