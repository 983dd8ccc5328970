"""What the page's tests do in a browser: fill in its forms, and measure what it shows."""

import json
import urllib.request
from contextlib import contextmanager

from playwright.sync_api import Page


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


def completion(url: str, prompt: str, max_tokens: int) -> dict:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def painted(page: Page) -> dict[str, float]:
    """Return the share of the timeline's pixels in the colour of each kind of work."""
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


def faint_texts(page: Page) -> list[str]:
    """Return the texts whose contrast with their background is below 4.5, WCAG's limit."""
    return page.evaluate("""() => {
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
    }""")
