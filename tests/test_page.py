"""The window into the engine, in a real browser on a real server.

Needs Chromium or Chrome (playwright's own will do: `playwright install chromium`). Without a browser, these tests are
skipped; with CI_BROWSER=1 in the environment they fail, so that a run without a browser cannot pass unnoticed.
"""

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from helpers.server import launch
from tests.support.browsing import busy, painted, send, set_speed, slow_motion
from tests.support.serving import expected

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent.parent / "helpers" / "server" / "page"
STORY = "Once upon a time, a brave fox"  # goes on for more than 100 tokens
KEY = "a-key"
expect.set_options(timeout=15_000)  # milliseconds: the machine may have other work


@pytest.fixture(scope="module")
def server():
    with launch("--pace", "0.05") as server:
        yield server.url


# --- what the page shows --------------------------------------------------------------------------------------------


def test_a_prompt_gets_a_row_its_text_grows_and_the_row_is_free_again(window, server):
    page = window(server)
    expect(page.locator("#policy")).to_contain_text("8 rows, policy fcfs: continuous batching")
    expect(page.locator("#rows tr")).to_have_count(8)
    expect(busy(page)).to_have_count(0)
    with slow_motion(page):
        send(page, STORY, max_tokens="60")
        card = page.get_by_role("article")
        expect(busy(page)).to_have_count(1)
        expect(busy(page)).to_contain_text("decode")
        expect(busy(page).locator("td").first).to_have_text("#1")
        expect(card.get_by_role("heading")).to_have_text("Request #1")
        expect(card.locator(".state")).to_have_text("running")
        for _ in range(3):
            text = card.locator(".output").text_content()
            expect(card.locator(".output")).not_to_have_text(text)
            assert card.locator(".output").text_content().startswith(text)
        expect(page.locator("#blocks-text")).to_have_text(re.compile(r"[1-9]\d* used, .* of 256"))
    expect(card.locator(".state")).to_have_text("done: max tokens")
    expect(busy(page)).to_have_count(0)
    expect(card.locator(".metrics")).to_contain_text(re.compile(r"^60 tokens, TTFT \d+ ms, \d+ tokens/s$"))
    assert card.locator(".output").text_content() == expected(STORY, 60).text
    assert card.locator(".prompt").text_content() == STORY
    expect(page.locator("#news")).to_have_text("Request #1: done: max tokens.")


def test_several_prompts_run_at_once_in_a_row_each(window, server):
    page = window(server)
    with slow_motion(page):
        send(page, STORY, "", "There was once a poor miller", "<img src=x onerror=alert(1)>", max_tokens="30")
        expect(busy(page)).to_have_count(3)
        expect(page.get_by_role("button", name="Stop")).to_have_count(3)
    expect(page.locator("article[data-state=done]")).to_have_count(3)
    expect(page.get_by_role("heading", level=3, name="Request #")).to_have_count(3)
    assert page.locator(".prompt").all_text_contents()[2] == "<img src=x onerror=alert(1)>"
    assert page.locator("article img").count() == 0


def test_a_burst_fills_the_queue_and_all_of_it_ends(window, server):
    page = window(server)
    with slow_motion(page):
        page.get_by_role("button", name="Send a burst").click()
        expect(busy(page)).to_have_count(8)
        expect(page.locator("#queue-count")).to_have_text(re.compile(r"2\d waiting, of at most 64"))
        assert page.get_by_role("list", name="Queue:").get_by_role("listitem").count() >= 20
        expect(page.locator("article[data-state=waiting]").first).to_be_visible()
    expect(page.locator("article[data-state=done]")).to_have_count(32)
    expect(page.locator("#queue-count")).to_have_text("0 waiting, of at most 64")
    expect(page.locator("#queue li")).to_have_count(0)
    expect(busy(page)).to_have_count(0)
    expect(page.locator("#news")).to_have_text("All 32 requests have ended.")
    shares = painted(page)  # how large each is depends on the outputs
    assert shares["decode"] > 0.1 and shares["empty"] > 0.01 and shares["prefill"] > 0


def test_with_static_batching_finished_rows_are_shown_until_their_batch_ends(window):
    with launch("--rows", "16", "--policy", "static", "--max-queue", "8", "--pace", "0.1") as server:
        page = window(server.url, expect_errors="status of 429")
        expect(page.locator("#queue-count")).to_have_text("0 waiting, of at most 8")
        page.get_by_role("button", name="Send a burst").click()
        expect(page.locator("article[data-state=refused]")).to_have_count(8)
        finished = page.locator("#rows tr[data-work=finished]").first
        expect(finished.locator("td").first).to_have_text(re.compile(r"#\d+"))
        expect(finished.locator("td").nth(2)).not_to_have_text("0")  # its tokens
        set_speed(page, "full speed")
        expect(page.locator("article[data-state=done]")).to_have_count(24)


