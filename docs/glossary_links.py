"""A Sphinx extension: in each lesson, the first mention of a glossary term links to its sentence.

The lessons stay free of such links, which would lead to a text file in JupyterLab.
"""

import re
from pathlib import Path

from docutils import nodes

TERM = re.compile(r"^## (?P<term>.+)\n+(?P<sentence>.+(?:\n.+)*)", re.M)
NOT_TEXT = (nodes.title, nodes.literal, nodes.literal_block, nodes.reference, nodes.raw, nodes.math)


def setup(app):
    app.connect("doctree-resolved", link_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def read_terms(text: str) -> dict[str, tuple[str, str]]:
    """Return the anchor and the plain sentence of every name: "TTFT (time to first token)" has two."""
    terms = {}
    for found in TERM.finditer(text):
        anchor = re.sub(r"[^\w\- ]", "", found["term"].lower()).replace(" ", "-")
        sentence = re.sub(r"\s*\[Lessons? [^\]]*\]\([^)]*\)\.?|[*`]", "", found["sentence"]).replace("\n", " ")
        for name in re.split(r" \(|\)", found["term"]):
            if name:
                terms[name.lower()] = anchor, sentence.strip()
    return terms


def link_terms(app, doctree: nodes.document, docname: str) -> None:
    """Link the first mention of every term, in place, if the page is a lesson."""
    if not re.match(r"notebooks/(\d|extra/)", docname):
        return
    terms = read_terms((Path(app.srcdir) / "docs" / "glossary.md").read_text(encoding="utf-8"))
    glossary = app.builder.get_relative_uri(docname, "docs/glossary")
    longest_first = sorted(map(re.escape, terms), key=len, reverse=True)
    mention = re.compile(rf"\b({'|'.join(longest_first)})(?=s?\b)", re.I)
    linked = set()
    for text in list(doctree.findall(nodes.Text)):
        if any(isinstance(parent, NOT_TEXT) for parent in ancestors(text)):
            continue
        pieces, end = [], 0
        for found in mention.finditer(text):
            anchor, sentence = terms[found[0].lower()]
            if anchor not in linked:
                linked.add(anchor)
                link = nodes.reference("", found[0], refuri=f"{glossary}#{anchor}", reftitle=sentence, internal=True)
                link["classes"].append("term")
                pieces += [nodes.Text(text[end : found.start()]), link]
                end = found.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def ancestors(node: nodes.Node):
    while node := node.parent:
        yield node
