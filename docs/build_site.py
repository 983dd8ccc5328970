"""Build the site from notebooks that have run: what `make site` does, and `make course` after running the lessons.

Sphinx reads a copy of the pages in build/site-source/, laid out as in the repository, so that a link means the same in
JupyterLab, on GitHub and on the site. This file makes the copy:

    lessons      without the set-up cell; with links to their exercises, to Colab and to a notebook without answers
    home         from templates/home.md: the lessons that ran, what each of them counted, and the model
    API          a page for each folder of helpers/ (api_pages.py)
    links        to files without a page lead to the API or to GitHub, or become plain text
"""

import argparse
import contextlib
import functools
import http.server
import os
import re
import shutil
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jinja2 import Environment
from nbformat import NotebookNode
from sphinx.cmd.build import main as sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]

from api_pages import api_pages, modules, public_names  # noqa: E402  (it imports helpers)
from copy_to_lab import without_answers  # noqa: E402
from playground_files import playground  # noqa: E402

PAGES = ["SUPPORT.md", "helpers/tiny_model/README.md"]  # not INSTRUCTOR.md: it says what a grader cannot notice
PAGES += sorted(
    path.relative_to(ROOT).as_posix() for path in (*DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("**/*.md"))
)
PLAYGROUND = "docs/playground.md"
BADGE = re.compile(r"\[!\[[^\]]*\]\([^)]*colab-badge[^)]*\)\]\((?P<address>[^)]*)\)")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")


@dataclass
class Lesson:
    """A notebook and what the home page says about it. `path` is relative to the root of the repository."""

    path: str
    nb: NotebookNode

    @property
    def title(self) -> str:
        """The first heading."""
        found = re.search(r"^# +(.+)", self._text(), re.M)
        return found[1].strip() if found else Path(self.path).stem

    @property
    def minutes(self) -> str:
        """The reading time that the lesson states, or ""."""
        found = re.search(r"(\d+) minutes", self._text())
        return found[1] if found else ""

    @property
    def headline(self) -> str:
        """What the cell tagged `headline` printed, or "" if the lesson stopped before it."""
        cells = [cell for cell in self.nb.cells if "headline" in cell.metadata.get("tags", [])]
        streams = [output.text for cell in cells for output in cell.get("outputs", []) if "text" in output]
        return " ".join("".join(streams).split())

    @property
    def exercises(self) -> str:
        """The notebook of its exercises, or "", as for these exercises themselves."""
        stem = Path(self.path).stem
        path = f"notebooks/exercises/release/{stem}/{stem}.ipynb"
        return path if path != self.path and (ROOT / path).exists() else ""

    def _text(self) -> str:
        return "\n".join(cell.source for cell in self.nb.cells if cell.cell_type == "markdown")


def read(folders: Sequence[Path], pattern: str, prefix: str) -> list[Lesson]:
    """Return the notebooks of several folders in reading order, each from the first folder that has it.

    A lesson's exercises come before the codelab or memo that has its number, too.
    """
    paths = {path.relative_to(folder): path for folder in reversed(folders) for path in sorted(folder.glob(pattern))}

    def order(path: Path) -> tuple:
        number = re.match(r"\d*", path.name)[0]
        return int(number or 0), not (ROOT / "notebooks" / path.name).exists(), path

    names = sorted(paths, key=order)
    return [Lesson(prefix + name.as_posix(), nbformat.read(paths[name], as_version=4)) for name in names]


