"""The site: what a page shows, where its links lead, and that it needs nothing from anywhere else.

The first tests build a site of two small lessons, the others the whole one, and read it in a browser.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from playwright.sync_api import expect

import helpers
from tests.support.browsing import serving

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
BADGE = "[![Open in Colab](https://colab.example/assets/colab-badge.svg)](https://colab.example/1)"


def build(out: Path, *arguments) -> Path:
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "build_site.py", "--strict", "--out", out, *arguments],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def code(source: str, *outputs, tags=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def printed(text: str):
    return new_output("stream", text=text)


PICTURE = new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": "A gray pixel"}})
ERROR = new_output("error", ename="KeyError", evalue="'missing'", traceback=["KeyError: 'missing'"])
WIDE = "  # a comment" + " that is long" * 8
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
NOT_YET = "You have not guessed yet: write a number in the cell above."
LESSONS = {
    "3_continuous_batching.ipynb": [
        new_markdown_cell(
            f"# 3. Rows & columns\n\n{BADGE}\n\nA preemption, then another preemption. About 35 minutes."
            "\n\n[Next](4_scheduling.ipynb), [read](../helpers/batching.py), [text](../LICENSE)"
        ),
        code("the_set_up_cell = 1", tags=["bootstrap"]),
        code("draw_the_map()", PICTURE, tags=["hide-input"]),
        code("print(answer)", printed("42 rows"), tags=["hide-output"]),
        code("print(story)", printed("One table | " * 8 + "\n" + "and a story " * 50)),
        code("guess = ...  # forward passes\nguess_rows = ...  # rows"),
        code("print(compare_guess(guess, 400))", printed(f"400. {NOT_YET}\n8. {NOT_YET}"), tags=["hide-output"]),
        code(f"print(headline){WIDE}", printed("132 passes\n"), printed("instead of 400\n"), tags=["headline"]),
    ],
    "extra/a_paper.ipynb": [new_markdown_cell("# A paper\n\n[Lesson](../3_continuous_batching.ipynb)")],
    "10_stopped.ipynb": [new_markdown_cell("# 10. Stopped"), code("x['missing']", ERROR)],
}


@pytest.fixture(scope="module")
def small_site(tmp_path_factory):
    """Build a site of two lessons, one of which failed."""
    folder = tmp_path_factory.mktemp("course")
    for name, cells in LESSONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        metadata = {"language_info": {"name": "python"}, "course": {"model": "some/model"}}
        nb = new_notebook(cells=cells, metadata=metadata)
        nbformat.write(nb, folder / name)
    return build(folder / "site", "--notebooks", folder, "--without-playground", "--base", "https://example.org/course")


@pytest.fixture(scope="module")
def lesson(small_site):
    return (small_site / "notebooks" / "3_continuous_batching.html").read_text()


@pytest.fixture(scope="module")
def home(small_site):
    return (small_site / "index.html").read_text()


class Links(HTMLParser):
    """The addresses that a page names, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id") or attributes.get("name") or "")
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(attributes["href"])
        elif attributes.get("src"):
            self.loaded.append(attributes["src"])


