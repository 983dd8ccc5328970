"""Draw the figures of the README and of the site's home page: `make images`. The race is run by the embedded model.

The race moves where the reader's system allows motion: two veils leave both timelines at the same speed.
The lessons do not link these files, because Colab cannot show relative pictures; their cells draw their own.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers import generate_continuous, generate_static, plots, workloads
from helpers.plots.player import veil

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
            path.write_text(in_motion(path.read_text(encoding="utf-8"), picture), encoding="utf-8")
        print(f"{name}.svg: {picture.alt}")


if __name__ == "__main__":
    main()
