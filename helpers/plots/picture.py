"""A picture with a text that describes it, and the colours and axes that all pictures share.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import base64
import io

from matplotlib.figure import Figure

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
RED, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
INK, GRAY, PALE = "#222222", "#8C8C8C", "#EFEFEF"
REQUEST_COLORS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, RED, BLUE)
WORK_COLORS = {"prefill": ORANGE, "decode": BLUE, "finished": GRAY, "stalled": PURPLE, "empty": PALE}
WORK_MEANING = {
    "prefill": "prefill: reads a prompt, yields the first token",
    "decode": "decode: yields one more token",
    "finished": "finished: waits for the longest request",
    "stalled": "stalled: waits for a prefill",
    "empty": "empty: no request",
}


class Picture:
    """A figure and a text that describes it: a notebook shows the figure, a screen reader reads the text."""

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def __repr__(self) -> str:
        return f"Picture: {self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
        width = round(self.figure.get_figwidth() * 96)
        png = base64.b64encode(buffer.getvalue()).decode()
        return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"alt": self.alt, "width": width}}

    def save(self, path) -> None:
        """Write the picture as SVG, with the describing text as its title. Equal pictures give equal bytes."""
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": "picture", "svg.fonttype": "none"}):
            self.figure.savefig(path, format="svg", metadata={"Date": None, "Title": self.alt})


def new_figure(width: float, height: float, panels: int = 1, **options):
    """Return a figure with panels below each other, and the panels' axes. Width and height are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False, **options)[:, 0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