def broken_links(site: Path) -> list[str]:
    """Return the links and anchors within the site that lead nowhere, and what a page would load from elsewhere."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.loaded + page.links:
            if path == site / "404.html" and link.startswith("/"):  # a server shows this page at any depth
                link = f"{site.as_uri()}{link}{'index.html' if link == '/' else ''}"
            address, anchor = urldefrag(urljoin(path.as_uri(), link))
            if urlsplit(address).scheme != "file":
                if link in page.loaded and not link.startswith("data:"):
                    broken.append(f"{path.relative_to(site)} loads {link}")
                continue
            target = Path(unquote(urlsplit(address).path))
            if not target.is_file() or (target in pages and unquote(anchor) not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def test_the_home_page_lists_the_lessons_of_this_run_and_names_the_model(home):
    row = re.search(r'<tr[^>]*><td><p><a [^>]*href="notebooks/3_continuous_batching.html">.*?</tr>', home, re.S)[0]
    for text in ("3. Rows &amp; columns", "<p>35</p>", "132 passes instead of 400"):
        assert text in row
    assert "with the model <code" in home and "some/model" in home
    assert home.index("3. Rows") < home.index("10. Stopped") < home.index("The lesson stopped early.")
    assert "4_scheduling.html" not in home.replace("exercises/release/4_scheduling/4_scheduling.html", "")
    assert 'href="notebooks/extra/a_paper.html"' in home


def test_a_lesson_has_no_set_up_cell_and_texts_for_its_pictures_and_unfolds_cells_without_a_script(lesson):
    assert "the_set_up_cell" not in lesson
    assert re.search(r'<img alt="A gray pixel"', lesson)
    folded = re.findall(r"<details.*?</details>", lesson, re.S)
    assert any("draw_the_map" in part and "<img" not in part for part in folded)
    assert any("42 rows" in part and "print" not in part for part in folded)
    assert not any("132 passes" in part for part in folded)


@pytest.fixture
def open_lesson(small_site, window):
    address = (small_site / "notebooks" / "3_continuous_batching.html").as_uri()
    return lambda **settings: window(address, site=small_site.as_uri(), **settings)


def test_a_reader_writes_guesses_and_reads_them_beside_the_answers(open_lesson):
    page = open_lesson()
    page.get_by_label("Your guess: forward passes").fill("350")
    page.keyboard.press("Enter")
    answers = page.locator(".cell_output pre").filter(has_text="400. ")
    expect(answers).to_have_text(f"400. You guessed 350.\n8. {NOT_YET}")
    expect(answers).to_be_visible()
    page.get_by_label("Your guess: rows").fill("<b>9</b>")
    expect(answers).to_have_text("400. You guessed 350.\n8. You guessed <b>9</b>.")
    page.get_by_label("Your guess: forward passes").fill("")
    expect(answers).to_have_text(f"400. {NOT_YET}\n8. You guessed <b>9</b>.")


def test_a_lesson_links_its_exercises_colab_and_a_notebook_without_the_answers_that_its_page_folds(lesson, small_site):
    assert re.search(r'href="exercises/release/3_\w+/3_\w+\.html"[^>]*><span[^>]*>Exercises</span>', lesson)
    assert 'href="https://colab.example/1"' in lesson and "colab-badge" not in lesson
    assert 'href="3_continuous_batching.ipynb" download' in lesson
    downloaded = nbformat.read(small_site / "notebooks" / "3_continuous_batching.ipynb", as_version=4).cells
    assert [cell.source for cell in downloaded] == [cell.source for cell in LESSONS["3_continuous_batching.ipynb"]]
    outputs = {cell.source: cell.outputs for cell in downloaded if cell.cell_type == "code"}
    assert outputs["print(answer)"] == outputs["print(compare_guess(guess, 400))"] == []
    assert outputs["draw_the_map()"] == [PICTURE]


def test_the_first_mention_of_a_term_links_to_its_sentence(lesson):
    mentions = re.findall(r"<a [^>]*>preemption</a>", lesson)
    assert len(mentions) == 1 and lesson.count("preemption") > 1
    assert 'href="../docs/glossary.html#preemption"' in mentions[0] and "recomputed later" in mentions[0]


def test_no_link_is_broken_and_nothing_is_loaded_from_elsewhere(small_site):
    assert broken_links(small_site) == []


def test_the_api_lists_every_exported_name_with_its_first_line(small_site):
    index = (small_site / "api" / "index.html").read_text()
    for name in helpers.__all__:
        assert re.search(rf'title="helpers\.[\w.]+\.{name}"', index), name


# --- the whole site, in a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Serve the site of the stored notebooks; return its folder and its address."""
    folder = build(tmp_path_factory.mktemp("site") / "site")
    with serving(folder) as address:
        yield folder, address


def test_no_link_of_the_whole_site_is_broken(site):
    assert broken_links(site[0]) == []


KINDS = [  # one page of each kind
    "notebooks/0_in_ten_minutes.html",
    "index.html",
    "docs/engine.html",
    "SUPPORT.html",
    "api/index.html",
    "api/helpers.engine.html",
    "docs/glossary.html",
    "docs/playground.html",
    "notebooks/3_continuous_batching.html",
    "notebooks/exercises/release/3_continuous_batching/3_continuous_batching.html",
    "search.html?q=preemption",
]


def test_no_page_has_an_error_or_scrolls_to_the_side_on_a_phone(site, window):
    folder, address = site
    page = window(address, site=address, viewport=PHONE)
    scrolls = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    wide = []
    for path in sorted(folder.rglob("*.html")):
        page.goto(address + path.relative_to(folder).as_posix())
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            if page.evaluate(scrolls):
                wide.append((page.url, scheme))
    assert wide == []


@pytest.mark.parametrize(("viewport", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")])
def test_each_kind_of_page_meets_the_rules_of_accessibility(site, window, viewport, scheme):
    folder, address = site
    page = window(address, site=address, viewport=viewport, color_scheme=scheme)
    page.set_default_timeout(60_000)
    problems = []
    for name in filter(lambda name: (folder / name.partition("?")[0]).exists(), KINDS):  # no npm, no playground
        page.goto(address + name)
        page.add_style_tag(content="* { animation: none !important }")
        page.evaluate("document.querySelectorAll('article details').forEach((details) => { details.open = true })")
        for violation in Axe().run(page).response["violations"]:
            problems.append(f"{name}: {violation['id']}: {violation['nodes'][0]['html'][:200]}")
    assert problems == []


@pytest.mark.parametrize("opened_as", ["http", "file"])
def test_search_finds_a_term(site, window, opened_as):
    folder, address = site
    address = address if opened_as == "http" else folder.as_uri() + "/"
    page = window(address + "index.html", site=address)
    page.get_by_role("textbox", name="Search").fill("preemption")
    page.keyboard.press("Enter")
    page.locator("ul.search a").filter(has_text="Preemption").click()
    page.wait_for_url("**/docs/glossary.html*#preemption")
    expect(page.get_by_role("heading", name="Preemption")).to_be_visible()


def test_the_keyboard_skips_the_navigation_and_unfolds_a_cell(site, window):
    address = site[1]
    page = window(address + "notebooks/3_continuous_batching.html", site=address)
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to content")
    cell = page.locator("details.hide").first
    expect(cell.locator("summary")).to_have_accessible_name("Show the source")
    cell.locator("summary").first.focus()
    expect(cell).not_to_have_attribute("open", "")
    page.keyboard.press("Enter")
    expect(cell).to_have_attribute("open", "")
