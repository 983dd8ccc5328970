"""Run the lessons from top to bottom: the first half of `make course`; docs/build_site.py then makes the site.

Two lessons run side by side, each with half of PyTorch's threads. A cell that measures seconds runs alone, with all of
them (`Machine`).

The executed notebooks go to build/course/, so that the lessons in notebooks/ stay as they are. A failing cell ends the
run with the lesson, the cell and the error; what ran up to there is written, too.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
# The tag of a cell that measures seconds, whether it shows them or a later cell does.
MEASURES = "measures"
# Two kernels whose PyTorch uses all cores wait for each other's threads in every operation.
SET_THREADS = """
import sys
if torch := sys.modules.get("torch"):
    torch.all_threads = getattr(torch, "all_threads", torch.get_num_threads())
    torch.set_num_threads(max(1, torch.all_threads // lessons))
"""


class Machine:
    """The places for running cells: a cell takes one, and a cell that measures seconds takes all of them."""

    PLACES = 2

    def __init__(self):
        self._free, self._turn = threading.Semaphore(self.PLACES), threading.Lock()

    @contextmanager
    def hold(self, alone: bool = False) -> Iterator[None]:
        """Wait until a place is free, or all of them; hold what was taken."""
        places = self.PLACES if alone else 1
        with self._turn:  # two callers that each had one place and waited for the other would wait for ever
            for _ in range(places):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(places)


class LessonError(Exception):
    """A cell that fails, or that writes what cannot be stored. The message says which cell, and why.

    Args:
        cell: the cell; the message has the number beside it.
        reason: the error.
        line: the line that failed, from 1; None if it is not known, then the first one is quoted.
    """

    def __init__(self, cell: NotebookNode, reason: str, line: int | None = None):
        location = f"cell [{cell.execution_count}]" + (f", line {line}" if line else "")
        quoted = cell.source.splitlines()[line - 1] if line else cell.source.strip().splitlines()[0]
        super().__init__(f"{location}\n    {quoted.strip()}\n{reason}")


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


def code_cells(nb: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """The cells that a kernel runs, each with its index."""
    return [(i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "code" and cell.source.strip()]


def headline_of(nb: NotebookNode) -> str:
    """What the cell tagged `headline` printed."""
    cells = [cell for cell in nb.cells if "headline" in cell.metadata.get("tags", [])]
    streams = [output.text for cell in cells for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return " ".join("".join(streams).split())


class Run:
    """A run of the course: what its lessons share.

    Args:
        model: what `load_model()` loads by default in the kernels; "" is the embedded model.
        bar: a progress bar that counts cells.
        side_by_side: how many lessons run at a time.
    """

    def __init__(self, model: str, bar: tqdm, side_by_side: int):
        self.model, self.bar, self.side_by_side = model, bar, side_by_side
        self.machine, self.ended, self.clients = Machine(), threading.Event(), []

    def execute(self, nb: NotebookNode, folder: Path) -> None:
        """Run every cell in place, in a new kernel that works in `folder`, until the run has ended.

        Raises:
            LessonError: a cell failed.
        """
        cells = code_cells(nb)
        for number, (_, cell) in enumerate(cells, start=1):
            cell.outputs, cell.execution_count = [], number  # nothing old may remain behind a cell that fails
        # A kernel that has loaded torch takes 3 s to end when asked to; nothing of it is needed any more.
        options = {"kernel_name": "python3", "shutdown_kernel": "immediate"}
        options["extra_arguments"] = ["--log-level=CRITICAL"]
        client = NotebookClient(nb, resources={"metadata": {"path": str(folder)}}, **options)
        with ExitStack() as kernel:
            with self.machine.hold():
                kernel.enter_context(client.setup_kernel(env=os.environ | {"COURSE_MODEL": self.model}))
            self.clients.append(client)
            kernel.callback(self.clients.remove, client)
            # Consecutive cells that measure hold the machine together, every other cell by itself.
            for key, group in groupby(cells, key=lambda pair: "alone" if measures(pair[1]) else pair[0]):
                with self.machine.hold(alone=key == "alone"):
                    for index, cell in group:
                        if not self.ended.is_set():
                            set_threads(client, lessons=1 if key == "alone" else self.side_by_side)
                            execute_cell(client, cell, index)
                            self.bar.update()
            with self.machine.hold():
                kernel.close()

    def stop(self) -> None:
        """End the run: kill the kernels, and run no other cell."""
        self.ended.set()
        for client in list(self.clients):
            asyncio.run(client.km.provisioner.kill())


def measures(cell: NotebookNode) -> bool:
    """Return whether other work on this machine would change the seconds that a cell measures."""
    return MEASURES in cell.metadata.get("tags", [])


def set_threads(client: NotebookClient, lessons: int) -> None:
    """Divide PyTorch's threads by the number of lessons that run; no name and no count of the kernel changes."""
    client.kc.execute(f"exec({SET_THREADS!r}, {{'lessons': {lessons}}})", silent=True)


def execute_cell(client: NotebookClient, cell: NotebookNode, index: int) -> None:
    """Run one cell in the client's kernel.

    Raises:
        LessonError: the cell failed.
    """
    try:
        client.execute_cell(cell, index)
    except (CellExecutionError, DeadKernelError) as error:
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


def reason_against(model: str) -> str:
    """Return why the lessons cannot load a model, or "": in a process of its own, so that its memory is free again."""
    loading = [sys.executable, "-c", "from helpers import load_model; load_model()"]
    options = {"cwd": HERE.parent, "env": os.environ | {"COURSE_MODEL": model}}
    done = subprocess.run(loading, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)
    return done.stderr.strip().splitlines()[-1].partition(": ")[2] if done.returncode else ""


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
    if model and (reason := reason_against(model)):
        parser.error(reason)
    notebooks = {path: nbformat.read(path, as_version=4) for path in lessons}
    total = sum(len(code_cells(nb)) for nb in notebooks.values())

    def run_lesson(path: Path) -> str:
        """Run a lesson and write it; return its line, or "" if the run ended before it did."""
        nb, start = notebooks[path], time.perf_counter()
        nb.metadata["course"] = {"model": args.model}
        if run.ended.is_set():
            return ""
        try:
            run.execute(nb, path.parent)
            if run.ended.is_set():
                return ""
            line = f"{path.stem:32} {time.perf_counter() - start:6.1f} s   {headline_of(nb)}"
            if args.save:
                nbformat.write(normalise(nb), path)
            return line
        except LessonError:
            run.ended.set()
            raise
        finally:
            executed = args.out / path.relative_to(args.notebooks)
            executed.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(nb, executed)

    # Two models of the reader's choice might not fit into the memory.
    side_by_side = 1 if args.model else Machine.PLACES
    with tqdm(total=total, unit="cell", leave=False) as bar, ThreadPoolExecutor(side_by_side) as pool:
        run = Run(model, bar, side_by_side)
        exit_code = 0
        try:
            for path, lesson in [(path, pool.submit(run_lesson, path)) for path in lessons]:
                try:
                    line, stream = lesson.result(), sys.stdout
                except LessonError as error:
                    line, stream, exit_code = f"{path.name} stopped in {error}", sys.stderr, 1
                if line:
                    with bar.external_write_mode(stream):
                        print(line, file=stream, flush=True)
        except KeyboardInterrupt:
            run.stop()
            raise
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
