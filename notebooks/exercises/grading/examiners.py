"""Grade many submissions at once: each job is a process that grades one submission after another.

A submission does not run in this process but in a worker of its own. Should it end this process all the same, the next
submission gets a new one.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import SimpleQueue

from . import feedback
from .examination import Task, grade_cells, memo_task
from .submissions import GradingError, Submission, cells_of, memos_of, release_of
from .worker_process import Limits


@dataclass(frozen=True)
class Options:
    """How to grade.

    Attributes:
        limits: what a submission may use.
        seed: any text; the cases of a task follow from it.
        is_sandboxed: whether submissions run in the sandbox.
    """

    limits: Limits
    seed: str
    is_sandboxed: bool = True


@dataclass(frozen=True)
class Grade:
    """A line of the table, and the student's page. `note` says what went wrong, `tasks` has the points of each task.

    `memos` has the most points that the instructor can give each text; they are not part of `max_score`. `scores` has
    the standing of each task in a contest, by measure: the submission's own value, and the course's.
    """

    student: str
    assignment: str
    score: float = 0
    max_score: float = 0
    note: str = ""
    tasks: str = ""
    memos: tuple[tuple[str, float], ...] = ()
    name: str = ""
    page: str = ""
    scores: tuple[dict[str, tuple[int, int]], ...] = ()


def grade_all(submissions: list[Submission], options: Options, jobs: int) -> Iterator[Grade]:
    """Yield the grades, in the order in which they are done. Closing the iterator ends all examiners at once."""
    examiners = [_Examiner(options) for _ in range(jobs)]
    free: SimpleQueue[_Examiner] = SimpleQueue()
    for examiner in examiners:
        free.put(examiner)

    def grade(submission: Submission) -> Grade:
        examiner = free.get()
        try:
            return examiner.grade(submission)
        finally:
            free.put(examiner)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(grade, submission) for submission in submissions]):
                yield done.result()
        except BaseException:  # Ctrl-C, too: otherwise the pool would wait until all submissions are graded
            pool.shutdown(wait=False, cancel_futures=True)
            for examiner in examiners:
                examiner.stop()
            raise
    for examiner in examiners:
        examiner.close()


def grade_one(submission: Submission, options: Options) -> Grade:
    """Grade a submission; whatever is wrong with it becomes a note."""
    tasks: list[Task] = []
    notes, max_score, seed = [submission.note], 0.0, ""
    try:
        max_score = sum(cell.points for cell in release_of(submission.assignment))
        cells = cells_of(submission)
        tasks = grade_cells(cells, options.limits, options.seed, options.is_sandboxed)
        tasks += map(memo_task, memos_of(submission))
        seed = options.seed
    except GradingError as error:
        notes.append(str(error))
    except Exception as error:
        notes.append(f"grading failed: {type(error).__name__}: {error}")
    notes = list(filter(None, notes))
    return Grade(
        submission.student,
        submission.assignment,
        score=sum(task.earned for task in tasks),
        max_score=max_score,
        note="; ".join(filter(None, [*notes, *(task.note for task in tasks)])),
        tasks=", ".join(f"{task.name} {task.earned:g}/{task.points:g}" for task in tasks if task.points),
        memos=tuple((task.name, task.by_hand) for task in tasks if task.by_hand),
        name=submission.name,
        page=feedback.page(submission, tasks, "; ".join(notes), seed, max_score),
        scores=tuple(task.score for task in tasks if task.score),
    )


class _Examiner:
    """A process that grades submissions for this one."""

    def __init__(self, options: Options):
        self.options = options
        self.process: multiprocessing.process.BaseProcess | None = None
        self.is_stopped = False
        self.patience = 2 * options.limits.total_seconds + 3600

    def grade(self, submission: Submission) -> Grade:
        """Grade a submission; if that ends the process, this is what the grade says.

        Raises:
            CancelledError: the examiner was stopped meanwhile.
        """
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, grade_one, self.options), daemon=True)
            process.start()
            theirs.close()
            self.process = process
            if self.is_stopped:  # before there was a process to stop
                process.kill()
        try:
            self.connection.send(submission)
            if self.connection.poll(self.patience):
                return self.connection.recv()
            note = "grading failed: it took too long"
        except (EOFError, OSError):
            if self.is_stopped:
                raise CancelledError from None
            note = "grading failed: the grader's own process ended"
        self.close()
        max_score = sum(cell.points for cell in release_of(submission.assignment))
        page = feedback.page(submission, [], note, max_score=max_score)
        return Grade(submission.student, submission.assignment, 0, max_score, note, name=submission.name, page=page)

    def stop(self) -> None:
        """End the process while another thread may wait for its grade."""
        self.is_stopped = True
        if (process := self.process) is not None:  # which the other thread may close meanwhile
            process.kill()

    def close(self) -> None:
        """End the process."""
        if self.process:
            self.connection.close()  # so it ends by itself: one that is killed leaves semaphores, and Python warns
            self.process.join(10)
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(connection, grade: Callable, options: Options) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches all processes, and the grader ends this one
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "COURSE_MODEL": ""}  # as for the submissions
    while True:
        try:
            submission = connection.recv()
        except EOFError:
            return
        connection.send(grade(submission, options))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # and the sandbox ends with this process
