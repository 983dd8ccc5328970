"""The window into the engine, in a real browser on a real server.

Needs Chromium or Chrome (playwright's own will do: `playwright install chromium`). Without one these tests are
skipped; with CI_BROWSER=1 in the environment they fail, so that nobody believes in tests that never ran.
"""

import json
import os
import re
import shutil
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from helpers.server import launch

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent.parent / "helpers" / "server" / "page"
STORY = "Once upon a time, a brave fox"  # goes on for more than 100 tokens
KEY = "a-key"
expect.set_options(timeout=15_000)  # a machine may have other work


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        names = ("chromium", "google-chrome", "chromium-browser", "chrome")
        path = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(path).exists():
            complain = pytest.fail if os.environ.get("CI_BROWSER") == "1" else pytest.skip
            complain(f"There is no browser: none of {', '.join(names)} on PATH, and no `playwright install chromium`.")
        # Chromium has no sandbox for root, whom containers often run as.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    with launch("--pace", "0.05") as server:
        yield server.url


@pytest.fixture
def window(browser):
    """Opens the page; at the end there is no error on the console but those that a test expects."""
    errors, expected, contexts = [], [], []

    def open_window(url: str, expect_errors: str = "", events_fail=False, told=None, **settings) -> Page:
        expected.append(expect_errors)
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or errors.append(f"asked for {request.url}"))
        if events_fail:
            page.route("**/events", lambda route: route.abort())
        if told:
            page.route("**/events", lambda route: route.fulfill(body=f"data: {json.dumps(told)}\n\n"))
        page.goto(url)
        return page

    yield open_window
    for context in contexts:
        context.close()
    pattern = "|".join(filter(None, expected))
    assert [error for error in errors if not (pattern and re.search(pattern, error))] == []


def ask(page: Page, *prompts: str, temperature: str = "0", max_tokens: str = "120") -> None:
    page.get_by_label("Prompts, one a line").fill("\n".join(prompts))
    page.get_by_label("Max tokens").fill(max_tokens)
    page.get_by_label("Temperature").fill(temperature)
    page.get_by_role("button", name="Send", exact=True).click()


def set_speed(page: Page, label: str) -> None:
    with page.expect_response("**/pace"):
        page.get_by_label("Speed").select_option(label)


@contextmanager
def slow_motion(page: Page, label: str = "100 ms an iteration"):
    set_speed(page, label)
    yield
    set_speed(page, "full speed")


def busy(page: Page):
    """The rows, of those in the table, that have a request."""
    return page.locator("#rows tr:not([data-work=empty])")


def completion(url: str, prompt: str, max_tokens: int) -> dict:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


# --- what one sees --------------------------------------------------------------------------------------------------


def test_a_prompt_gets_a_row_its_text_comes_bit_by_bit_and_the_row_is_free_again(window, server):
    page = window(server)
    expect(page.locator("#policy")).to_contain_text("8 rows, policy fcfs: continuous batching")
    expect(page.locator("#rows tr")).to_have_count(8)
    expect(busy(page)).to_have_count(0)
    with slow_motion(page):
        ask(page, STORY, max_tokens="60")
        card = page.get_by_role("article")
        expect(busy(page)).to_have_count(1)
        expect(busy(page)).to_contain_text("decode")
        expect(busy(page).locator("td").first).to_have_text("#1")
        expect(card.get_by_role("heading")).to_have_text("Request #1")
        expect(card.locator(".state")).to_have_text("running")
        lengths = {len(card.locator(".answer").text_content()) for _ in range(4) if not time.sleep(0.25)}
        assert len(lengths) >= 3
        expect(page.locator("#blocks-text")).to_have_text(re.compile(r"[1-9]\d* used, .* of 256"))
    expect(card.locator(".state")).to_have_text("done: max tokens")
    expect(busy(page)).to_have_count(0)
    expect(card.locator(".measures")).to_contain_text(re.compile(r"^60 tokens, TTFT \d+ ms, \d+ tokens/s$"))
    assert card.locator(".answer").text_content() == completion(server, STORY, 60)["choices"][0]["text"]
    assert card.locator(".prompt").text_content() == STORY
    expect(page.locator("#news")).to_have_text("Request #1: done: max tokens.")


