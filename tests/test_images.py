"""The figures in images/ show what the code does today."""

import importlib.util
import re
from html import unescape
from pathlib import Path

import pytest

IMAGES = Path(__file__).parent.parent / "images"
spec = importlib.util.spec_from_file_location("draw", IMAGES / "draw.py")
draw = importlib.util.module_from_spec(spec)
spec.loader.exec_module(draw)


@pytest.mark.parametrize("name", draw.FIGURES)
def test_a_committed_figure_shows_what_its_script_would_draw_now(name):
    committed = (IMAGES / f"{name}.svg").read_text()
    title = unescape(re.search(r"<title>(.*?)</title>", committed, re.S)[1])
    # The text names all counts, which are the same on every machine; the drawing itself depends on fonts.
    assert title == draw.FIGURES[name]().alt


def test_every_figure_has_a_script():
    assert {path.stem for path in IMAGES.glob("*.svg")} == set(draw.FIGURES)
