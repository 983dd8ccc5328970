"""Call a student's function so that nothing it does can escape: no traceback, no endless loop, no changed argument.

Whatever goes wrong becomes a `Wrong`, one short message. The student's own line is quoted, since that is where they
will look; Python's traceback through torch is not.
"""

import contextlib
import inspect
import linecache
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import Cache

from ..engine import Sequence
from .differences import Wrong, first_line

SECONDS = 10  # of computing that a single call may take; the longest of them needs less than one


class Attempt:
    """A student's function, to be called like the function itself.

    Args:
        function: what the student wrote.
        signature: how the exercise calls it, such as "left_pad(rows, pad_id)".
    """

    def __init__(self, function: Callable, signature: str):
        if not callable(function):
            name = signature.partition("(")[0]
            raise Wrong(
                f"is given {type(function).__name__}, not a function. Hand over the function itself, without calling "
                f'it: check("{name}", my_{name}).'
            )
        self.function, self.signature = function, signature

    def __call__(self, *arguments, given: str = "", hints: Mapping[str, str] | None = None, pure: bool = True):
        """What the function returns for these arguments.

        Args:
            given: the case in words, for a message ("the second batch is the wider one").
            hints: what a piece of an exception's text means in terms of the idea.
            pure: whether a changed argument is an error.

        Raises:
            Wrong: it raised, did not end, cannot be called like this, or changed an argument.
        """
        given = f" (given: {given})" if given else ""
        try:
            inspect.signature(self.function).bind(*arguments)
        except TypeError as error:
            raise Wrong(f"is called as {self.signature}, and your function does not take that: {error}.") from None
        except ValueError:
            pass  # some built-in functions have no signature: call and see
        before = _snapshot(arguments)
        try:
            with _time_limit(SECONDS):
                result = self.function(*arguments)
        except TimeLimitError:
            raise Wrong(f"did not finish within {SECONDS:g} seconds: does your loop end?{given}") from None
        except (Exception, SystemExit) as error:  # KeyboardInterrupt stays: it is the student's own wish
            raise Wrong(_explain(error, given, hints or {})) from None
        if pure and (changed := _changed(before, arguments, "")):
            raise Wrong(
                f"changed its argument: {changed} is not what it was. Return something new and leave the arguments "
                f"alone: otherwise a cell that is run twice gives two different results."
            )
        return result


# --- time ---------------------------------------------------------------------------------------------------------


class TimeLimitError(BaseException):
    """Raised inside the student's function; not an Exception, so that their `except Exception` cannot keep it."""


@contextlib.contextmanager
def _time_limit(seconds: float):
    """Interrupt the block after so many seconds where the platform can: Unix, and not in a second thread.

    Seconds of this thread's own computing, so that a busy machine fails nobody; at most six times that by the clock.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    running, computed, began = True, time.thread_time(), time.monotonic()

    def interrupt(signum, frame):
        if running and (time.thread_time() - computed >= seconds or time.monotonic() - began >= 6 * seconds):
            raise TimeLimitError

    previous = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 0.25)  # again and again: a bare `except:` may swallow it
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, previous)


# --- exceptions ---------------------------------------------------------------------------------------------------

_HELPERS = str(Path(__file__).parent.parent)
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen", _HELPERS)


def _explain(error: BaseException, given: str, hints: Mapping[str, str]) -> str:
    """One message for an exception: the student's line that led to it, what it says, what that may mean."""
    # walk_tb instead of extract_tb: it needs no source files, and the first frame is our own call.
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][1:]
    own = [(file, line) for file, line in frames if not any(part in file for part in _INSTALLED)]
    if isinstance(error, NotImplementedError) and own and frames[-1] == own[-1]:
        return "is not written yet. Put your code in the place of `raise NotImplementedError`, and run the cell again."
    where = ""
    if own:
        file, line = own[-1]
        source = linecache.getline(file, line).strip()
        where = f" in line {line}" + (f", `{source}`" if source else "")
    said = first_line(str(error))
    hint = next((f" {meaning}" for piece, meaning in hints.items() if piece in str(error)), "")
    return f"stopped with {type(error).__name__}{where}{': ' + said if said else ''}{given}{hint}"


# --- changed arguments --------------------------------------------------------------------------------------------


def _snapshot(value):
    """A copy deep enough to notice any change; what is not data (a model, a trace) is not looked into."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Cache):
        return [(layer.keys.clone(), layer.values.clone()) for layer in value.layers if layer.keys is not None]
    if isinstance(value, Sequence):
        return value, _snapshot(vars(value))
    if isinstance(value, dict):
        return {key: _snapshot(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_snapshot(each) for each in value]
    return value


def _changed(before, value, name: str) -> str | None:
    """In words, what of `value` is no longer as in its snapshot; None if all is."""
    if isinstance(value, torch.Tensor):
        return None if value.shape == before.shape and torch.equal(value, before) else name or "the tensor"
    if isinstance(value, Cache):
        now = _snapshot(value)
        same = len(now) == len(before) and all(map(_same_layer, now, before))
        return None if same else "the cache (the model grows the cache that it is given)"
    if isinstance(value, Sequence):
        if not isinstance(before, tuple) or value is not before[0]:  # another one stands in its place
            return name or "the list"
        return _changed(before[1], vars(value), name)
    if isinstance(value, dict):
        if value.keys() != before.keys():
            return f"the dict's set of keys ({', '.join(sorted(map(repr, value.keys() ^ before.keys())))})"
        return next((found for key in value if (found := _changed(before[key], value[key], f"`{key}`"))), None)
    if isinstance(value, list | tuple):
        if len(value) != len(before):
            return name or "the list"
        changes = (_changed(old, new, name) for old, new in zip(before, value, strict=True))
        return next((found for found in changes if found), None)
    if isinstance(value, int | float | str | bool | None):
        return None if value == before else name or "the list"
    return None


def _same_layer(one, other) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))