def test_several_prompts_run_at_once_each_with_a_row_of_its_own(window, server):
    page = window(server)
    with slow_motion(page):
        ask(page, STORY, "", "There was once a poor miller", "<img src=x onerror=alert(1)>", max_tokens="30")
        expect(busy(page)).to_have_count(3)
        assert page.get_by_role("button", name="Stop").count() == 3
    expect(page.locator("article[data-state=done]")).to_have_count(3)
    expect(page.get_by_role("heading", level=3, name="Request #")).to_have_count(3)
    assert page.locator(".prompt").all_text_contents()[2] == "<img src=x onerror=alert(1)>"
    assert page.locator("article img").count() == 0


def test_a_burst_fills_the_queue_and_all_of_it_ends(window, server):
    page = window(server)
    with slow_motion(page):
        page.get_by_role("button", name="Send a burst").click()
        expect(busy(page)).to_have_count(8)
        expect(page.locator("#queue-count")).to_have_text(re.compile(r"2\d waiting, room for 64"))
        assert page.get_by_role("list", name="Queue:").get_by_role("listitem").count() >= 20
        expect(page.locator("article[data-state=waiting]").first).to_be_visible()
        expect(page.locator("#live")).to_have_text(re.compile(r"8 of 8 rows busy, \d+ waiting, \d+ tokens a second\."))
    expect(page.locator("article[data-state=done]")).to_have_count(32)
    expect(page.locator("#queue-count")).to_have_text("0 waiting, room for 64")
    expect(page.locator("#queue li")).to_have_count(0)
    expect(busy(page)).to_have_count(0)
    expect(page.locator("#news")).to_have_text("All 32 requests have ended.")
    assert page.get_by_role("button", name=re.compile("^Stop")).count() == 0
    shares = painted(page)  # how much of each depends on the answers
    assert shares["decode"] > 0.1 and shares["empty"] > 0.01 and shares["prefill"] > 0
    assert re.fullmatch(r"\d+ %", page.locator("#at-work").text_content())


def painted(page: Page) -> dict[str, float]:
    """Shares of the timeline's pixels in the colour of each kind of work."""
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


def test_stop_frees_the_row(window, server):
    page = window(server)
    with slow_motion(page):
        ask(page, STORY, "There was once a poor miller")
        expect(busy(page)).to_have_count(2)
        page.get_by_role("button", name="Stop").first.click()
        expect(busy(page)).to_have_count(1)
        assert page.locator(".state").all_text_contents() == ["stopped", "running"]
        page.get_by_role("button", name="Stop").click()
        expect(busy(page)).to_have_count(0)
    expect(page.locator("#connection")).to_have_text("Connected.")


def test_stopping_a_burst_empties_rows_and_queue(window, server):
    page = window(server)
    with slow_motion(page):
        page.get_by_label("Requests in a burst").fill("20")
        page.get_by_role("button", name="Send a burst").click()
        expect(page.locator("#queue-count")).to_have_text("12 waiting, room for 64")
        page.get_by_role("button", name="Stop all 20").click()
        expect(busy(page)).to_have_count(0)
        expect(page.locator("#queue-count")).to_have_text("0 waiting, room for 64")
    expect(page.locator("article[data-state=stopped]").first).to_be_visible()
    assert page.locator("article:is([data-state=waiting], [data-state=running])").count() == 0


def test_more_sends_than_connections_wait_for_their_turn(window, server):
    page = window(server)
    with slow_motion(page):
        for _ in range(6):
            ask(page, STORY, max_tokens="40")
        expect(busy(page)).to_have_count(4)
        page.wait_for_timeout(500)
        assert busy(page).count() == 4  # and a connection is left to change the speed
    expect(page.locator("article[data-state=done]")).to_have_count(6)


