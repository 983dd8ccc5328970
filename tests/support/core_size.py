"""How much code a reader has to read: lines of files, and what a call runs through in `helpers/`.

A line of code has a token other than a comment, and is no part of a docstring. A call is followed with
`sys.setprofile`: the functions of `helpers/` that it enters count, with the files in which they are. What runs only
while the engine is made, or in another thread, does not count. A function inside another one is a part of that one.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "helpers"
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def lines_of_code(path: Path) -> frozenset[int]:
    """Return the numbers of a file's lines of code."""
    source = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return frozenset(lines)


@dataclass(frozen=True)
class Calls:
    """The functions that a call ran, by file.

    Attributes:
        lines: for each file, the numbers of the lines of code of its functions, by the line on which a function begins.
    """

    lines: dict[Path, dict[int, frozenset[int]]]

    @property
    def lines_of_functions(self) -> int:
        return sum(self.by_file.values())

    @property
    def by_file(self) -> dict[str, int]:
        """The number of lines of code of each file's functions, the most first."""
        sizes = {
            str(path.relative_to(ROOT)): len(frozenset().union(*functions.values()))
            for path, functions in self.lines.items()
        }
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def calls_of(function: Callable[[], object], folder: Path = PACKAGE) -> Calls:
    """Call a function and return what it ran of the files in a folder."""
    codes: set[CodeType] = set()

    def note(frame, event, _):
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    found: dict[Path, dict[int, frozenset[int]]] = {}
    for code in codes:
        path = Path(code.co_filename)
        if path.is_relative_to(folder) and (node := _outermost_function(path, code)):
            lines = lines_of_code(path) & set(range(_first_line(node), node.end_lineno + 1))
            found.setdefault(path, {})[node.lineno] = lines
    return Calls(found)


def _outermost_function(path: Path, code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function or method in which a code object is; None for a module, a class or a generated function."""
    line = code.co_firstlineno  # of a decorated function, this is its first decorator's
    return next((node for node in _functions(path) if _first_line(node) <= line <= node.end_lineno), None)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


@cache
def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions and methods of a file, outer ones first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]  # breadth first
