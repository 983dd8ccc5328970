"""A server in its own process, for as long as a `with` block lasts: for lessons, tests and load tests.

A server in the clients' process would compete with them for Python's interpreter lock, and distort the measured times.
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
class LaunchedServer:
    """A running server: its address and its process."""

    url: str
    process: subprocess.Popen


@contextmanager
def launch(*options: str, shares_cores: bool = True, module: str = "helpers.server") -> Iterator[LaunchedServer]:
    """Start a server with these options on a free port, and stop it at the end of the block.

    The server also stops when this process ends for any reason.

    Args:
        options: command-line options.
        shares_cores: whether other processes compute while the server does. Its idle threads then wait passively,
            which leaves the cores to the others and slows down the server when it is alone.
        module: what is run: "helpers.server", or "helpers.cluster" for replicas.

    Raises:
        RuntimeError: the server did not start; the message has its output.
    """
    command = [sys.executable, "-m", module, "--port", "0", "--stop-with-stdin", *options]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if shares_cores else {}
    environment = waiting | os.environ | {"PYTHONPATH": path}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        try:
            url = next((found[1] for line in process.stdout if (found := re.match(r"Listening on (\S+)", line))), None)
            if url is None:
                process.wait()
                log.seek(0)
                raise RuntimeError(f"The server did not start:\n{log.read()}")
            yield LaunchedServer(url, process)
        finally:
            process.terminate()
