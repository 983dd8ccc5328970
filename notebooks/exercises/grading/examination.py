"""Examine one submission: run its cells in order in a sandbox, and examine its tasks from outside.

A cell or a task that ends the sandbox costs its own points. A new sandbox runs the earlier cells again, but for the
cell that ended the old one. What runs again costs the student no time, and no limit takes points that are earned.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from helpers.checks.calling import Outcome, Question, TimeLimitError, time_limit
from helpers.checks.comparing import Grids
from helpers.checks.examining import Verdict, examine
from helpers.checks.exercises import EXERCISES

from .submissions import Cell, GradingError
from .worker_process import Limits, WorkerLostError, WorkerProcess

MAX_WORKERS = 12  # for a submission
COMPARING_SECONDS = 300  # of the grader's own in a task, for references and comparisons on a busy machine


@dataclass
class Work:
    """A cell that the student wrote, and what it printed."""

    source: str
    printed: str = ""


@dataclass
class Task:
    """A task of a submission, graded.

    Attributes:
        name: of the exercise; "" for what follows the last task.
        points: that it is worth.
        earned: 0 or all of them.
        message: the check's.
        grids: what the check draws beside it.
        work: the student's cells since the task before.
        by_hand: the most points that the instructor can give for its text; 0 for what the grader examines.
        score: its standing in a contest, by measure: its own value, and the course's.
    """

    name: str
    points: float = 0
    earned: float = 0
    message: str = ""
    grids: Grids | None = None
    work: list[Work] = field(default_factory=list)
    by_hand: float = 0
    score: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """The message in a few words, or "" for full points."""
        first = re.split(r"\. | \(given", self.message)[0].rstrip(".")
        short = first if len(first) <= 100 else f"{first[:97]}..."
        return "" if self.earned or not self.points else f"{self.name}: {short}"


def grade_cells(cells: list[Cell], limits: Limits, seed: str, is_sandboxed: bool) -> list[Task]:
    """Run the cells and return the tasks; what a submission does raises nothing here.

    Of a check cell that was copied, the best copy counts, and the last of equal ones.
    """
    notebook = _Notebook(limits, is_sandboxed)
    tasks: dict[str, Task] = {}
    copies: Counter[str] = Counter()
    work, losses = [], []
    try:
        for cell in cells:
            if cell.task:
                copies[cell.task] += 1
                verdict = _examine(cell, notebook, case_seed(seed, cell.task, copies[cell.task]))
                message = f"A cell {losses[0]}." if losses and not verdict.passed else verdict.message
                earned, score = cell.points * verdict.passed, dict(verdict.score or {})
                task = Task(cell.task, cell.points, earned, message, verdict.grids, work, score=score)
                before = tasks.get(cell.task, task)
                best = before if before.earned > task.earned else task
                tasks[cell.task] = replace(best, work=work if before is task else before.work + work)
                work, losses = [], []
                continue
            try:
                printed = notebook.run(cell)
            except WorkerLostError as lost:
                printed = f"[This cell {lost}. It is left out, and the notebook goes on without it.]"
                losses.append(str(lost))
            if cell.is_students:
                work.append(Work(cell.source, printed))
    finally:
        notebook.close()
    return [*tasks.values(), Task("", work=work)] if work else [*tasks.values()]


def case_seed(seed: str, task: str, copy: int = 1) -> int:
    """Return the seed of a task's cases, 128 bits that differ from task to task.

    What a function sees while it is examined therefore says nothing about the next task, nor about a copy of this one.
    """
    return int.from_bytes(blake2b(f"{seed} {task} {copy}".encode(), digest_size=16).digest())


def memo_task(cell: Cell) -> Task:
    """Return the task of a text that the instructor grades."""
    message = f"Your instructor grades this text, with up to {cell.points:g} points."
    return Task(cell.memo, message=message, work=[Work(cell.source)], by_hand=cell.points)


def _examine(cell: Cell, notebook: "_Notebook", seed: int) -> Verdict:
    if cell.task not in EXERCISES:
        raise GradingError(f"there is no exercise {cell.task!r}: is the release up to date?")
    try:
        notebook.begin_task()
    except WorkerLostError as lost:
        return Verdict(False, f"{lost}.")
    end = time.monotonic() + notebook.limits.seconds

    def ask(question: Question) -> Outcome:
        return notebook.ask(question, cell.function, max(end - time.monotonic(), 0.1))

    exercise = EXERCISES[cell.task]
    if hasattr(exercise, "questions"):
        exercise.questions(seed)  # if this fails, the course is wrong, not the student
    try:
        with time_limit(notebook.limits.seconds + COMPARING_SECONDS):
            return examine(exercise, ask, seed)
    except TimeLimitError:
        notebook.close()
        return Verdict(False, "returns something that takes too long to compare.")
    except WorkerLostError as lost:
        return Verdict(False, f"{lost}.")
    except Exception as error:  # no check foresaw such a result
        return Verdict(False, f"returns something that cannot be compared ({type(error).__name__}).")


class _Notebook:
    """A worker and its history: when it is lost, another one runs the same cells."""

    def __init__(self, limits: Limits, is_sandboxed: bool):
        self.limits = limits
        self._deadline = time.monotonic() + limits.total_seconds
        self._start: Callable[[], WorkerProcess] = lambda: WorkerProcess(limits, is_sandboxed, self._deadline)
        self._worker: WorkerProcess | None = None
        self._started = 0
        self._added_seconds = 0.0  # of the cells that the student added since the last task
        self._history: list[str] = []  # without the cells that ended a worker

    def run(self, cell: Cell) -> str:
        """Run a cell and return what it printed.

        Raises:
            WorkerLostError: the worker is gone, or the cell was not run.
        """
        if cell.is_added and self._added_seconds >= self.limits.added_seconds:
            seconds = f"{self.limits.added_seconds:g} s"
            raise WorkerLostError(f"is not run: the cells that you added before this task took longer than {seconds}")
        worker = self._ready()
        start = time.monotonic()
        try:
            printed = worker.run(cell.source)
        except WorkerLostError:
            self._worker = None
            raise
        finally:
            self._added_seconds += cell.is_added * (time.monotonic() - start)
        self._history.append(cell.source)
        return printed

    def begin_task(self) -> None:
        """Make a worker ready for a task, in time that no task is charged.

        Raises:
            WorkerLostError: there can be none.
        """
        self._added_seconds = 0
        self._ready()

    def ask(self, question: Question, function: str, seconds: float) -> Outcome:
        """Put a question to a function of the notebook.

        Raises:
            WorkerLostError: the worker is gone.
        """
        try:
            return self._ready().ask(question, function, seconds)
        except WorkerLostError:
            self._worker = None
            raise

    def close(self) -> None:
        """End the worker; another one is started if it is needed."""
        if self._worker:
            self._worker.close()
            self._worker = None

    def _ready(self) -> WorkerProcess:
        while self._worker is None:
            if self._started == MAX_WORKERS:
                raise WorkerLostError(f"is not run, since the notebook has ended {MAX_WORKERS} processes")
            if time.monotonic() > self._deadline:
                raise WorkerLostError(f"is not run: the notebook took longer than {self.limits.total_seconds:g} s")
            self._started += 1
            worker = self._start()
            for place, source in enumerate(self._history):
                try:
                    worker.run(source, 2 * self.limits.seconds)  # the same work, on a machine that may be busier now
                except WorkerLostError:  # it did not the first time
                    del self._history[place]
                    break
            else:
                self._worker = worker
        return self._worker
