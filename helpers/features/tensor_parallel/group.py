"""The processes of one model: started together, asked together, and ended together.

A process that has died, stopped or raised leaves the others waiting for its part of a sum. So any failure ends all of
them, and the next pass starts new ones.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait

import torch

from ...runners import RaggedRunner
from .split import share_of
from .worker import Pass, Start, main

START_LIMIT = 120.0  # seconds to import torch and to receive a share, on a machine with other work
SILENCE_LIMIT = 6.0  # seconds without a sign of life, while a process computes

ADVICE = "Send the request again: new processes start with the next pass."


class WorkerError(RuntimeError):
    """An error that says which process of a split model failed, and how."""


class Group:
    """The processes that hold a model's shares.

    Args:
        model: the whole model.
        size: the number of processes.
        make_fast: see `Start`.

    Attributes:
        processes: by rank; empty while none run.
    """

    def __init__(self, model, size: int, make_fast: Callable[[RaggedRunner], RaggedRunner]):
        self.model, self.size, self.make_fast = model, size, make_fast
        self.processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        self._finalizer = None

    @property
    def is_running(self) -> bool:
        """Whether the processes have been started and not ended since."""
        return bool(self.processes)

    def start(self) -> None:
        """Start the processes, and give each its share.

        Raises:
            ValueError: the model cannot be split, or a process cannot run as configured.
            WorkerError: a process has failed.
        """
        self.end()
        with tempfile.TemporaryDirectory() as folder:
            self._open()
            try:
                threads = max(1, torch.get_num_threads() // self.size)
                timer = threading.Timer(START_LIMIT, _kill, [self.processes])
                timer.daemon = True
                timer.start()
                try:
                    for rank, process in enumerate(self.processes):
                        share = share_of(self.model, rank, self.size)
                        store = os.path.join(folder, "store")
                        start = Start(rank, self.size, store, threads, START_LIMIT, share, self.make_fast)
                        with contextlib.suppress(OSError):  # its end is noticed below
                            pickle.dump(start, process.stdin, protocol=5)
                            process.stdin.close()
                finally:
                    timer.cancel()
                for refusal in filter(None, self._answers(START_LIMIT)):
                    raise ValueError(refusal)
            except BaseException:
                self.end()
                raise

    def _open(self) -> None:
        interface = "lo0" if sys.platform == "darwin" else "lo"  # no other machine can connect
        paths = os.pathsep.join(path for path in sys.path if path)
        settings = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": interface, "OMP_WAIT_POLICY": "PASSIVE"}
        for _ in range(self.size):
            own, other = Pipe()
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {main.__module__} import main; main({other.fileno()})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=settings,
                pass_fds=[other.fileno()],
                start_new_session=True,  # Ctrl-C is for the engine alone
            )
            other.close()
            self.processes.append(process)
            self._connections.append(own)
        self._finalizer = weakref.finalize(self, _end, self.processes, self._connections, os.getpid())

    def compute(self, forward_pass: Pass) -> tuple[torch.Tensor, int, int]:
        """Compute a pass in all processes.

        Returns:
            Logits [columns, vocabulary], float32; the number of sums that each process took part in; their bytes.

        Raises:
            WorkerError: a process has died, stopped or raised; all processes have been ended.
        """
        try:
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send(forward_pass)
                except OSError as error:
                    raise self._ended(rank) from error
            answers = self._answers(SILENCE_LIMIT)
        except BaseException:
            self.end()
            raise
        logits = torch.cat([torch.from_numpy(part) for part, _, _ in answers], dim=1)
        return logits, *answers[0][1:]

    def _answers(self, limit: float) -> list:
        """Return the answers of all processes, each of which gives a sign of life within so many seconds."""
        answers: dict[int, object] = {}
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        heard = dict.fromkeys(ranks.values(), time.monotonic())
        while len(answers) < self.size:
            open_ones = [connection for connection, rank in ranks.items() if rank not in answers]
            for connection in wait(open_ones, timeout=0.2):
                rank = ranks[connection]
                heard[rank] = time.monotonic()
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError) as error:
                    raise self._ended(rank) from error
                if kind == "failed":
                    time.sleep(0.2)  # if another process has ended, sums have failed for that reason
                    for other, process in enumerate(self.processes):
                        if process.poll() is not None:
                            raise self._ended(other)
                    raise WorkerError(f"Process {rank} of {self.size} of the model failed with {content}. {ADVICE}")
                if kind == "done":
                    answers[rank] = content
            silent = [rank for rank in heard if rank not in answers and time.monotonic() - heard[rank] > limit]
            if silent:
                raise WorkerError(
                    f"Process {silent[0]} of {self.size} of the model has given no sign of life for {limit:g} seconds. "
                    f"{ADVICE}"
                )
        return [answers[rank] for rank in range(self.size)]

    def _ended(self, rank: int) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(1)
        return WorkerError(
            f"Process {rank} of {self.size} of the model has ended, with exit status "
            f"{self.processes[rank].returncode}. {ADVICE}"
        )

    def end(self) -> None:
        """End all processes."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self.processes, self._connections = [], []


def _kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()


def _end(processes: list[subprocess.Popen], connections: list[Connection], owner: int) -> None:
    if os.getpid() != owner:  # a forked child does not end its parent's processes
        return
    _kill(processes)
    for process, connection in zip(processes, connections, strict=True):
        process.wait()
        connection.close()
        with contextlib.suppress(OSError):
            process.stdin.close()
