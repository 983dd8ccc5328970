"""Interrupts: Ctrl-C during an iteration waits for the iteration's end, so no state has to be rebuilt from halves.

`deferred()` promises that the block below it runs to its end although Ctrl-C is pressed once; `KeyboardInterrupt` is
raised then. A second Ctrl-C is not deferred: it ends an iteration that hangs, and the engine must not be used
afterwards. Python runs signal handlers on the main thread only, so on other threads nothing is interrupted, and nothing
is done here. Exceptions that another thread injects (`PyThreadState_SetAsyncExc`) are not deferred.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Noted:
    """A signal handler that notes interrupts; a second one is raised at once."""

    def __init__(self, handler: Callable):
        self.handler, self.calls = handler, []

    def __call__(self, number, frame):
        self.calls.append((number, frame))
        if len(self.calls) > 1:
            self.handler(number, frame)


@contextmanager
def deferred() -> Iterator[None]:
    """Run a block to its end before an interrupt is raised."""
    handler = signal.getsignal(signal.SIGINT)
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or not callable(handler) or isinstance(handler, _Noted):
        yield  # nothing can interrupt this thread, interrupts are ignored, or an outer block defers them
        return
    noted = _Noted(handler)
    signal.signal(signal.SIGINT, noted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(noted.calls) == 1:
            handler(*noted.calls[0])
