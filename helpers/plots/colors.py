"""The language of colors and sizes that all pictures share.

A request keeps its color and carries its number. A solid color is useful work or memory in use, and its dark shade
is a prefill. Hatching marks waste: pads, memory without a token, a row that computes for nothing. Gray waits, and pale
is empty. The requests' colors are those of Okabe and Ito, which color-blind readers can tell apart. Nothing else has
them: what belongs to no request is `BLUE`, what is wrong is `RED`, and curves have the colors of `SERIES_COLORS`.

Pictures are narrow, because a phone shows them as wide as its screen: the letters must stay large enough to read.
style.py has the typeface and the lines. The neutral colors (ink, lines, pale, the page) follow a dark page there.
"""

from collections.abc import Hashable, Iterable

from matplotlib.colors import to_hex, to_rgb

SKY, ORANGE, GREEN, PURPLE, YELLOW = "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442"
REQUEST_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, "#D55E00", "#0072B2")
BLUE, RED, LIGHT_BLUE = "#5A63C4", "#C8323F", "#A9AEE0"
SERIES_COLORS = (BLUE, "#B26B2B", "#128A8A", "#9B4F96", "#6B7688", "#7D8A2E", LIGHT_BLUE)
INK, MUTED, LINE, PALE, PAGE = "#22262B", "#5F656D", "#BCC0C6", "#EDEEF0", "#FFFFFF"
LIGHT_SKY = "#C4E3F6"  # dark letters stay readable on it
GRAY, DARK, BRIGHT = "#8C8C8C", "#212121", "#FEFEFE"  # the same on a dark page
WORK_MEANING = {
    "prefill": "prefill",
    "decode": "decode",
    "finished": "finished, still computed",
    "stalled": "stalled by a prefill",
    "empty": "empty row",
}
WIDTH = 6.4  # of a picture, in inches
TITLE, LABEL, SMALL = 12.5, 10.5, 9.5  # font sizes in points


def request_colors(request_ids: Iterable[Hashable]) -> dict:
    """Return a color for each request: a number always has the same one, other ids take them in turn."""
    ids = list(dict.fromkeys(request_ids))
    return {id: REQUEST_COLORS[(id if isinstance(id, int) else turn) % 7] for turn, id in enumerate(ids)}


def shade(color: str, share: float = 0.55) -> str:
    """Return a darker shade of a color, with this share of its brightness."""
    return to_hex([share * part for part in to_rgb(color)])


def ink_on(color: str) -> str:
    """Return the color of letters that has more contrast with a color: dark, bright, or that of the page."""
    if to_hex(color).upper() in (PAGE, PALE, LIGHT_SKY):
        return INK
    red, green, blue = (part**2.2 for part in to_rgb(color))  # linear light
    return DARK if 0.21 * red + 0.72 * green + 0.07 * blue > 0.21 else BRIGHT


def wasted(color: str = GRAY) -> dict:
    """Return the look of waste: hatching in a color."""
    return {"facecolor": PAGE, "edgecolor": color, "hatch": "////", "linewidth": 0}


def work_look(work: str, color: str = BLUE) -> dict:
    """Return the look of a kind of work in the color of its request."""
    if work == "finished":
        return wasted(color)
    fills = {"prefill": shade(color), "decode": color, "stalled": GRAY, "empty": PALE}
    return {"facecolor": fills[work], "linewidth": 0}


def work_key(work: str) -> dict | list[dict]:
    """Return the looks of a kind of work in a key: in several requests' colors, if it has its request's."""
    own = work in ("prefill", "decode", "finished")
    return [work_look(work, color) for color in REQUEST_COLORS[:3]] if own else work_look(work)
