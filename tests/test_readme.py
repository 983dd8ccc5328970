"""README.md and the pages in docs/ say what is true: examples run, tables are the server's, links lead somewhere."""

import re
from pathlib import Path

import pytest

from helpers import Engine
from helpers.server.app import make_app
from helpers.server.protocol import ChatRequest, CompletionRequest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
SERVER_PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
PARAMETERS = CompletionRequest.model_fields | ChatRequest.model_fields


def table(title: str) -> list[list[str]]:
    """Return the cells of the rows below a title of the server's page."""
    section = re.search(rf"^#+ {title}\n(.*?)(?=^#)", SERVER_PAGE, re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return make_app(Engine(), adapter_folder=str(tmp_path_factory.mktemp("adapters")))


def test_the_table_of_addresses_has_every_address_of_the_server(app):
    told = {address for row in table("Addresses") for address in re.findall(r"`((?:GET|POST) \S+)`", row[0])}
    routes = [route for route in app.routes if hasattr(route, "methods")]
    here = {f"{method} {route.path}" for route in routes for method in route.methods - {"HEAD"}}
    assert told == {address.replace("{name:path}", "{name}") for address in here}


def test_the_table_of_parameters_has_every_parameter_and_says_which_request_it_is_of():
    told = {name: row[1] for row in table("Parameters") for name in re.findall(r"`(\w+)`", row[0])}
    assert set(told) == set(PARAMETERS)
    of = {"completions": [CompletionRequest], "chat": [ChatRequest], "both": [CompletionRequest, ChatRequest]}
    for name, requests in told.items():
        assert all(name in request.model_fields for request in of[requests]), name
        both = name in CompletionRequest.model_fields and name in ChatRequest.model_fields
        assert not both or requests == "both", name


def examples(text: str) -> list[str]:
    """Return the Python examples of a page that need neither a server nor the inside of an engine."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "self.scheduler" not in block and "openai" not in block]


@pytest.mark.parametrize("page", [name for name, text in TEXTS.items() if examples(text)])
def test_the_examples_of_a_page_run_one_after_another(page):
    """Of a long simulation, a tenth is enough."""
    namespace = {}
    for block in examples(TEXTS[page]):
        block = block.replace("path/to/folder", str(ROOT / "helpers" / "tiny_model")).replace("2000", "200")
        exec(block, namespace)


@pytest.mark.parametrize("page", TEXTS)
def test_a_link_leads_to_a_file_or_a_title_of_the_page(page):
    text = TEXTS[page]
    titles = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in titles, target
        elif "://" not in target:
            assert ((ROOT / page).parent / target.partition("#")[0]).exists(), target


def test_the_list_of_files_is_that_of_the_package():
    listing = re.search(r"^helpers/\n(.*?)^```", TEXTS["docs/code.md"], re.MULTILINE | re.DOTALL)[1]
    told = {line.split()[0].rstrip("/") for line in listing.splitlines()}
    files = {path.name for path in (ROOT / "helpers").glob("*.py")} - {"__init__.py"}
    folders = {path.parent.name for path in (ROOT / "helpers").glob("*/__init__.py")}
    assert files | folders <= told, "a module of helpers/ is not in the list"
