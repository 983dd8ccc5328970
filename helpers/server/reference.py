"""The reference of the server's addresses at `/docs`: one page of HTML, made from the OpenAPI description.

The usual pages, Swagger UI and ReDoc, load their scripts from another server. This one works without a network.
"""

import re
import tomllib
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION, ROOT = "continuous-batching-course", Path(__file__).parents[2]
LIMITS = {
    "minimum": "at least {:.7g}",
    "exclusiveMinimum": "above {:.7g}",
    "maximum": "at most {:.7g}",
    "maxLength": "at most {:.7g} characters",
    "maxItems": "at most {:.7g}",
}
# Nothing on the page runs, and its style comes from this server.
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; frame-ancestors 'none'"}


def version() -> str:
    """Return the version of this package, installed or in its checkout."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def reference_page(openapi: dict[str, Any]) -> str:
    """Return the HTML page for an OpenAPI description."""
    title = escape(openapi["info"]["title"])
    operations = [
        _section(f"{method.upper()} {path}", operation, openapi["components"]["schemas"])
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="stylesheet" href="page/page.css"></head><body class="reference"><h1>{title}</h1>'
        f'<p>The same for programs, with all details: <a href="openapi.json">openapi.json</a>.</p>'
        f"<p>Any address may also respond with status 403 (called by a name that the server does not know), "
        f"405 (another method) or 408 (an incomplete request).</p>"
        f"{''.join(operations)}</body></html>"
    )


def _section(title: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the HTML for one method of one address."""
    content = operation.get("requestBody", {}).get("content", {})
    rows = [
        _row(name, schema, name in described.get("required", []))
        for media in content.values()
        for described in [schemas[_name(media["schema"])]]
        for name, schema in described["properties"].items()
    ]
    head = "<tr><th>Parameter</th><th>Type</th><th>Meaning</th></tr>"
    table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    statuses = ", ".join(operation["responses"])
    about = _text(operation.get("description", ""))
    return f"<section><h2>{escape(title)}</h2><p>{about}</p>{table}<p>Statuses: {escape(statuses)}.</p></section>"


def _row(name: str, schema: dict[str, Any], required: bool) -> str:
    meaning = " ".join(filter(None, ["Required." if required else "", schema.get("description", "")]))
    return f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(schema))}</td><td>{_text(meaning)}</td></tr>"


def _type(schema: dict[str, Any]) -> str:
    """Describe the values that a JSON schema allows, in a few words."""
    match schema:
        case {"anyOf": kinds}:
            return " or ".join(dict.fromkeys(_type(kind) for kind in kinds))
        case {"const": value}:
            return repr(value)
        case {"enum": values}:
            return " or ".join(map(repr, values))
        case {"type": "array", "items": items}:
            return f"list{_limits(schema)} of {_type(items)}"
        case {"$ref": _}:
            return _name(schema)
    return schema.get("type", "any value") + _limits(schema)


def _limits(schema: dict[str, Any]) -> str:
    """Return the limits of a JSON schema, such as " (at least 0, at most 2)"; "" if it has none."""
    limits = ", ".join(words.format(schema[limit]) for limit, words in LIMITS.items() if limit in schema)
    return f" ({limits})" if limits else ""


def _text(text: str) -> str:
    """Return the HTML for a text with code between backticks."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _name(schema: dict[str, Any]) -> str:
    """Return the name of the schema that a reference names."""
    return schema["$ref"].rpartition("/")[2]
