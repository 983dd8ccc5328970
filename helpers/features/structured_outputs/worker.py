"""A process that compiles descriptions first: one that crashes, never ends or takes too much memory harms only it.

A compiled grammar cannot be sent between processes. So the worker shows that a description compiles within limits, and
then the engine's process compiles it again. Compilation is deterministic, so that takes no more time, memory or stack
than it took there.
"""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from . import compilation

START_LIMIT = 120.0  # seconds to import llguidance and to read a vocabulary, on a machine with other work
PROGRAM = compilation.__file__


class Worker:
    """Checks descriptions in a process of its own, one at a time, from any thread.

    The process starts with the first description, is replaced after a failure, and ends with this object or with the
    process that made it. After a fork, the child starts another one.

    Args:
        vocabulary: returns the arguments of `compilation.vocabulary`.
    """

    def __init__(self, vocabulary: Callable[[], tuple[str, int, list[int]]]):
        self._vocabulary = vocabulary
        self._begin()

    def _begin(self) -> None:
        self._owner, self._lock, self._end = os.getpid(), threading.Lock(), None
        self._process: subprocess.Popen | None = None

    def __deepcopy__(self, memo: dict) -> "Worker":
        return Worker(copy.deepcopy(self._vocabulary, memo))  # a copy of an engine has a process of its own

    def check(self, kind: str, text: str, seconds: float) -> bool:
        """Return whether a description can be compiled within so many seconds of processor time, and other limits.

        Args:
            kind, text: see `compilation.compile_text`.
            seconds: after them, the attempt ends.

        Raises:
            ValueError: it cannot be compiled.
        """
        if self._owner != os.getpid():
            self._begin()
        with self._lock:
            try:
                self._start()
                answer = self._ask([seconds, kind, text], 2 * seconds + 1)
            except BaseException:  # Ctrl-C: the answer would be read as that to the next description
                self.end()
                raise
        if isinstance(error := json.loads(answer or "false"), str):
            raise ValueError(error)
        return error is None

    def end(self) -> None:
        """End the process; a further description starts another one."""
        if self._end is not None:
            self._end()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        paths = os.pathsep.join(path for path in sys.path if path)
        settings = os.environ | {"PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8", "MALLOC_ARENA_MAX": "1"}
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=settings,
            encoding="utf-8",
            start_new_session=True,  # so that `_kill` reaches its forks
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        if self._ask(self._vocabulary(), START_LIMIT) is None:
            raise ValueError("The process that compiles structured outputs does not start: try again.")

    def _ask(self, message: Any, limit: float) -> str | None:
        """Return the answer; None if the process has ended, which it does after a time limit in seconds."""
        process = self._process
        timer = threading.Timer(limit, _kill, [process])
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            return process.stdout.readline() or self.end()
        except (OSError, ValueError):  # it has ended, or `end` has closed the pipes
            return self.end()
        finally:
            timer.cancel()


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:  # a forked child does not end its parent's worker
        _kill(process)
        process.wait()
        process.stdout.close()
        with contextlib.suppress(OSError):
            process.stdin.close()


def _kill(process: subprocess.Popen) -> None:
    """End a worker, and the fork that it waits for."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
