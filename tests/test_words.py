"""The course's English: patterns that never read well, searched for in every text that is meant for readers.

A pattern is here only if it can be decided without understanding the sentence. Code, links and addresses are not
searched.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
THINGS = r"(?:tokens|requests|iterations|passes|steps|bytes|[KMGT]i?B|times|arrivals|users|outputs|blocks|rows)"
TIMES = r"(?:second|minute|hour|day)"
# For each rule: the pattern, and a text that breaks the rule.
PATTERNS = {
    'a rate is "per second", not "a second"': (
        rf"\b{THINGS} an? {TIMES}\b|\bonce an? {TIMES}\b|\b(?:bytes|[KMGT]i?B) an? (?:token|layer|row|block|sequence)\b"
        r"|\b(?:tokens|requests|rows|blocks) an? (?:iteration|pass|step)\b(?! \w+s\b)",
        "It makes 40 tokens a second.",
    ),
    "a free-standing pronoun names nothing: name the request, the sequence, the client": (
        r"\b(?:somebody|nobody|everybody|whoever|whomever|whosever|those who)\b",
        "If none is free, somebody has to leave.",
    ),
    'a statement does not begin with "Who": name the subject': (
        r"(?:^|(?<=[.!?:] ))Who [^.?!]*[.!](?=\s|$)",
        "It ends.\n\nWho waits gets a row.",
    ),
    "no comma separates a subject from its verb": (
        r"\b(?:What|Who|Whatever|Which|How many|How much) [^.,?!:]{3,80}, (?:is|are|was|has|have|does|costs|gets)\b",
        "What a pass would have changed, is unchanged.",
    ),
    "a private metaphor: use the field's term": (
        r"\b(?:c[oa]mes? along|had back|have back|gets? peace|the business of|come and go|comes and goes|has to go"
        r"|sits?|sat|sitting)\b",
        "Requests sit in the queue.",
    ),
    "a kernel is requested, not wished": (r"\bwish(?:ed|es)?\b", "If the kernels are wished, they are compiled."),
    "no dash for drama: use a comma, a colon or a new sentence": (r"(?<=\w) [–—] |\w—\w", "It is slow — and wrong."),
}
DATA = {"corpus.py"}  # the grammar of the embedded model's training text


def prose(markdown: str) -> str:
    """Return the text of Markdown or HTML in lines of one paragraph each, without code, links' addresses and tags."""
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`|(?<=\])\([^)]*\)|https?://\S+|\$[^$\n]+\$", "X", text)
    text = re.sub(r">\s*–\s*<", "><", text)  # a place without a value
    text = re.sub(r"<(?:script|style)\b.*?</(?:script|style)>|<[^<>]+>", " ", text, flags=re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.) ?)", text)
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string in Python source: docstrings, messages and the parts of f-strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield node.lineno, "".join(map(str, parts))


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Return every place and its text."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "helpers" / "server" / "page").glob("*.html")]
    pages += (ROOT / "helpers" / "server" / "page").glob("*.js")
    pages += [path for folder in ("benchmarks", "docs", "helpers") for path in (ROOT / folder).rglob("*.md")]
    found = [(name_of(path), prose(path.read_text(encoding="utf-8"))) for path in pages]
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        if ".ipynb_checkpoints" not in path.parts:
            cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
            found += [(f"{name_of(path)}, cell {cell.id}", prose(cell.source)) for cell in cells]
    for path in [*(ROOT / "helpers").rglob("*.py"), *(ROOT / "notebooks").rglob("*.py")]:
        if path.name not in DATA:
            source = path.read_text(encoding="utf-8")
            found += [(f"{name_of(path)}:{line}", prose(text)) for line, text in strings(source)]
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def found(pattern: str, text: str) -> list[str]:
    """Return each match with some words around it."""
    matches = re.finditer(pattern, text, re.IGNORECASE | re.MULTILINE)
    return [text[max(match.start() - 40, 0) : match.end() + 30].replace("\n", " | ") for match in matches]


@pytest.mark.parametrize("rule", PATTERNS)
def test_no_text_has_a_pattern_that_reads_badly(rule):
    pattern, example = PATTERNS[rule]
    assert found(pattern, prose(example))
    places = {place: hits for place, text in texts() if (hits := found(pattern, text))}
    assert not places, f"{rule}:\n" + "\n".join(f"{place}: {hits}" for place, hits in places.items())


MOST_WORDS = 35


def test_no_sentence_of_a_notebook_is_too_long_to_be_read_once():
    long = [
        f"{place}: {sentence}"
        for place, text in texts()
        if ".ipynb" in place
        for line in text.splitlines()
        if "|" not in line  # a table
        for sentence in re.split(r"(?<=[.!?:;]) ", line)
        if len(sentence.split()) > MOST_WORDS
    ]
    assert not long, "\n".join(long)
