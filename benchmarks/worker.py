"""An engine in a process and an environment of its own, asked over pipes: a line of JSON for each question and answer.

The process is kept alive between runs, so that engines can take turns without loading anew, and waits in a read
meanwhile, which costs no time on the cores. Standard library only: this file runs in the rivals' environments, too.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path


class WorkerError(RuntimeError):
    """The worker could not do what it was asked, or is gone; the message says which, why, and where its log is."""


class Worker:
    """The asking side.

    Args:
        name: the engine's, for messages.
        command: what to start; it calls `serve`.
        log: the file for whatever the process prints.
        environment: variables to set on top of this process's own.
    """

    def __init__(self, name: str, command: list, log: Path, environment: dict[str, str] | None = None):
        self.name, self.log = name, Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The course's own environment is no business of the worker's.
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

    def ask(self, call: str, **arguments):
        """Call a method of the engine on the other side and return what it returns.

        Raises:
            WorkerError: the method failed, or the process ended.
        """
        try:
            self.process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.process.wait()
            raise WorkerError(f"{self.name}'s process ended with status {status} when asked to {call}. {self._last()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name} could not {call}: {answer['error']} {self._last()}")
        return answer["result"]

    def close(self) -> None:
        """End the process: it sees the end of its input. One that does not is killed after a while."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # it ended by itself and left something unread
                pipe.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _last(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"Its last words: {lines[-1] if lines else 'none'} (all of them: {self.log})"


def serve(engine) -> None:
    """The answering side: until its input ends, call `engine`'s methods and write down what they return."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log and not between the answers
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"result": getattr(engine, question.pop("call"))(**question)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
