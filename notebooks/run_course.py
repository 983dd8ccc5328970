"""Run the lessons from top to bottom: the first half of `make course`; docs/build_site.py then makes the site.

The executed notebooks go to build/course/, so that the lessons in notebooks/ stay as they are. A failing cell ends the
run with the lesson, the cell and the error; what ran up to there is written, too.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

HERE = Path(__file__).resolve().parent


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
    """The notebooks in reading order: all of them, or those that `wanted` lists.

    A lesson is named by its number, and a notebook in extra/ by its file name: "3", "1 3", "1,3 anyscale_23x".

    Raises:
        ValueError: the folder has no lessons, or none with a wanted name.
    """
    lessons = {re.match(r"\d+", path.name)[0]: path for path in folder.glob("[0-9]*.ipynb")}
    extra = {path.stem: path for path in sorted(folder.glob("extra/*.ipynb"))}
    notebooks = {number: lessons[number] for number in sorted(lessons, key=int)} | extra
    if not lessons:
        raise ValueError(f"There are no lessons in {folder}.")
    names = re.findall(r"[^\s,]+", wanted) or list(notebooks)
    for name in names:
        if name not in notebooks:
            raise ValueError(f"There is no lesson {name}; there are {', '.join(notebooks)}.")
    return [path for name, path in notebooks.items() if name in names]


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
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "course", help="where executed lessons go")
    args = parser.parse_args(argv)
    if args.save and args.model:
        parser.error("--save stores the embedded model's outputs, so it goes without --model")
    try:
        lessons = select(args.notebooks, args.lessons)
    except ValueError as error:
        parser.error(str(error))

    local = Path(args.model).expanduser()  # relative to where the reader is, which is not where the kernel works
    model = str(local.resolve()) if args.model and local.exists() else args.model
    for path in lessons:
        nb, start = nbformat.read(path, as_version=4), time.perf_counter()
        nb.metadata["course"] = {"model": args.model}
        try:
            execute(nb, path.parent, model, label=path.stem)
            print(f"{path.stem:32} {time.perf_counter() - start:6.1f} s   {headline_of(nb)}", flush=True)
            if args.save:
                nbformat.write(normalise(nb), path)
        except LessonError as error:
            print(f"{path.name} stopped in {error}", file=sys.stderr)
            return 1
        finally:
            executed = args.out / path.relative_to(args.notebooks)
            executed.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(nb, executed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
