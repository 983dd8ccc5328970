"""Put a question to a student's function and contain whatever it does: exceptions, endless loops.

A question is data, and so is its outcome. A grader can therefore ask in the process that runs a submission, and
compare in its own.
"""

import contextlib
import copy
import inspect
import linecache
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from .comparing import first_line, kind

SECONDS = 10  # of wall-clock time per question; the slowest takes less than one


def call(function: Callable, *arguments):
    """Return what a function returns: the plainest way to observe it."""
    return function(*arguments)


def or_error(function: Callable, *arguments) -> dict:
    """Return what a function returns, or the text of its ValueError: some arguments have to be refused."""
    try:
        return {"error": None, "result": function(*arguments)}
    except ValueError as error:
        return {"error": str(error), "result": None}


@dataclass(frozen=True, eq=False)
class Question:
    """One call of a student's function.

    Attributes:
        signature: how the exercise calls the function, such as "left_pad(rows, pad_id)".
        arguments: what it is called with. The function receives copies.
        given: the case in words, for a message.
        observe: takes the function and the arguments, and returns what is compared. It is defined in a module that a
            grader's sandbox contains, so not next to a reference implementation.
        forbidden: the course's own solutions, as "module:function". They raise an error while the function runs.
        serve: what the function may ask of the process that puts the question, whose answers it cannot change. The
            observer gets it before the arguments.
    """

    signature: str
    arguments: tuple
    given: str = ""
    observe: Callable = call
    forbidden: tuple[str, ...] = ()
    serve: Callable | None = None


@dataclass(frozen=True)
class Failure:
    """What went wrong in a call.

    Attributes:
        error: the exception's type.
        said: the first line of its text.
        message: both in words, with the student's own line.
        is_final: whether no comparison can explain it better: the function is not written yet, or the call did not end.
    """

    error: str
    said: str
    message: str
    is_final: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a call did: its result or its failure, and its arguments as it left them."""

    result: object = None
    arguments: tuple = ()
    failure: Failure | None = None


def answer(question: Question, function: Callable) -> Outcome:
    """Put a question to a function; whatever goes wrong becomes a `Failure`."""
    name = question.signature.partition("(")[0]
    if not callable(function):
        return _final(
            f"is given {kind(function)}, not a function. Pass the function itself, without calling it: "
            f'check("{name}", my_{name}).'
        )
    try:
        named = question.signature.count(", ") + 1  # any others are for the observer
        inspect.signature(function).bind(*question.arguments[:named])
    except TypeError as error:
        return _final(f"is called as {question.signature}, but your function does not accept that: {error}.")
    except ValueError:
        pass  # some built-in functions have no signature: call and see
    arguments = copy.deepcopy(question.arguments)
    try:
        with _without(question.forbidden), time_limit(SECONDS):
            served = [question.serve] if question.serve else []
            result = question.observe(function, *served, *arguments)
    except TimeLimitError:
        given = f" (given: {question.given})" if question.given else ""
        return _final(f"did not finish within {SECONDS} seconds: does your loop end?{given}")
    except _ForbiddenError as error:
        return _final(f"calls the course's own `{error}`. In this exercise, you write it yourself.")
    except (Exception, SystemExit) as error:  # not KeyboardInterrupt: the student asked for that
        return Outcome(None, arguments, _explain(error))
    return Outcome(result, arguments)


def _final(message: str) -> Outcome:
    return Outcome(failure=Failure("", "", message, is_final=True))


class TimeLimitError(BaseException):
    """Raised inside the student's function; not an Exception, so that `except Exception` cannot catch it."""


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raise `TimeLimitError` in the block after so many seconds where that is possible: on Unix, in the main thread."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def interrupt(signum, frame):
        if running:
            raise TimeLimitError

    previous = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 0.25)  # repeatedly, because a bare `except:` may swallow it
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, previous)


class _ForbiddenError(BaseException):
    """Raised by a solution of the course that a student's function calls."""


@contextlib.contextmanager
def _without(names: tuple[str, ...]):
    """Make functions of the course raise an error within the block, under whatever name a student imported them."""
    swapped = []
    try:
        for name in names:
            function = resolve_name(name)
            shown = name.partition(":")[2]

            # The code runs with the globals of the course's module, so all that it needs is a default argument.
            def refuse(*args, _name=shown, _error=_ForbiddenError, **kwargs):
                raise _error(_name)

            swapped.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
            function.__code__ = refuse.__code__
            function.__kwdefaults__ = refuse.__kwdefaults__
            function.__defaults__ = None
        yield
    finally:
        for function, code, defaults, kwdefaults in swapped:
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, kwdefaults


_HELPERS = str(Path(__file__).parent.parent)
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen", _HELPERS)


def _explain(error: BaseException) -> Failure:
    """Return a failure that quotes the student's line, which says more to a student than a traceback."""
    # walk_tb instead of extract_tb: it needs no source files.
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not any(part in file for part in _INSTALLED)]
    name, said = type(error).__name__, first_line(str(error))
    if isinstance(error, NotImplementedError) and own and frames[-1] == own[-1]:
        message = "is not written yet. Replace `raise NotImplementedError` with your code, and run the cell again."
        return Failure(name, said, message, is_final=True)
    where = ""
    if own:
        file, line = own[-1]
        source = linecache.getline(file, line).strip()
        where = f" in line {line}" + (f", `{source}`" if source else "")
    return Failure(name, said, f"stopped with {name}{where}{': ' + said if said else ''}")
