"""A submission's process, seen from outside: it gets messages, and is killed when it takes more than its share.

A thread watches it: it reads what is printed, and ends the sandbox at the limits of time and memory. The kernel limits
the number of processes, because a watch is too slow for forks, the memory of each and the size of each file.
"""

import contextlib
import os
import pickle
import select
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing import Pipe

import psutil

from . import encoding, sandbox
from .worker import ASKS, OUT_OF_MEMORY

UNREADABLE = "sent the grader what is no result"
ENDED = "ended the process (a crash in a library, a kill or `os._exit`: no error can be shown)"


@dataclass(frozen=True)
class Limits:
    """What a submission may use.

    Attributes:
        seconds: for a cell, and for the examination of a task.
        added_seconds: for the cells together that a student added before a task; the release's own always run.
        total_seconds: for the whole submission, with the cells that a new process runs again.
        memory: bytes.
        processes: with threads, at the same time.
        printed: bytes that are kept of what a cell prints.
        threads: of PyTorch.
    """

    seconds: float = 60
    added_seconds: float = 600
    total_seconds: float = 7200
    memory: int = 4 * 2**30
    processes: int = 48
    printed: int = 8000
    threads: int = 1


class WorkerLostError(Exception):
    """The process is gone; the text says why."""


class WorkerProcess:
    """A running worker.

    Args:
        limits: what it may use.
        is_sandboxed: whether it runs in the sandbox, which is slower by nothing and safer by far.
        deadline: on `time.monotonic`'s clock, for the whole submission.
    """

    STARTUP_SECONDS = 180  # to import PyTorch on a busy machine

    def __init__(self, limits: Limits, is_sandboxed: bool, deadline: float):
        self.limits, self.deadline, self.reason = limits, deadline, ""
        self._until = deadline
        self._printed, self._lock = bytearray(), threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="submission-", ignore_cleanup_errors=True)
        self._connection, theirs = Pipe()
        numbers = [theirs.fileno(), limits.memory, sandbox.TMP_BYTES, limits.processes if is_sandboxed else 0]
        command = [*sandbox.python_command(), "-m", "grading.worker", *map(str, numbers)]
        self._process = subprocess.Popen(
            sandbox.sandboxed(command) if is_sandboxed else command,
            env=sandbox.environment(limits.threads),
            cwd=self._folder.name,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._watch = threading.Thread(target=self._keep_watch, daemon=True)
        self._watch.start()
        try:
            self._receive(self.STARTUP_SECONDS)
        except WorkerLostError:
            if time.monotonic() < deadline:
                raise RuntimeError(f"no process for the submission: {self._printed.decode()[-300:]}") from None
            raise

    def run(self, source: str, seconds: float | None = None) -> str:
        """Run a cell and return what it printed. By default it may take the limit of a cell."""
        self.printed()
        if self._exchange(("run", source), seconds) == OUT_OF_MEMORY:
            self.close()  # the error's traceback keeps all that was allocated, and later cells would fail, too
            raise WorkerLostError(self._too_much_memory)
        return self.printed()

    def ask(self, question, name: str, seconds: float):
        """Put a question to a function of the notebook and return the `Outcome`; serve what it asks meanwhile."""
        end = time.monotonic() + seconds
        data = self._exchange(("answer", replace(question, serve=None), question.serve is not None, name), seconds)
        try:
            while question.serve and data.startswith(ASKS):
                reply = question.serve(encoding.decode(data.removeprefix(ASKS)).result)
                data = self._exchange(reply, max(end - time.monotonic(), 0.1))
            return encoding.decode(data)
        except ValueError:
            self.close()
            raise WorkerLostError(UNREADABLE) from None

    def printed(self) -> str:
        """Return what was printed since the last call, cut to the limit."""
        self._read()  # what it printed before it replied is in the pipe
        with self._lock:
            data, self._printed = bytes(self._printed), bytearray()
        text = data[: self.limits.printed].decode("utf-8", errors="replace")
        return text + "\n[The rest is cut.]" if len(data) > self.limits.printed else text

    def close(self) -> None:
        """End the process, and all that it has started."""
        self._kill()
        self._process.wait()
        self._watch.join()
        self._connection.close()
        self._process.stdout.close()
        self._folder.cleanup()

    # --- messages -----------------------------------------------------------------------------------------------

    def _exchange(self, message, seconds: float | None = None) -> bytes:
        self._until = min(time.monotonic() + (self.limits.seconds if seconds is None else seconds), self.deadline)
        with contextlib.suppress(OSError):  # a process that is gone says so below
            self._connection.send_bytes(pickle.dumps(message))
        return self._receive()

    def _receive(self, seconds: float | None = None) -> bytes:
        if seconds is not None:
            self._until = min(time.monotonic() + seconds, self.deadline)
        try:
            return self._connection.recv_bytes(encoding.MAX_BYTES)
        except (EOFError, OSError) as error:
            self.close()
            default = ENDED if isinstance(error, EOFError | ConnectionError) else UNREADABLE
            raise WorkerLostError(self.reason or default) from None
        finally:
            self._until = self.deadline

    # --- the watch ----------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        next_look = 0.0
        while self._process.poll() is None:
            if not self._read(wait=0.1):
                time.sleep(0.02)
            if time.monotonic() >= next_look:
                self.reason = self.reason or self._excess()
                if self.reason:
                    self._kill()
                next_look = time.monotonic() + 0.2

    def _read(self, wait: float = 0) -> bool:
        """Keep what is printed, as far as it will be shown; return whether there was something."""
        ready, *_ = select.select([self._output], [], [], wait)
        data = b""
        with self._lock:  # or one thread could find the pipe empty before the other has kept what it read
            with contextlib.suppress(BlockingIOError):  # the other thread has it
                data = os.read(self._output, 2**16) if ready else b""
            self._printed += data[: self.limits.printed + 1 - len(self._printed)]
        return bool(data)

    def _excess(self) -> str:
        """Return which limit is exceeded, or ""."""
        if time.monotonic() > self.deadline:
            return f"took longer than {self.limits.total_seconds:g} s in all"
        if time.monotonic() > self._until:
            return f"took longer than {self.limits.seconds:g} s"
        processes = self._processes()
        if len(processes) > self.limits.processes + 3:  # of the sandbox's own
            return f"started more than {self.limits.processes} processes"
        memory = 0  # what processes share counts several times: to find out takes locks that forking holds
        for process in processes:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
        if memory > self.limits.memory:
            return self._too_much_memory
        return ""

    @property
    def _too_much_memory(self) -> str:
        return f"used more than {self.limits.memory / 2**30:g} GB of memory"

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _kill(self) -> None:
        processes = self._processes()
        self._process.kill()  # of the sandbox, all processes end with the first
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
