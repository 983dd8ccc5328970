"""A Sphinx extension: what Sphinx and the theme leave out of a page for screen readers. site.js does the rest."""

import re

PARAMETERS = re.compile(
    r"<dl>\s*(?P<items><dd>.*?)</dl>", re.S
)  # of a signature on several lines: no terms in the list
# It hides the visible label "Show the output" from screen readers, and from those who speak to click.
SUMMARY_LABEL = ' aria-label="Toggle hidden content"'
EMPTY_HEADER = re.compile(r'<th class="head">(<p></p>)?</th>')


def setup(app):
    app.connect("html-page-context", improve, priority=900)  # after the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def improve(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Change the page's text and navigation, in place."""
    if "body" in context:
        body = PARAMETERS.sub(lambda found: signature_lines(found["items"]), context["body"])
        context["body"] = EMPTY_HEADER.sub("<td></td>", body).replace(SUMMARY_LABEL, "")
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def signature_lines(items: str) -> str:
    items = items.replace("<dd>", '<span class="parameter">').replace("</dd>", "</span>")
    return f'<span class="parameters">{items}</span>'
