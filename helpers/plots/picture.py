"""A picture with a text that describes it, and the language of colors and axes that all pictures share.

A request keeps its color and carries its number. A solid color is useful work or memory in use, and its dark shade
is a prefill. Hatching marks waste: pads, memory without a token, a row that computes for nothing. Gray waits, and pale
is empty. The colors are those of Okabe and Ito, which color-blind readers can tell apart.

Pictures are narrow, because a phone shows them as wide as its screen: the letters must stay large enough to read.
"""

import base64
import io
import textwrap
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
RED, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, GRAY, PALE = "#222222", "#8C8C8C", "#EFEFEF"
REQUEST_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, RED, BLUE)
SERIES_COLORS = (RED, BLUE, GREEN, PURPLE)
WORK_MEANING = {
    "prefill": "prefill",
    "decode": "decode",
    "finished": "finished, still computed",
    "stalled": "stalled by a prefill",
    "empty": "empty row",
}
WIDTH = 6.4  # of a picture, in inches
TITLE, LABEL, SMALL = 11, 10, 9  # font sizes in points


class Picture:
    """A figure and a text that describes it: a notebook shows the figure, a screen reader reads the text."""

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        width = round(self.figure.get_figwidth() * 96)
        return {"image/png": self.png(), "text/plain": repr(self)}, {"image/png": {"alt": self.alt, "width": width}}

    def png(self) -> str:
        """Return the picture as a PNG file, in Base64."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
        return base64.b64encode(buffer.getvalue()).decode()

    def save(self, path) -> None:
        """Write the picture as SVG, with the describing text as its title. Equal pictures give equal bytes."""
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": "picture", "svg.fonttype": "none"}):
            self.figure.savefig(path, format="svg", metadata={"Date": None, "Title": self.alt})


def new_figure(height: float, panels: int = 1, title: str = "", width: float = WIDTH, **options):
    """Return a figure with panels below each other, and the panels' axes. Width and height are in inches."""
    figure = empty_figure(height, title, width)
    axes = figure.subplots(panels, 1, squeeze=False, **options)[:, 0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=SMALL)
    return figure, axes


def empty_figure(height: float, title: str = "", width: float = WIDTH) -> Figure:
    """Return a figure without axes, its title above it on as many lines as it needs."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(textwrap.fill(title, round(12 * width)), x=0.01, ha="left", fontsize=TITLE)
    return figure


def set_panel_title(ax, title: str) -> None:
    """Write the title of a panel above it, on as many lines as it needs."""
    ax.set_title(textwrap.fill(title, round(13 * WIDTH)), loc="left", fontsize=LABEL)


def request_colors(request_ids: Iterable[Hashable]) -> dict:
    """Return a color for each request: a number always has the same one, other ids take them in turn."""
    ids = list(dict.fromkeys(request_ids))
    return {id: REQUEST_COLORS[(id if isinstance(id, int) else turn) % 7] for turn, id in enumerate(ids)}


def shade(color: str, share: float = 0.55) -> str:
    """Return a darker shade of a color, with this share of its brightness."""
    return to_hex([share * part for part in to_rgb(color)])


def ink_on(color: str) -> str:
    """Return the color of letters that has more contrast with a color: dark or white."""
    dark, light = _luminance(INK) + 0.05, _luminance("white") + 0.05  # the contrast of WCAG 2
    return INK if (_luminance(color) + 0.05) ** 2 > dark * light else "white"


def _luminance(color: str) -> float:
    """Return the relative luminance of a color in sRGB, from 0 to 1."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def wasted(color: str = GRAY) -> dict:
    """Return the look of waste: hatching in a color."""
    return {"facecolor": "white", "edgecolor": color, "hatch": "////", "linewidth": 0}


def work_color(work: str, color: str = BLUE) -> str:
    """Return what fills a kind of work in the color of its request."""
    return {"prefill": shade(color), "decode": color, "finished": "#FFFFFF", "stalled": GRAY, "empty": PALE}[work]


def work_look(work: str, color: str = BLUE) -> dict:
    """Return the look of a kind of work in the color of its request."""
    return wasted(color) if work == "finished" else {"facecolor": work_color(work, color), "linewidth": 0}


def add_key(figure: Figure, entries: dict, columns: int = 3) -> None:
    """Write what looks mean below a figure: {meaning: look of a patch, or a line}."""
    handles = [
        Patch(**{"edgecolor": "#BBBBBB", **look, "label": name}) if isinstance(look, dict) else look
        for name, look in entries.items()
    ]
    figure.legend(
        handles=handles, labels=list(entries), loc="outside lower left", ncols=columns, frameon=False, fontsize=SMALL
    )


def label_ends(figure: Figure, ax, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, color) beside their points, and move labels apart that would cover each other or the axis."""
    figure.draw_without_rendering()
    points = 72 / figure.dpi
    ends = [(x, y, textwrap.fill(text, 17), color) for x, y, text, color in sorted(ends, key=lambda end: end[1])]
    across, up = zip(*(ax.transData.transform(end[:2]) * points for end in ends), strict=True)
    half = [6.2 * (text.count("\n") + 1) for _, _, text, _ in ends]  # of the height of a label
    at, axis = list(up), ax.bbox.y0 * points
    for _ in range(50):  # each time, labels give way by half of what is missing
        for low, high in combinations(range(len(ends)), 2):
            missing = half[low] + half[high] - (at[high] - at[low])
            if missing > 0 and abs(across[high] - across[low]) < 100:
                at[low], at[high] = at[low] - missing / 2, at[high] + missing / 2
        at = [max(place, axis + room) for place, room in zip(at, half, strict=True)]
    for (x, y, text, color), moved, own in zip(ends, at, up, strict=True):
        place = {"xytext": (7, moved - own), "textcoords": "offset points", "va": "center", "fontsize": LABEL}
        ax.annotate(text, (x, y), color=shade(color, 0.75), annotation_clip=False, **place)


def label_area(ax, low: Sequence[float], high: Sequence[float], text: str, color: str, least: float) -> bool:
    """Write a text where the area between two stepped curves has most room; say whether it has at least `least`."""
    wide = max(1, round(ax.get_xlim()[1] * 0.016 * len(text)))
    rooms = [(min(high[x : x + wide]) - max(low[x : x + wide]), x) for x in range(len(low) - wide + 1)]
    room, x = max(rooms, default=(0, 0))
    if room < least:
        return False
    box = {"facecolor": color, "linewidth": 0, "pad": 1}
    place = {"ha": "center", "va": "center", "fontsize": LABEL, "color": ink_on(color), "bbox": box}
    ax.text(x + wide / 2, max(low[x : x + wide]) + room / 2, text, **place)
    return True
