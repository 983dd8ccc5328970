"""Slides: a deck has its lesson's pictures with their texts, its predictions without answers, and fetches nothing."""

import os
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import build_slides
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted([*(ROOT / "notebooks").glob("[1-9]*.ipynb"), *(ROOT / "notebooks").glob("extra/*.ipynb")])


class Tags(HTMLParser):
    """The pictures of a page, and the addresses that it loads or leads to."""

    def __init__(self, text: str):
        super().__init__()
        self.pictures, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "img":
            self.pictures.append(attributes.get("alt"))
        self.addresses += [attributes[name] for name in ("src", "href", "srcset", "poster") if name in attributes]


def is_picture(output):
    return any(kind.startswith("image/") or kind == "text/html" for kind in output.get("data", {}))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_deck_has_every_picture_and_prediction_of_its_lesson_and_no_answer_and_loads_only_its_neighbors(path):
    nb, page = nbformat.read(path, as_version=4), build_slides.deck(path)
    tags, text = Tags(page), unescape(re.sub(r"<[^>]+>", "", page))
    outputs = [(cell, output) for cell in nb.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for _, output in outputs if is_picture(output)]
    titles = re.findall(r"<h1[^>]*>", page)
    assert len(titles) == 1 and len(re.findall(r'class="jp-Rendered(?:Image|HTML)', page)) >= len(pictures)
    told = [data["alt"] for output in pictures for data in output.metadata.values() if "alt" in data]
    assert [alt for alt in told if alt not in tags.pictures] == [], "a picture lacks its text"
    assert [alt for alt in tags.pictures if not alt or alt.startswith("No description")] == []
    predictions = sum(cell.source.count("**Predict:**") for cell in nb.cells)
    assert page.count("<strong>Predict:</strong>") == predictions
    assert "</summary>" not in page
    for cell, output in outputs:
        if "hide-output" in cell.metadata.get("tags", []) and output.output_type == "stream":
            assert not any(line.strip() in text for line in output.text.splitlines() if len(line) > 20)
    loaded = [address for address in tags.addresses if not address.startswith(("data:", "#"))]
    assert all(re.match(r"reveal\.js/dist/[\w./]+$", address) for address in loaded), loaded
    assert not re.search(r"""(?:url\(|import|fetch\()\s*["']?https?:""", page)


def test_badges_and_links_of_a_lesson_are_left_out_and_a_prediction_keeps_the_paragraph_before_it():
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    badge = f"[![Open in Colab]({image})](https://colab.research.google.com/github/a/b/blob/v1/n.ipynb)"
    cells = [
        nbformat.v4.new_markdown_cell(f"# 7. Title\n\n{badge}\n\nThe idea ([paper](https://a.example)).\n\nMore."),
        nbformat.v4.new_markdown_cell("Far.\n\n## Part\n\nEarlier.\n\nClose by.\n\n**Predict:** how many?"),
        nbformat.v4.new_markdown_cell("## Try it\n\n1. First?\n\n<details>one</details>\n\n2. Second?"),
    ]
    texts = [cell.source.split() for cell in build_slides.slides(nbformat.v4.new_notebook(cells=cells), "Why?")]
    assert [" ".join(words) for words in texts] == [
        "# 7. Title The idea (paper).",
        "### Part Close by. **Predict:** how many?",
        "### For the class Why?",
        "### Try it First?",
        "### Try it Second?",
    ]


# The visible parts of a slide that reach beyond the window.
OUTSIDE = """() => [...Reveal.getCurrentSlide().querySelectorAll("*")].filter((part) => {
    const {left, top, right, bottom} = part.getBoundingClientRect();
    return part.checkVisibility() && (left < 0 || top < 0 || right > innerWidth || bottom > innerHeight);
}).map((part) => part.outerHTML.slice(0, 80))"""


@pytest.mark.slow
def test_every_slide_fits_on_a_screen_of_1280_by_720_and_opens_from_a_file_without_a_network(browser, tmp_path, capsys):
    if build_slides.main(out=tmp_path):
        (pytest.fail if os.environ.get("CI_BROWSER") == "1" else pytest.skip)(capsys.readouterr().out)
    context = browser.new_context(viewport={"width": 1280, "height": 720}, offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda entry: wrong.append(entry.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or wrong.append(request.url))
    for path in sorted(tmp_path.glob("*.html")):
        page.goto(path.as_uri())
        page.wait_for_selector(".reveal.ready")
        for number in range(page.evaluate("Reveal.getTotalSlides()")):
            page.evaluate("number => Reveal.slide(number)", number)
            wrong += [f"{path.stem}, slide {number + 1}: {part}" for part in page.evaluate(OUTSIDE)]
    context.close()
    assert len(list(tmp_path.glob("*.html"))) == len(LESSONS) and wrong == []