class Stage:
    """The folder that Sphinx reads. A file is written only if it changed, since Sphinx reads only what changed."""

    def __init__(self, folder: Path, repository: str):
        self.folder, self.repository, self.files = folder, repository, {}

    def add(self, path: str, content: str | bytes) -> None:
        self.files[path] = content.encode() if isinstance(content, str) else content

    def write(self) -> None:
        """Write all files, with their links resolved, and remove what an earlier build left."""
        for path, content in self.files.items():
            if path.endswith((".md", ".ipynb")) and not path.startswith("_extra"):
                content = self._resolve_links(path, content.decode()).encode()
            target = self.folder / path
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in self.files:
                path.unlink()

    def _resolve_links(self, page: str, text: str) -> str:
        return LINK.sub(lambda link: self._resolve(page, link), text)

    def _resolve(self, page: str, link: re.Match) -> str:
        """Return a link as the site needs it: unchanged if it leads to a page, an address or a heading."""
        target = link["target"].partition("#")[0]
        path = os.path.normpath(os.path.join(os.path.dirname(page), target))
        if not target or ":" in target or target.startswith("/") or path in self.files or not (ROOT / path).exists():
            return link[0]
        module = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        if module in modules():
            return f"[{link['text']}](#{module})"
        if path == "notebooks/exercises/release":
            return f"[{link['text']}](/docs/exercises.md)"
        if self.repository:
            return f"[{link['text']}](https://github.com/{self.repository}/blob/main/{path})"
        return link["text"]


def page_of(lesson: Lesson) -> NotebookNode:
    """Return the notebook as a page: no set-up cell, pictures with their texts, links below the title."""
    nb = nbformat.from_dict(lesson.nb)
    nb.cells = [cell for cell in nb.cells if "bootstrap" not in cell.metadata.get("tags", [])]
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if svg := output.get("metadata", {}).get("image/png", {}).get("svg"):
                output.data = {"text/html": f'<div class="picture">{svg}</div>'}
        texts = [output.metadata[kind].alt for output in cell.get("outputs", []) for kind in alt_texts(output)]
        if texts:
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(texts)}}
    links = [f"[Exercises](/{lesson.exercises})"] if lesson.exercises else []
    links.append(f'<a href="{Path(lesson.path).name}" download>Download the notebook</a>')
    title = next(cell for cell in nb.cells if cell.cell_type == "markdown")
    if badge := BADGE.search(title.source):  # its image would be fetched from Google
        links.append(f"[Open in Colab]({badge['address']})")
        title.source = title.source.replace(badge[0], "")
    heading, _, rest = title.source.partition("\n")
    title.source = f"{heading}\n\n{' · '.join(links)}\n{rest}"
    return nb


def moving_race() -> str:
    """Return images/race.svg as an element of a page, in the page's colors and without a background of its own."""
    svg = (ROOT / "images" / "race.svg").read_text(encoding="utf-8")
    svg = re.sub(r"<title>.*?</title><style>.*?</style>\s*<rect [^>]*>", "", svg, flags=re.DOTALL)
    return re.sub(r"\n+", " ", svg).replace("<svg ", '<svg preserveAspectRatio="xMinYMin" ', 1)


def alt_texts(output: NotebookNode) -> list[str]:
    """Return the picture formats of an output that have a text."""
    return [kind for kind, metadata in output.get("metadata", {}).items() if "alt" in metadata]


