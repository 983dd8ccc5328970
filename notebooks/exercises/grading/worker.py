"""The program in the sandbox: it runs a notebook's cells and calls the student's functions with given arguments.

It belongs to the submission once the first cell has run, so nothing that it says is trusted. It knows no right result.
"""

import os
import pickle
import resource
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import helpers.checks
from helpers.checks import calling

from . import encoding

FIRST_USER = 2_000_000_000  # numbers from here on belong to no account
OUT_OF_MEMORY = b"out of memory"
ASKS = b"?"  # begins what a function asks the grader while it runs


def serve(connection: Connection) -> None:
    """Do what the grader asks for, one message after the other: run a cell, or put a question to a function."""
    shell = _shell()
    while True:
        kind, *content = pickle.loads(connection.recv_bytes())
        try:
            reply = _run(shell, *content) if kind == "run" else _answer(shell, connection, *content)
        except BaseException as error:  # KeyboardInterrupt and the like, from a student's function
            name = type(error).__name__
            failure = calling.Failure(name, "", f"stopped with {name}.", is_final=True)
            reply = encoding.encode(calling.Outcome(failure=failure))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.send_bytes(reply)


def _run(shell, source: str) -> bytes:
    error = shell.run_cell(source, store_history=True).error_in_exec
    is_full = isinstance(error, MemoryError) or "can't allocate memory" in str(error)  # Python's error, or PyTorch's
    return OUT_OF_MEMORY if is_full else b""


def _answer(shell, connection: Connection, question: calling.Question, serves: bool, name: str) -> bytes:
    if name not in shell.user_ns:
        message = f"no cell defines `{name}`, or the cell that does so failed."
        return encoding.encode(calling.Outcome(failure=calling.Failure("", "", message, is_final=True)))

    def ask(message: tuple):
        connection.send_bytes(ASKS + encoding.encode(calling.Outcome(message)))
        return pickle.loads(connection.recv_bytes())

    return encoding.encode(calling.answer(replace(question, serve=ask if serves else None), shell.user_ns[name]))


def _shell():
    from IPython.core.interactiveshell import InteractiveShell

    class Shell(InteractiveShell):
        def enable_gui(self, gui=None):
            """Accept every `%matplotlib`: there is no window."""

    shell = Shell.instance()
    shell.colors = "nocolor"
    return shell


def _check(task, attempt=None) -> bool:
    print(f"{task}: examined by the grader, outside of the notebook.")
    return True


def main(fd: str, memory: str, file_size: str, processes: str) -> None:
    """Limit what the process may use, say that it is ready, and serve."""
    if int(processes):  # in the sandbox, where all of the user's processes are the submission's
        if os.getuid() == 0:  # for root the kernel has no such limit, so each worker of root becomes another user
            user = FIRST_USER + int(time.time_ns() // 1000) % 10**6
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        resource.setrlimit(resource.RLIMIT_NPROC, (int(processes), int(processes)))
    for limit, value in [
        (resource.RLIMIT_DATA, int(memory)),
        (resource.RLIMIT_FSIZE, int(file_size)),
        (resource.RLIMIT_CORE, 0),
    ]:
        resource.setrlimit(limit, (value, value))
    helpers.checks.check = _check
    connection = Connection(int(fd))
    connection.send_bytes(b"")
    serve(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
