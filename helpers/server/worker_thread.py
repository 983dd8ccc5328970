"""A thread that calls functions one after another: whatever loads a model here also computes on this thread.

OpenMP, on which PyTorch computes, keeps a team of threads for each thread that starts a parallel loop. If the teams
together have more threads than there are cores, a team no longer spins between two loops but sleeps. Waking it up took
a third of an iteration: with GPT-2 124M (bfloat16, one sequence), an iteration took 14.0 ms on a thread beside the one
that had loaded the model, and 10.6 ms on that thread itself (AMD EPYC, Zen 4, 2 cores, medians).
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class WorkerThread:
    """Calls functions on one thread, in the order in which they were submitted.

    The thread does not keep the process alive, unlike that of a `ThreadPoolExecutor`: a program can be interrupted
    while it loads a model.
    """

    def __init__(self):
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Call a function once those before it have returned, and return the future of its result.

        Raises:
            RuntimeError: the thread has ended.
        """
        if not self._thread.is_alive():
            raise RuntimeError("The thread has ended and calls no more functions: make another WorkerThread.")
        future = Future()
        self._calls.put((function, future))
        return future

    def end(self) -> None:
        """End the thread once it has called the functions that were submitted; return then."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is read
                future.set_exception(error)