def test_other_clients_are_seen_too_and_what_is_impossible_is_told(window, server):
    page = window(server, expect_errors="status of 400")
    completion(server, STORY, 3)
    expect(page.locator("#iterations")).not_to_have_text("0")
    ask(page, STORY, max_tokens="1000")
    expect(page.locator(".state")).to_contain_text("failed (400): The request has")


def test_the_picture_can_be_frozen(window, server):
    page = window(server)
    freeze = page.get_by_role("button", name="Freeze the picture")
    with slow_motion(page, "20 ms an iteration"):
        ask(page, STORY, max_tokens="100")
        expect(busy(page)).to_have_count(1)
        freeze.click()
        expect(freeze).to_have_attribute("aria-pressed", "true")
        frozen, iterations = painted(page), page.locator("#iterations").text_content()
        expect(page.locator("#iterations")).not_to_have_text(iterations)
        assert painted(page) == frozen
    freeze.click()
    expect(page.locator(".state")).to_contain_text("done")
    assert painted(page) != frozen


def test_every_kind_of_work_and_a_gap_are_drawn(window, server):
    """All that an engine can tell, though this server's never does: some of it is for models that need padding."""
    kinds = ("prefill", "decode", "finished", "stalled")
    slots = [*(["cmpl-0", kind, 1, 1] for kind in kinds), None]
    iterations = [{"n": n, "seconds": 0.002, "slots": slots} for n in (*range(60), *range(100, 160))]
    message = {
        "rows": 5, "policy": "balanced", "max_queue": 64, "pace": 0.25, "blocks": None, "running_count": 4,
        "waiting": [f"cmpl-{n}" for n in range(1, 101)], "waiting_count": 300, "tokens_per_second": 0.0,
        "iterations": iterations, "finished": [],
    }  # fmt: skip
    page = window(server, told=message)
    expect(page.locator("#rows tr td:nth-child(3)")).to_have_text([*kinds, "empty"])
    expect(page.locator("#rows tr td:nth-child(2)")).to_have_text(["#1"] * 4 + ["–"])
    expect(page.locator("#at-work")).to_have_text("40 %")
    expect(page.locator("#seconds")).to_have_text("2.0 ms")
    expect(page.locator("#queue")).to_have_text(re.compile("#41and 260 more$"))
    expect(page.locator("#blocks")).to_be_hidden()
    expect(page.get_by_label("Speed")).to_have_value("0.25")
    shares = painted(page)
    assert min(shares.values()) > 0.01
    assert page.locator("#legend li").count() == 5


# --- what can go wrong ----------------------------------------------------------------------------------------------


