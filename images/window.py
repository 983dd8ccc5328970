"""Take pictures of the server's page, light and dark: `python images/window.py`, with Chromium or Chrome.

The page during a burst, after about 100 iterations: some rows have had several requests, others wait. It is a
photograph and no figure, so no test compares it with what would be taken today.
"""

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.server import launch

path = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
for scheme, name in {"light": "window.png", "dark": "window_dark.png"}.items():
    with launch("--pace", "0.1") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])  # None: playwright's own
        page = browser.new_page(viewport={"width": 1200, "height": 860}, color_scheme=scheme)
        page.goto(server.url)
        page.get_by_label("Iterations in view").select_option("100")
        page.get_by_label("Speed").select_option("100 ms per iteration")
        page.get_by_role("button", name="Send a burst").click()
        page.mouse.move(0, 0)
        expect(page.locator("#iterations")).to_have_text(re.compile(r"^1\d\d$"), timeout=60_000)
        page.screenshot(path=Path(__file__).with_name(name))
        browser.close()