def stage(
    folder: Path, notebooks: Sequence[Path], repository: str = "", with_playground: bool = True, base: str = ""
) -> None:
    """Write everything that Sphinx reads."""
    overview, lessons = (read(notebooks, pattern, "notebooks/") for pattern in ("0_*.ipynb", "[1-9]*.ipynb"))
    extra = read(notebooks, "extra/*.ipynb", "notebooks/")
    exercises = read([ROOT / "notebooks/exercises/release"], "*/*.ipynb", "notebooks/exercises/release/")
    out = Stage(folder, repository)
    for lesson in [*overview, *lessons, *extra, *exercises]:
        out.add(lesson.path, nbformat.writes(page_of(lesson)))
        out.add(f"_extra/{lesson.path}", nbformat.writes(without_answers(lesson.nb)))
    runtime, reason = playground(ROOT / "build" / "cache") if with_playground else ({}, "it was not asked for")
    texts = [path for path in PAGES if runtime or path != PLAYGROUND]
    if reason:
        print(f"The site has no playground: {reason}.")
    for name, content in runtime.items():
        out.add(f"_extra/_static/playground/{name}", content)
    for font in (ROOT / "helpers" / "plots" / "fonts").glob("*.ttf"):
        out.add(f"_extra/_static/fonts/{font.name}", font.read_bytes())
    for path in [*texts, *(p.relative_to(ROOT).as_posix() for p in ROOT.glob("images/*.[sp][vn]g"))]:
        out.add(path, (ROOT / path).read_bytes())
    pages = api_pages()
    for name, page in pages.items():
        out.add(f"api/{name}.rst", page)
    model = next((lesson.nb.metadata.get("course", {}).get("model") for lesson in lessons), None)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    names = dict(overview=next(iter(overview), None), lessons=lessons, extra=extra, exercises=exercises, model=model)
    names |= dict(base=base, race=moving_race(), pages=texts, api=list(pages), names=public_names())
    for name in ("preview.png", "window_dark.png"):
        out.add(f"_extra/_static/{name}", (ROOT / "images" / name).read_bytes())
    made = {
        "home.md": "index.md",
        "exercises.md": "docs/exercises.md",
        "api.md": "api/index.md",
        "404.html": "_extra/404.html",
    }
    for name, path in made.items():
        template = (DOCS / "templates" / name).read_text(encoding="utf-8")
        out.add(path, environment.from_string(template).render(**names))
    out.write()


def remove_site(folder: Path) -> None:
    """Remove a site that Sphinx built; any other folder stays as it is."""
    if (folder / ".buildinfo").exists():
        shutil.rmtree(folder)


def has_screen() -> bool:
    """Return whether a browser could open a window here: not over ssh, for instance."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def serve(folder: Path) -> None:
    """Serve a folder to this machine until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"It is at http://127.0.0.1:{server.server_port} until you press Ctrl-C.", flush=True)
        server.serve_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; return Sphinx's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--notebooks",
        type=Path,
        nargs="+",
        default=[ROOT / "notebooks"],
        metavar="FOLDER",
        help="folders of executed lessons; each lesson comes from the first folder that has it",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="where the site goes")
    parser.add_argument("--repo", default="", help="owner/name on GitHub, for links to files that have no page")
    parser.add_argument(
        "--base", default="", help="the address at which the site will be, for previews of links and the sitemap"
    )
    parser.add_argument("--strict", action="store_true", help="fail on a broken link and on any other warning")
    parser.add_argument("--show", action="store_true", help="open a browser, if this is a terminal on a screen")
    parser.add_argument("--serve", action="store_true", help="serve the site to this machine; the playground needs it")
    parser.add_argument("--without-playground", action="store_true", help="leave it out: nothing is fetched from npm")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    print("Building the site, which takes under a minute.", flush=True)
    if len(args.notebooks) > 1:
        print("Lessons that did not run this time show their stored outputs.", flush=True)
    source, doctrees = (args.out.with_name(args.out.name + suffix) for suffix in ("-source", "-doctrees"))
    base = args.base and args.base.rstrip("/") + "/"
    stage(source, args.notebooks, args.repo, not args.without_playground, base)
    remove_site(args.out)  # Sphinx would leave the pages of lessons that did not run this time
    options = ["-q", "-j", "auto", "-c", str(DOCS), "-d", str(doctrees), "-D", f"html_extra_path={source / '_extra'}"]
    options += ["-D", f"html_baseurl={base}"]
    exit_code = sphinx([*options, *(["-W", "--keep-going"] if args.strict else []), str(source), str(args.out)])
    index = args.out / "index.html"
    print(f"The site took {time.perf_counter() - start:.0f} s. To read it, open {os.path.relpath(index)}", flush=True)
    if args.serve:
        serve(args.out)
    elif args.show and sys.stdout.isatty() and has_screen():
        webbrowser.open(index.resolve().as_uri())
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