def enter_key(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_a_key_is_asked_for_a_full_queue_refuses_and_a_server_that_goes_away_is_told(window):
    small = ("--rows", "1", "--max-queue", "0", "--pace", "0.2", "--policy", "static", "--api-key", KEY)
    with launch(*small) as server:
        page = window(server.url, expect_errors="status of (401|429)|ERR_")
        state = page.locator("#connection")
        expect(page.get_by_label("API key")).to_be_focused()
        expect(state).to_have_text("The server wants a key.")
        enter_key(page, "another")
        expect(state).to_have_text("The server does not know this key.")
        enter_key(page, KEY)
        expect(state).to_have_text("Connected.")
        expect(page.get_by_label("API key")).to_be_hidden()
        expect(page.get_by_label("Prompts, one a line")).to_be_focused()
        expect(page.locator("#curl")).to_contain_text("Bearer $COURSE_API_KEY")
        assert KEY not in page.content()

        expect(page.locator("#policy")).to_contain_text("static batching")
        expect(page.get_by_label("Speed")).to_have_value("0.2")
        ask(page, STORY)
        expect(busy(page)).to_have_count(1)
        ask(page, "The quick brown")
        refused, running = page.get_by_role("article").locator(".state").all()
        expect(refused).to_have_text(re.compile(r"refused \(429\): .*try again later\. Retry-After: \d+ s\."))
        expect(running).to_have_text("running")

        server.process.kill()
        expect(state).to_contain_text("The server does not answer")
        expect(running).to_contain_text("failed")


def test_the_page_finds_the_server_again(window, server):
    page = window(server, expect_errors="ERR_", events_fail=True)
    expect(page.locator("#connection")).to_contain_text("The server does not answer")
    page.unroute("**/events")
    expect(page.locator("#connection")).to_have_text("Connected.")
    expect(page.locator("#rows tr")).to_have_count(8)


# --- for everybody --------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(window, server):
    page = window(server)
    expect(page.locator("#connection")).to_have_text("Connected.")
    with slow_motion(page):
        reached = []
        page.evaluate("document.activeElement.blur()")
        for _ in range(11):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", f"{reached[-1]} does not show that it has the focus"
        form = ["prompts", "max-tokens", "temperature", "Send", "burst", "Send a burst", "pace"]
        assert reached == [*form, "view", "freeze", "/metrics", "curl"]

        page.get_by_label("Prompts, one a line").focus()
        page.keyboard.press("Control+a")
        page.keyboard.type(STORY)
        page.keyboard.press("Control+Enter")
        expect(busy(page)).to_have_count(1)
        page.get_by_label("Prompts, one a line").focus()
        for _ in range(9):
            page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(busy(page)).to_have_count(0)
        expect(page.get_by_role("article")).to_be_focused()  # the button is gone: the focus is not lost with it


def test_everything_has_a_name_for_screen_readers(window, server):
    page = window(server)
    with slow_motion(page):
        page.get_by_role("button", name="Send a burst").click()
        expect(page.locator("#queue li").first).to_be_visible()
        tree = page.locator("body").aria_snapshot()
        page.get_by_role("button", name="Stop all").click()
    controls = "button|textbox|spinbutton|combobox|link|img|table|heading|columnheader|rowheader"
    assert re.findall(rf"^\s*- (?:{controls})(?! \")(?!: \S).*$", tree, re.M) == []
    for named in (
        'textbox "Prompts, one a line"', 'spinbutton "Max tokens"', 'combobox "Speed"', 'button "Freeze the picture"',
        'table "What each row does now"', 'img "Timeline: for each row', 'list "What the colours mean"',
    ):  # fmt: skip
        assert named in tree


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_a_phone_too(window, server, scheme):
    page = window(server, color_scheme=scheme, reduced_motion="reduce", viewport={"width": 400, "height": 800})
    with slow_motion(page):
        ask(page, STORY, "Even a proud bear")
        page.get_by_role("button", name="Send a burst").click()
        expect(page.locator("#queue li").first).to_be_visible()
        expect(page.locator("article[data-state=done]").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.evaluate(TOO_FAINT) == []
        page.get_by_role("button", name="Stop all").click()


# WCAG's contrast of every text with what is behind it: at least 4.5.
TOO_FAINT = """() => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const rgb = (color) => {
        pen.clearRect(0, 0, 1, 1); pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
        return pen.getImageData(0, 0, 1, 1).data;
    };
    const linear = (part) => part <= 10.31 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = (element) => {
        const color = rgb(getComputedStyle(element).backgroundColor);
        return color[3] || !element.parentElement ? color : behind(element.parentElement);
    };
    const faint = [];
    for (const element of document.querySelectorAll("body, body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!own || !element.checkVisibility()) continue;
        const [one, other] = [rgb(getComputedStyle(element).color), behind(element)].map(luminance);
        const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (contrast < 4.5) faint.push(`${element.tagName} ${element.textContent.trim()}: ${contrast.toFixed(1)}`);
    }
    return faint;
}"""


def test_the_files_stand_alone_and_treat_text_as_text():
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", html)  # what the policy of content forbids
