"""Run the lessons from top to bottom and write pages that anybody can open: what `make course` does.

Each lesson becomes an executed notebook and an HTML page that needs no network, in build/course/, and an index.html
links them. A failing cell ends the run with the lesson, the cell and the error; what ran up to there is written, too.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jinja2 import DictLoader, Template
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.preprocessors import TagRemovePreprocessor
from nbformat import NotebookNode
from tqdm import tqdm

HERE = Path(__file__).resolve().parent

# nbconvert's page without the scripts that it would fetch, with the alternative texts that it would forget, and with
# long lines of code wrapped rather than cut off.
PAGE = """
{%- extends "index.html.j2" -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_css -%}{{ super() }}<style>div.highlight pre { white-space: pre-wrap }</style>{%- endblock -%}
{%- block extra_css -%}
<style>main { margin: auto; max-width: 80em } .cm-editor pre { overflow: auto }</style>
{%- endblock -%}
{%- block data_png -%}
{%- set alt = (output | get_metadata("alt", "image/png")) or "" -%}
{{ super() | replace("<img ", '<img alt="' ~ (alt | e) ~ '" ', 1) }}
{%- endblock -%}
"""
INDEX = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Continuous batching</title>
<style>:root { color-scheme: light dark } body { font: 1.1em/1.6 system-ui; margin: 2em auto; max-width: 90% }</style>
<h1>Continuous batching</h1>
{% for stem, title, headline in lessons -%}
<p><a href="{{ stem }}.html">{{ title }}</a> (<a href="{{ stem }}.ipynb">notebook</a>)<br>{{ headline }}</p>
{% endfor -%}
</html>
"""


class LessonError(Exception):
    """A cell that fails, or that writes what cannot be stored. The message says which cell, and why.

    Args:
        cell: the cell; the message has the number beside it.
        reason: the error.
        line: the line that failed, from 1; None if it is not known, then the first one is quoted.
    """

    def __init__(self, cell: NotebookNode, reason: str, line: int | None = None):
        place = f"cell [{cell.execution_count}]" + (f", line {line}" if line else "")
        quoted = cell.source.splitlines()[line - 1] if line else cell.source.strip().splitlines()[0]
        super().__init__(f"{place}\n    {quoted.strip()}\n{reason}")


def select(folder: Path, wanted: str = "") -> list[Path]:
    """The lessons in reading order: all of them, or those whose numbers `wanted` lists ("3", "1 3", "1,3").

    Raises:
        ValueError: the folder has no lessons, or none with a wanted number.
    """
    lessons = {re.match(r"\d+", path.name)[0]: path for path in folder.glob("[0-9]*.ipynb")}
    there_are = sorted(lessons, key=int)
    if not lessons:
        raise ValueError(f"There are no lessons in {folder}.")
    numbers = re.findall(r"[^\s,]+", wanted) or there_are
    for number in numbers:
        if number not in lessons:
            raise ValueError(f"There is no lesson {number}; there are {', '.join(there_are)}.")
    return [lessons[number] for number in there_are if number in numbers]


def title_of(nb: NotebookNode) -> str | None:
    """The lesson's first heading."""
    headings = (re.search(r"^# +(.+)", cell.source, re.M) for cell in nb.cells if cell.cell_type == "markdown")
    return next((heading[1].strip() for heading in headings if heading), None)


def headline_of(nb: NotebookNode) -> str:
    """What the cell tagged `headline` printed."""
    cells = [cell for cell in nb.cells if "headline" in cell.metadata.get("tags", [])]
    streams = [output.text for cell in cells for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return " ".join("".join(streams).split())


def execute(nb: NotebookNode, folder: Path, model: str, label: str) -> None:
    """Run every cell in place, in a new kernel that works in `folder`.

    `model` is what `load_model()` loads there by default ("" is the embedded model), `label` names the progress bar.
    """
    cells = [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "code" and cell.source.strip()]
    for number, (_, cell) in enumerate(cells, start=1):
        cell.outputs, cell.execution_count = [], number  # nothing old may remain behind a cell that fails
    options = {"kernel_name": "python3", "extra_arguments": ["--log-level=CRITICAL"]}
    client = NotebookClient(nb, resources={"metadata": {"path": str(folder)}}, **options)
    with client.setup_kernel(env=os.environ | {"COURSE_MODEL": model}):
        for index, cell in tqdm(cells, desc=label, unit="cell", leave=False):
            try:
                client.execute_cell(cell, index)
            except (CellExecutionError, DeadKernelError, KeyboardInterrupt) as error:
                name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
                raise LessonError(cell, f"{name}: {str(text)[:1000]}", failed_line(cell)) from error


def failed_line(cell: NotebookNode) -> int | None:
    """The line of a cell, from 1, at which its traceback begins; None if it has no traceback."""
    tracebacks = ("\n".join(output.traceback) for output in cell.outputs if output.output_type == "error")
    plain = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(tracebacks))
    found = re.search(rf"Cell In\[{cell.execution_count}\], line (\d+)", plain)
    return int(found[1]) if found else None


