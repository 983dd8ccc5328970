"""The style sheet of all pictures, and their SVG: letters of the page's typeface, and colors that follow a dark page.

The typeface is Inter, whose files the site loads as well. Neutral colors become CSS variables in an SVG; a page that
sets them (docs/_static/site.css) themes its pictures. Colors with a meaning stay, and letters in such a color mix with
the color of the page's letters.
"""

import functools
import html
import io
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from matplotlib import font_manager, rc_context
from matplotlib.figure import Figure

from .colors import BRIGHT, DARK, INK, LABEL, LIGHT_SKY, LINE, MUTED, PAGE, PALE, SMALL, TITLE

FONTS = Path(__file__).parent / "fonts"
for file in FONTS.glob("*.ttf"):
    font_manager.fontManager.addfont(file)

STYLE = {
    "font.family": ["Inter", "DejaVu Sans"],  # the second one for symbols such as ≠
    "font.size": LABEL,
    "text.color": INK,
    "figure.titlesize": TITLE,
    "figure.titleweight": "bold",
    "figure.facecolor": PAGE,
    "axes.titlesize": LABEL,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelsize": SMALL,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "legend.labelcolor": MUTED,
    "legend.handlelength": 1.6,
    "patch.linewidth": 0.7,
    "patch.edgecolor": INK,
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.4,
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in (
        ("color", LINE), ("labelcolor", MUTED), ("labelsize", SMALL), ("major.width", 0.7), ("major.size", 2.5),
    )},
}  # fmt: skip
# The colors of a page, light and dark, and the variables that have them on the site and in JupyterLab.
THEME = {
    "ink": (INK, "#E2E4E8", "color-foreground-primary", "jp-content-font-color1"),
    "muted": (MUTED, "#A9AEB6", "color-foreground-secondary", "jp-content-font-color2"),
    "line": (LINE, "#5A6069", "color-foreground-border", "jp-border-color1"),
    "pale": (PALE, "#2A2D32", "color-background-border", "jp-layout-color2"),
    "page": (PAGE, "#131416", "color-background-primary", "jp-layout-color0"),
    "sky": (LIGHT_SKY, "#1F4258", "color-plot-sky", "color-plot-sky"),
}
HERE = ";".join(f"--plot-{name}:var(--{site},var(--{lab},{light}))" for name, (light, _, site, lab) in THEME.items())
FAMILY = "Inter, system-ui, sans-serif"


def styled(draw: Callable) -> Callable:
    """Return a function that draws in this style, whatever the reader's own settings of matplotlib are."""

    @functools.wraps(draw)
    def drawn(*args, **options):
        with rc_context(STYLE):
            return draw(*args, **options)

    return drawn


def svg_of(figure: Figure, text: str) -> str:
    """Return a figure as an SVG element without a background, for a page of HTML. Equal figures give equal texts."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "picture", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawing = buffer.getvalue()
    view, body = re.search(r'viewBox="([\d. ]+)".*?</style>\s*</defs>(.*)</svg>', drawing, re.DOTALL).groups()
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", _shortened, tag[0]), body)
    used = set(re.findall(r'(?:href="|url\()#(\w+)', body))
    own = sha256((body + text).encode()).hexdigest()[:6]  # equal names in two pictures of a page would clash
    body = re.sub(r' id="([\w.]+)"', lambda found: f' id="{own}{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(href="|url\()#', rf"\1#{own}", body)
    body = re.sub(r" transform=\"rotate\(-0 [^\"]*\"|font-family: 'Inter', 'DejaVu Sans';? ?", "", body)
    body = re.sub(r"<text style=\"[^\"]*", lambda found: _themed_letters(found[0]), body)
    for name, (color, *_) in THEME.items():
        body = re.sub(rf'(: |fill=")({color.lower()})', rf"\1var(--plot-{name}, \2)", body)
    body = re.sub(r"\s*\n\s*", "\n", re.sub(r" xlink:href", " href", body))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" width="100%" role="img" font-family="{FAMILY}" '
        f'style="max-width: {float(view.split()[2]) / 9:.0f}em; stroke-linejoin: round" '  # letters are as large in all
        f'aria-label="{html.escape(text)}">{body.strip()}</svg>'
    )


def _shortened(number: re.Match) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _themed_letters(style: str) -> str:
    """Let letters in a color with a meaning stand out from a dark page as well. `ink_on` chose two others for fills."""
    color = re.search(r"fill: (#\w+)", style)
    if color is None:
        return style + f"; fill: {INK.lower()}"
    if color[1] in {neutral.lower() for neutral in (DARK, BRIGHT, *(colors[0] for colors in THEME.values()))}:
        return style
    return style.replace(color[0], f"fill: color-mix(in srgb, {color[1]} 60%, var(--plot-ink, {INK.lower()}))")


def svg_file_of(figure: Figure, text: str) -> str:
    """Return a figure as an SVG file with a background, dark where the reader prefers that."""
    light, dark = (
        ";".join(f"--plot-{name}:{colors[mode]}" for name, colors in THEME.items()) for mode in (0, 1)
    )  # fmt: skip
    head, _, body = svg_of(figure, text).partition(">")
    width, height = head.split('viewBox="0 0 ')[1].split('"')[0].split()
    head = head.replace('width="100%"', f'width="{width}pt" height="{height}pt"')
    return (
        f"{head}><title>{html.escape(text)}</title><style>svg{{{light}}}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
        f'<rect width="100%" height="100%" style="fill:var(--plot-page)"/>{body}\n'
    )
