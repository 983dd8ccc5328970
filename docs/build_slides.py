"""Make a deck of slides from each lesson's stored pictures: what `make slides` does.

nbconvert exports the decks for reveal.js, which comes from npm and is copied beside them, so they open from a file and
without a network. A rule chooses the slides: the title, each picture, each prediction without its answer, a question
for the class (docs/teaching.md), and the questions of "Try it". Lessons need no metadata for it.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbconvert.exporters import SlidesExporter
from nbformat import NotebookNode
from npm_package import npm_package

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "notebooks"))

from colab import BADGE  # noqa: E402

REVEAL = "5.2.1"
BLANK = "\n\n"
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\([^()\s]+\)")
EXPORTER = SlidesExporter(
    template_file=str(DOCS / "templates" / "slides.html.j2"),
    reveal_url_prefix="reveal.js",
    reveal_theme="white",
    reveal_transition="none",
    reveal_number="c/t",
    reveal_width="1280",
    reveal_height="720",
    exclude_input=True,
    exclude_input_prompt=True,
    exclude_output_prompt=True,
)


PICTURES = ("image/png", "image/svg+xml", "text/html")


def questions_for_the_class() -> dict[str, str]:
    """Return the question of each lesson, by the lesson's number, from the scripts of docs/teaching.md."""
    page = (DOCS / "teaching.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+\?) \|", page, re.MULTILINE))


def slides(nb: NotebookNode, question: str = "") -> Iterator[NotebookNode]:
    """Yield the cells of a lesson's deck; a cell with a `slideshow` begins a slide.

    Args:
        nb: the lesson as stored.
        question: one more question for the class, or "".
    """
    heading = to_try = ""
    for cell in nb.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                if any(kind in output.get("data", {}) for kind in PICTURES):
                    yield text_slide(f"### {heading}")
                    yield nbformat.v4.new_code_cell(outputs=[output])
            continue
        text = LINK.sub(r"\1", re.sub(BADGE.pattern, "", cell.source))  # links and badges would lead nowhere
        for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
            if section.startswith("#"):
                is_first = not heading
                title, _, section = section.partition("\n")
                heading = title.strip("# ")
                if is_first:
                    yield text_slide(f"# {heading}\n\n{section.strip().partition(BLANK)[0]}")
            context, *predictions = section.split("**Predict:**")
            for prediction in predictions:
                yield text_slide(f"### {heading}\n\n{context.strip().rpartition(BLANK)[2]}\n\n**Predict:**{prediction}")
                context = ""
            if heading == "Try it":
                to_try += section
    if question:
        yield text_slide(f"### For the class\n\n{question}")
    to_try = re.sub(r"<details>.*?</details>", "", to_try, flags=re.DOTALL)
    for text in re.split(r"^\d+\. ", to_try, flags=re.MULTILINE)[1:]:
        yield text_slide(f"### Try it\n\n{text}")


def text_slide(text: str) -> NotebookNode:
    """Return a cell that begins a slide."""
    return nbformat.v4.new_markdown_cell(text, metadata={"slideshow": {"slide_type": "slide"}})


def deck(path: Path) -> str:
    """Return the page with a lesson's slides. It loads reveal.js from the folder `reveal.js` beside it."""
    nb = nbformat.read(path, as_version=4)
    number = path.name.partition("_")[0]
    nb.cells = list(slides(nb, questions_for_the_class().get(number, "")))
    nb.metadata.title = nb.cells[0].source.partition("\n")[0].strip("# ")
    return EXPORTER.from_notebook_node(nb)[0]


def main(lessons: Path = ROOT / "notebooks", out: Path = ROOT / "build" / "slides") -> int:
    """Write the deck of every lesson; return the exit code."""
    reveal, reason = npm_package("reveal.js", REVEAL, ROOT / "build" / "cache")
    if reveal is None:
        print(f"The slides need reveal.js, and {reason}. Install npm, connect to a network, and try again.")
        return 1
    shutil.copytree(reveal / "dist", out / "reveal.js" / "dist", dirs_exist_ok=True)
    paths = [*lessons.glob("[1-9]*.ipynb"), *lessons.glob("extra/*.ipynb")]
    for old in out.glob("*.html"):
        old.unlink()
    for path in paths:
        (out / f"{path.stem}.html").write_text(deck(path), encoding="utf-8")
    print(f"{len(paths)} decks are in {os.path.relpath(out)}: open one in a browser. Arrows turn the slides.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
