"""Text of strangers, made plain: no terminal obeys it, no spreadsheet computes it, and it has an end."""

import re

# Escape sequences of terminals, control characters, directions of writing, and halves of characters.
CONTROL = re.compile(
    r"\x1b\[[0-9;?]*[a-zA-Z]|[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
MAX_NAME = 100  # characters of a student's id, which names a folder


def plain(text: str, limit: int = 1000) -> str:
    """Return text without colors and control characters, cut to a length."""
    text = CONTROL.sub("", text[: 2 * limit]).strip("\n")
    return text if len(text) <= limit else f"{text[:limit]}\n[The rest is cut.]"


def line(text: str, limit: int = 1000) -> str:
    """Return plain text on one line."""
    return " ".join(plain(text, limit).split())


def harmless(text: str) -> str:
    """Return a text that a spreadsheet does not compute."""
    return f"'{text}" if text.startswith(tuple("=+-@\t\r")) else text


def student_id(text: str) -> str:
    """Return a student's id: a line in a table, and the name of a folder."""
    return harmless(line(text.replace("/", "_").replace("\\", "_")).strip(".")[:MAX_NAME].strip()) or "unnamed"
