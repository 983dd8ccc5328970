"""What the tests of pages do in a browser: open a page, fill in its forms, and measure what it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # here, because most tests need no browser

    with sync_playwright() as playwright:
        names = ("chromium", "google-chrome", "chromium-browser", "chrome")
        path = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(path).exists():
            end = pytest.fail if os.environ.get("CI_BROWSER") == "1" else pytest.skip
            end(
                f"No browser: none of {', '.join(names)} is on PATH. Install one, or run `playwright install chromium`."
            )
        # Chromium has no sandbox for root, which is the user in many containers.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def window(browser):
    """Open a page. At the end, the console must have no errors but those that the test expects.

    Every request must go to the page's address or below it, or to `site`.
    """
    errors, expected, contexts = [], [], []

    def open_window(url: str, expect_errors: str = "", message=None, site="", **settings) -> Page:
        expected.append(expect_errors)
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda entry: entry.type in ("error", "warning") and errors.append(entry.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith(site or url) or errors.append(f"requested {request.url}")
        )
        if message:
            page.route("**/events", lambda route: route.fulfill(body=f"data: {json.dumps(message)}\n\n"))
        page.goto(url)
        return page

    yield open_window
    for context in contexts:
        context.close()
    pattern = "|".join(filter(None, expected))
    assert [error for error in errors if not (pattern and re.search(pattern, error))] == []


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=folder))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(page: Page, *prompts: str, temperature: str = "0", max_tokens: str = "120") -> None:
    page.get_by_label("Prompts, one per line").fill("\n".join(prompts))
    page.get_by_label("Max tokens").fill(max_tokens)
    page.get_by_label("Temperature").fill(temperature)
    page.get_by_role("button", name="Send", exact=True).click()


def set_speed(page: Page, label: str) -> None:
    with page.expect_response("**/pace"):
        page.get_by_label("Speed").select_option(label)


@contextmanager
def slow_motion(page: Page, label: str = "100 ms per iteration"):
    set_speed(page, label)
    yield
    set_speed(page, "full speed")


def busy(page: Page):
    """Return the rows of the table that have a request."""
    return page.locator("#rows tr:not([data-work=empty])")


def painted(page: Page) -> dict[str, float]:
    """Return the share of the timeline's pixels in the color of each kind of work."""
    return page.evaluate("""() => {
        const {width, height} = document.getElementById("timeline");
        const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
        copy.drawImage(document.getElementById("timeline"), 0, 0);
        const {data} = copy.getImageData(0, 0, width, height);
        const style = getComputedStyle(document.documentElement), shares = {};
        for (const kind of ["prefill", "decode", "finished", "stalled", "empty"]) {
            const color = parseInt(style.getPropertyValue("--" + kind).trim().slice(1), 16);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {
                count += (data[i] << 16 | data[i + 1] << 8 | data[i + 2]) === color;
            }
            shares[kind] = 4 * count / data.length;
        }
        return shares;
    }""")