def write_pages(nb: NotebookNode, source: Path, out: Path) -> None:
    """The executed notebook and its HTML page, which holds its images and styles itself."""
    nbformat.write(nb, out / source.name)
    exporter = HTMLExporter(extra_loaders=[DictLoader({"page.html.j2": PAGE})], template_file="page.html.j2")
    # A page runs nothing, so it needs no cell that fetches the course (bootstrap.py).
    exporter.register_preprocessor(TagRemovePreprocessor(remove_cell_tags={"bootstrap"}, enabled=True))
    page, _ = exporter.from_notebook_node(nb, resources={"metadata": {"name": title_of(nb) or source.stem}})
    (out / f"{source.stem}.html").write_text(page, encoding="utf-8")


def write_index(out: Path) -> Path:
    """Link all lessons that were ever run, so that running one of them again does not hide the others."""
    ran = [(path.stem, nbformat.read(path, as_version=4)) for path in select(out)]
    lessons = [(stem, title_of(nb) or stem, headline_of(nb) or "stopped early") for stem, nb in ran]
    index = out / "index.html"
    index.write_text(Template(INDEX, autoescape=True).render(lessons=lessons), encoding="utf-8")
    return index


def normalise(nb: NotebookNode) -> NotebookNode:
    """An executed notebook in the form that is committed: nothing in it tells on which machine and when it ran.

    Raises:
        LessonError: a cell wrote to stderr, which would fail the comparison wherever that warning differs.
    """
    nb = nbformat.v4.upgrade(nb)  # cells of older notebooks get their ids
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nb.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
        merged = []
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise LessonError(cell, f"It wrote to stderr: {output.text.strip()}")
            if output.output_type == "error":
                output.traceback = output.traceback[-1:]  # the frames above name this machine's files
            if output.output_type == "stream" and merged and merged[-1].output_type == "stream":
                merged[-1].text += output.text
            else:
                merged.append(output)
        if cell.cell_type == "code":
            cell.outputs = merged
    return nb


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lessons that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lessons", default="", help='which, for instance "1 3"; all if left out')
    parser.add_argument("--model", default="", help="a model's folder or Hub id, instead of the embedded model")
    parser.add_argument("--save", action="store_true", help="store the outputs in the lessons themselves, too")
    parser.add_argument("--notebooks", type=Path, default=HERE, help="the folder of the lessons")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "course", help="where the pages go")
    args = parser.parse_args(argv)
    if args.save and args.model:
        parser.error("--save stores the embedded model's outputs, so it goes without --model")
    try:
        lessons = select(args.notebooks, args.lessons)
    except ValueError as error:
        sys.exit(str(error))

    local = Path(args.model).expanduser()  # relative to where the reader is, which is not where the kernel works
    model = str(local.resolve()) if args.model and local.exists() else args.model
    args.out.mkdir(parents=True, exist_ok=True)
    exit_code = 0
    for path in lessons:
        nb, start = nbformat.read(path, as_version=4), time.perf_counter()
        try:
            execute(nb, args.notebooks, model, label=path.stem)
            print(f"{path.stem:32} {time.perf_counter() - start:6.1f} s   {headline_of(nb)}", flush=True)
            if args.save:
                nbformat.write(normalise(nb), path)
        except LessonError as error:
            print(f"{path.name} stopped in {error}", file=sys.stderr)
            exit_code = 1
            break
        finally:
            write_pages(nb, path, args.out)
    print(f"To read them, open {os.path.relpath(write_index(args.out))}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
