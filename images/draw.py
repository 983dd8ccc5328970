"""Draw the figures of the README and of the site's home page: `make images`. The race is run by the embedded model.

The race moves where the reader's system allows motion: two veils leave both timelines at the same speed.
The lessons do not link these files, because Colab cannot show relative pictures; their cells draw their own.
"""

import argparse
import base64
import io
import re
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers import generate_continuous, generate_static, plots, workloads
from helpers.plots.player import veil
from helpers.plots.style import FONTS

VEIL = (
    "<style>.veil{transform:scaleX(0);transform-box:fill-box;transform-origin:right}@media(prefers-reduced-motion:"
    "no-preference){.veil{animation:race 5s linear}}@keyframes race{from{transform:none}}</style>"
)


def race() -> plots.Picture:
    """Draw lesson 3's race: static batching above, continuous batching below."""
    requests = workloads.race()
    static, continuous = generate_static(requests, 8), generate_continuous(requests, 8)
    return plots.slot_timeline({"static batching": static.trace, "continuous batching": continuous.trace})


def in_motion(svg: str, picture: plots.Picture) -> str:
    """Return an SVG file with a veil over each of its panels that moves to the right, once, in five seconds."""
    veils = "".join(map(veil, picture.figure.axes))
    return svg.replace("</svg>", f"{VEIL}{veils}</svg>")


def preview(picture: plots.Picture, path: Path) -> None:
    """Write what other sites show beside a link, 1200 by 630 pixels: the race below the course's name."""
    race = Image.open(io.BytesIO(base64.b64decode(picture.png()))).convert("RGB")
    card = Image.new("RGB", (1200, 630), "white")
    race.thumbnail((1120, 480))
    card.paste(race, (40, 140))
    static, continuous = re.findall(r"(\d+) forward passes", picture.alt)
    for text, name, size, at in (
        ("Continuous batching, from one token to a server", "Bold", 44, (48, 34)),
        ("how LLM servers keep every row busy", "Regular", 28, (48, 92)),
        (static, "Bold", 150, (680, 180)),
        (continuous, "Bold", 150, (680, 390)),
        ("forward passes", "Regular", 40, (680, 550)),
    ):
        font = ImageFont.truetype(FONTS / f"Inter-{name}.ttf", size)
        ImageDraw.Draw(card).text(at, text, "#22262B", font)
    card.quantize(64).save(path, optimize=True)


FIGURES = {"race": race, "system_map": plots.system_map}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    out = parser.parse_args().out
    for name, figure in FIGURES.items():
        picture = figure()
        path = out / f"{name}.svg"
        picture.save(path)
        if name == "race":
            preview(picture, out / "preview.png")
            path.write_text(in_motion(path.read_text(encoding="utf-8"), picture), encoding="utf-8")
        print(f"{name}.svg: {picture.alt}")


if __name__ == "__main__":
    main()
