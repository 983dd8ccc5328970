"""A picture with a text that describes it, and what pictures consist of: axes, titles, keys and labels."""

import base64
import io
import textwrap
from collections.abc import Iterable

from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from .colors import INK, LABEL, LINE, WIDTH
from .style import svg_file_of, svg_of


class Picture:
    """A figure and a text that describes it: a notebook shows the figure, a screen reader reads the text."""

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        """Return the picture as a PNG file, with its SVG in the metadata, which the site shows in its own theme."""
        width = round(self.figure.get_figwidth() * 96)
        metadata = {"alt": self.alt, "width": width, "svg": self.svg()}
        return {"image/png": self.png(), "text/plain": repr(self)}, {"image/png": metadata}

    def png(self) -> str:
        """Return the picture as a PNG file, in Base64."""
        drawn, file = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=144)
        Image.open(drawn).convert("RGB").quantize(128).save(file, "png", optimize=True)  # a third of the bytes
        return base64.b64encode(file.getvalue()).decode()

    def save(self, path) -> None:
        """Write the picture as SVG, with the describing text as its title. Equal pictures give equal bytes."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(svg_file_of(self.figure, self.alt))

    def svg(self) -> str:
        """Return the picture as an SVG element for a page, whose colors it takes."""
        return svg_of(self.figure, self.alt)


def new_figure(height: float, panels: int = 1, title: str = "", width: float = WIDTH, **options):
    """Return a figure with panels below each other, and the panels' axes. Width and height are in inches."""
    figure = empty_figure(height, title, width)
    return figure, figure.subplots(panels, 1, squeeze=False, **options)[:, 0]


def empty_figure(height: float, title: str = "", width: float = WIDTH) -> Figure:
    """Return a figure without axes, at most WIDTH wide, its title above it on as many lines as it needs."""
    width = min(width, WIDTH)
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(textwrap.fill(title, round(10.5 * width)), x=0.01, ha="left")
    return figure


def set_panel_title(ax, title: str) -> None:
    """Write the title of a panel above it, on as many lines as it needs."""
    ax.set_title(textwrap.fill(title, round(13 * WIDTH)))


def name_lanes(ax, names: Iterable, label: str) -> None:
    """Let lanes of height 1 begin at the top, write their names beside them, and what they are beside the axis."""
    names = list(map(str, names))
    ax.set(ylim=(len(names), 0), ylabel=label)
    ax.set_yticks([y + 0.5 for y in range(len(names))], names)


def write(ax, x: float, y: float, text: str, size: float = LABEL, **look) -> None:
    """Write a text whose center is at a point."""
    ax.text(x, y, text, ha="center", va="center", fontsize=size, **look)


def draw_box(ax, x: float, y: float, width: float, height: float, color: str = "none", **look) -> None:
    """Draw a rectangle from a corner, without a line around it unless its look has one."""
    ax.add_patch(Rectangle((x, y), width, height, **{"facecolor": color, "linewidth": 0, **look}))


def draw_arrow(ax, start: tuple[float, float], end: tuple[float, float], style: str = "->", **look) -> None:
    """Draw an arrow from point to point, without gaps at its ends unless its look has them."""
    look = {"arrowstyle": style, "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, **look}
    ax.annotate("", end, start, arrowprops=look)


def add_key(figure: Figure, entries: dict, columns: int = 3) -> None:
    """Write what looks mean below a figure: {meaning: color or look of a patch, several of these, or a line}."""

    def handle(look):
        if isinstance(look, list):
            return tuple(map(handle, look))
        look = {"facecolor": look} if isinstance(look, str) else look
        return Patch(**{"edgecolor": LINE, **look}) if isinstance(look, dict) else look

    figure.legend(
        handles=[handle(look) for look in entries.values()], labels=list(entries), loc="outside lower left",
        ncols=columns, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip


def label_ends(figure: Figure, ax, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, color) beside their points, each at least a label's height above the one below it."""
    figure.draw_without_rendering()
    points, top = 72 / figure.dpi, {}
    for x, y, text, color in sorted(ends, key=lambda end: end[1]):
        text = textwrap.fill(text, 17)
        height = 12.4 * (text.count("\n") + 1)
        up = ax.transData.transform((x, y))[1] * points
        middle = max(up, top.get(x, ax.bbox.y0 * points) + height / 2)
        top[x] = middle + height / 2
        style = {"xytext": (7, middle - up), "textcoords": "offset points", "va": "center"}
        ax.annotate(text, (x, y), color=color, annotation_clip=False, **style)
