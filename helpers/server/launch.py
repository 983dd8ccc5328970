"""A server in a process of its own, for as long as a `with` lasts: for lessons, tests and load tests.

In the same process, the server and those who ask it would wait for each other's turn with Python's interpreter lock,
and the times that are measured would be of that.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Launched:
    """A running server: where it is, and its process."""

    url: str
    process: subprocess.Popen


@contextmanager
def launch(*options: str) -> Iterator[Launched]:
    """Start `python -m helpers.server` with these options on a free port, and stop it at the end.

    It also ends when this process does, however that happens.

    Raises:
        RuntimeError: it did not start; with what it had to say.
    """
    command = [sys.executable, "-m", "helpers.server", "--port", "0", "--stop-with-stdin", *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": path}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=said, text=True) as process,
    ):
        try:
            url = next((found[1] for line in process.stdout if (found := re.match(r"Listening on (\S+)", line))), None)
            if url is None:
                process.wait()
                said.seek(0)
                raise RuntimeError(f"The server did not start:\n{said.read()}")
            yield Launched(url, process)
        finally:
            process.terminate()
