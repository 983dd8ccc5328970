"""The API's pages, from the docstrings: one page for each folder of `helpers`.

The files are parsed, not imported. A page therefore needs no torch, and no module is forgotten. Sphinx's autodoc, which
imports them, takes twice as long and reads a property's "Blocks: free or cached" as a type. The docstrings are in
Google's style, and their plain text becomes reStructuredText: blocks of aligned text stay as they are, and a name in
backticks becomes a link if exactly one public object has it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

import helpers

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
INTERNAL = ("helpers.checks.", "helpers.tiny_model.")  # of these folders, only the first page helps a reader
NAPOLEON = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)
ALIGNED = re.compile(r"\| .* \||\S+(?: \S+)* {2,}\S.*")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, Path]:
    """Return the public modules of `helpers` and their files, a folder before its files."""
    found = {}
    for path in sorted(HELPERS.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        name = ".".join(path.relative_to(HELPERS.parent).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(INTERNAL) and not name.endswith("__main__"):
            found[name] = path
    return found


def api_pages() -> dict[str, str]:
    """Return the reStructuredText of every page, by the name of its folder."""
    pages = defaultdict(list)
    for name, tree in parsed().items():
        folder = ".".join(name.split(".")[:2])
        if modules()[folder].name != "__init__.py":
            folder = "helpers"
        heading = "" if name == folder else f"{name}\n{'-' * len(name)}"
        parts = [heading, f".. py:module:: {name}", rst_of(tree), *map(described, public(tree))]
        pages[folder].append("\n\n".join(filter(None, parts)))
    return {folder: f"{folder}\n{'=' * len(folder)}\n\n" + "\n\n".join(parts) for folder, parts in pages.items()}


def public_names() -> list[tuple[str, str, str]]:
    """Return the names that `helpers` exports, with their full names and the first lines of their docstrings."""
    exported = [(name, *unique_names()[name]) for name in helpers.__all__]
    return [(name, full, ast.get_docstring(node).split("\n")[0]) for name, full, node in exported]


@cache
def parsed() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}


def public(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Yield the public classes and functions of a module, or the methods of a class, that have a docstring."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_") and ast.get_docstring(child):
            yield child


@cache
def unique_names() -> dict[str, tuple[str, Definition]]:
    """Return the full name and the definition of every public class and function whose name no other has."""
    found = defaultdict(list)
    for module, tree in parsed().items():
        for node in public(tree):
            found[node.name].append((f"{module}.{node.name}", node))
    return {name: definitions[0] for name, definitions in found.items() if len(definitions) == 1}


def described(node: Definition, in_class: bool = False) -> str:
    """Return a class with its methods, or a function, as a directive of Sphinx's Python domain."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    options = []
    if isinstance(node, ast.ClassDef):
        kind, signature = "class", signature_of_class(node)
    elif decorators & {"property", "cached_property", "functools.cached_property"}:
        kind, signature = "property", ""
    else:
        kind, signature = ("method" if in_class else "function"), signature_of(node, in_class)
        flags = {"classmethod": "classmethod" in decorators, "staticmethod": "staticmethod" in decorators}
        flags["async"] = isinstance(node, ast.AsyncFunctionDef)
        options = [f":{flag}:" for flag, is_set in flags.items() if is_set]
    content = ["\n".join(options), rst_of(node)]
    if kind == "class":
        content += [described(method, in_class=True) for method in public(node)]
    body = "\n\n".join(filter(None, content))
    return f".. py:{kind}:: {node.name}{signature}\n" + ("" if options else "\n") + indented(body) + "\n"


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> str:
    """Return the parameters, without `self`, and the type of the result."""
    arguments = node.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if is_method and names[:1] in (["self"], ["cls"]):
        arguments = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def signature_of_class(node: ast.ClassDef) -> str:
    """Return the parameters of `__init__`, or the fields of a dataclass."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return signature_of(child, is_method=True)
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return ""
    fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
    return "(" + ", ".join(ast.unparse(field) for field in fields) + ")"


def rst_of(node: ast.Module | Definition) -> str:
    """Return a docstring as reStructuredText."""
    paragraphs = re.split(r"\n(?: *\n)+", ast.get_docstring(node) or "")
    for i, paragraph in enumerate(paragraphs):
        rows = paragraph.split("\n")
        if len(rows) > 1 and all(map(ALIGNED.fullmatch, rows)):
            paragraphs[i] = "::\n\n" + indented(paragraph)
        elif paragraph.startswith("    ") and i:
            paragraphs[i] = "::\n\n" + paragraph
        else:
            paragraphs[i] = re.sub(r"(?<!`)`(\w+)(\(\))?`(?!`)", linked, paragraph)
    return str(GoogleDocstring("\n\n".join(paragraphs), NAPOLEON))


def linked(name: re.Match) -> str:
    if name[1] not in unique_names():
        return name[0]
    return f":py:obj:`{name[1]}{name[2] or ''} <{unique_names()[name[1]][0]}>`\\ "


def indented(text: str) -> str:
    return "\n".join("   " + line if line.strip() else "" for line in text.split("\n"))
