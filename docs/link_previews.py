"""A Sphinx extension: what other sites show of a page when it is linked there, and what search engines ask for.

A preview needs complete addresses, so its picture and the sitemap exist only where the site's address is known
(`build_site.py --base`).
"""

import html
from pathlib import Path

from docutils import nodes

LONGEST = 200  # characters of a description


def setup(app):
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", write_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def description_of(doctree) -> str:
    """Return the first sentence or two of a page: its first paragraph of some length."""
    texts = (" ".join(paragraph.astext().split()) for paragraph in doctree.findall(nodes.paragraph))
    text = next((text for text in texts if len(text) > 50 and "download>" not in text), "")
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."


def add_tags(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Add the page's title and description to its head, in place; its address and a picture if the site has a base."""
    if doctree is None:  # search, index
        return
    base, description = app.config.html_baseurl, description_of(doctree)
    title = next(iter(doctree.findall(nodes.title)), nodes.Text(app.config.project)).astext()
    tags = {"og:type": "article", "og:site_name": app.config.project, "og:title": title, "og:description": description}
    if base:
        tags |= {"og:url": f"{base}{pagename}.html", "og:image": f"{base}_static/preview.png"}
        tags |= {"og:image:width": "1200", "og:image:height": "630", "twitter:card": "summary_large_image"}
    lines = [f'<meta property="{name}" content="{html.escape(text)}">' for name, text in tags.items() if text]
    if description:
        lines.append(f'<meta name="description" content="{html.escape(description)}">')
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def write_files(app, exception) -> None:
    """Write robots.txt and, if the site has a base, the sitemap."""
    base, out = app.config.html_baseurl, Path(app.outdir)
    if exception is not None or app.builder.name != "html":
        return
    robots = "User-agent: *\nAllow: /\n"
    if base:
        robots += f"Sitemap: {base}sitemap.xml\n"
        pages = "".join(f"<url><loc>{html.escape(base + name)}.html</loc></url>" for name in sorted(app.env.found_docs))
        head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">'
        (out / "sitemap.xml").write_text(f"{head}{pages}</urlset>\n", encoding="utf-8")
    (out / "robots.txt").write_text(robots, encoding="utf-8")