def test_replicas_have_lanes_of_their_own_with_a_name_and_a_state(window, server):
    """Both have worked on all of their rows: half of the timeline's rows are another replica's, not empty."""
    full = [["cmpl-0", "decode", 1, 1], ["cmpl-1", "decode", 1, 1]]
    names = ("replica-1", "replica-2")
    message = {
        "rows": 4, "policy": "balanced", "max_queue": 64, "pace": 0, "blocks": None, "running_count": 4, "waiting": [],
        "replicas": [{"name": name, "state": "ready", "rows": 2} for name in names],
        "waiting_count": 0, "tokens_per_second": 0.0, "finished": [],
        "iterations": [{"n": n, "seconds": 0.002, "slots": full, "replica": names[n % 2]} for n in range(100)],
    }  # fmt: skip
    page = window(server, message=message)
    expect(page.locator("#row-use")).to_have_text("100 %")
    expect(page.locator("#rows tr th")).to_have_text(["replica-1: ready", "0", "1", "replica-2: ready", "0", "1"])
    expect(page.locator("#rows tr[data-work=decode]")).to_have_count(4)
    table, canvas = page.locator("#rows").bounding_box(), page.locator("#timeline").bounding_box()
    assert abs(table["height"] - canvas["height"]) <= 2


# --- errors ---------------------------------------------------------------------------------------------------------


def enter_key(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_a_missing_key_a_full_queue_and_a_lost_server_are_shown(window):
    small = ("--rows", "1", "--max-queue", "0", "--pace", "0.2", "--policy", "static", "--api-key", KEY)
    with launch(*small) as server:
        page = window(server.url, expect_errors="status of (401|429)|ERR_")
        state = page.locator("#connection")
        expect(page.get_by_label("API key")).to_be_focused()
        expect(state).to_have_text("The server requires a key.")
        enter_key(page, "another")
        expect(state).to_have_text("The server does not accept this key.")
        enter_key(page, KEY)
        expect(state).to_have_text("Connected.")
        expect(page.get_by_label("API key")).to_be_hidden()
        expect(page.get_by_label("Prompts, one per line")).to_be_focused()
        expect(page.locator("#curl")).to_contain_text("Bearer $COURSE_API_KEY")
        assert KEY not in page.content()

        expect(page.locator("#policy")).to_contain_text("static batching")
        expect(page.get_by_label("Speed")).to_have_value("0.2")
        send(page, STORY)
        expect(busy(page)).to_have_count(1)
        send(page, "The quick brown")
        refused, running = page.get_by_role("article").locator(".state").all()
        expect(refused).to_have_text(re.compile(r"refused \(429\): .*Try again later\. Retry-After: 1 s\."))
        expect(running).to_have_text("running")

        server.process.kill()
        expect(state).to_contain_text("The server does not respond")
        expect(running).to_contain_text("failed")


# --- accessibility --------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(window, server):
    page = window(server)
    expect(page.locator("#connection")).to_have_text("Connected.")
    with slow_motion(page):
        reached = []
        page.evaluate("document.activeElement.blur()")
        for _ in range(7):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
        assert reached == ["prompts", "max-tokens", "temperature", "Send", "burst", "Send a burst", "pace"]
        page.get_by_label("Prompts, one per line").focus()
        page.keyboard.press("Control+a")
        page.keyboard.type(STORY)
        page.keyboard.press("Control+Enter")
        expect(busy(page)).to_have_count(1)
        page.get_by_label("Prompts, one per line").focus()
        for _ in range(8):
            page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(busy(page)).to_have_count(0)
        expect(page.get_by_role("article")).to_be_focused()  # the button is gone: the focus is not lost with it


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_on_a_phone_too(window, server, scheme):
    page = window(server, color_scheme=scheme, reduced_motion="reduce", viewport={"width": 400, "height": 800})
    with slow_motion(page):
        send(page, STORY, "Even a proud bear")
        page.get_by_role("button", name="Send a burst").click()
        expect(page.locator("#queue li").first).to_be_visible()
        expect(page.locator("article[data-state=done]").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        found = Axe().run(page, options={"runOnly": ["color-contrast"]})
        assert found.response["violations"] == []
        page.get_by_role("button", name="Stop all").click()


def test_the_files_stand_alone_and_treat_text_as_text():
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
    html = (PAGE / "index.html").read_text()
    assert not re.search(
        r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", html
    )  # the page's Content-Security-Policy forbids these
