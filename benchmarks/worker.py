"""An engine in a process and an environment of its own, called over pipes: one line of JSON per call and per reply.

The process lives on between runs, so engines can take turns without loading their models again. Between runs it waits
in a read, which uses no processor time. Standard library only: this file also runs in the other engines' environments.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


class WorkerError(RuntimeError):
    """A call failed, or the process has ended; the message says which, why, and where the log is."""


class Worker:
    """Calls the methods of an engine in another process.

    Args:
        name: the engine's name, for messages.
        command: the program to start, which calls `serve`.
        log: the file for everything that the process prints.
        environment: variables to set in addition to this process's own.
    """

    def __init__(self, name: str, command: list, log: Path, environment: dict[str, str] | None = None):
        self.name, self.log = name, Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The worker must not import from the course's own environment.
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**inherited, **(environment or {})},
            )

    def call(self, method: str, **arguments):
        """Call a method of the engine, and return what it returns.

        Raises:
            WorkerError: the method failed, or the process ended.
        """
        try:
            self.process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.process.wait()
            raise WorkerError(f"{self.name}'s process ended with status {status} in {method}(). {self._last_line()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.name} failed in {method}(): {reply['error']} {self._last_line()}")
        return reply["result"]

    def close(self) -> None:
        """End the process by closing its input; if it is still alive after 20 seconds, kill it."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # it has ended, and left input unread
                pipe.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"The last line of its log: {lines[-1] if lines else 'none'} ({self.log})"


def serve(engine) -> None:
    """Call `engine`'s methods as the other process asks for them, until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to the log instead of between the replies
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = {"result": getattr(engine, call.pop("method"))(**call)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
