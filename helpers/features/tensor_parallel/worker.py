"""The process that holds one share of a model: it computes passes, and sums partial results with the other processes.

It reads its share from standard input. Then it receives passes on a socket, and answers on it. While it computes, a
thread reports every BEAT seconds that the process lives, so that a long pass is not mistaken for a hang. When the other
end of the socket is closed, the engine has ended, however that happened, and so does the process.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...runners.attention import AttentionMetadata, QuerySegment
from ...runners.kv_pool import KVPool
from ...runners.ragged import RaggedRunner
from .split import Share

BEAT = 0.5  # seconds


class Start(NamedTuple):
    """How a process joins the others.

    Attributes:
        store: a new file that all of them share.
        threads: the number of PyTorch's threads.
        seconds: the limit of every sum.
        make_fast: lets the share's runner use kernels; every process times their products while the others do.
    """

    rank: int
    size: int
    store: str
    threads: int
    seconds: float
    share: Share
    make_fast: Callable[[RaggedRunner], RaggedRunner]


class Pass(NamedTuple):
    """One forward pass: what `RaggedRunner` gives to `call_model`, as tensors and numbers.

    Attributes:
        pool: the class of the pool, the number of blocks and the block size; others than the last pass's make a new
            pool, without the keys and values of the last one.
        copies: blocks to copy first, pairs of source and destination.
        segments: start, tokens, past and block table of each sequence.
    """

    pool: tuple[type[KVPool], int, int]
    copies: list[tuple[int, int]]
    token_ids: list[int]
    positions: list[int]
    columns: list[int]
    slots: list[int]
    segments: list[tuple[int, int, int, list[int]]]


class Sums:
    """Adds up partial results over the processes, and counts.

    Attributes:
        calls, bytes: the sums so far, and the bytes of the tensors that were summed.
    """

    def __init__(self):
        self.calls = self.bytes = 0

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes."""
        self.calls, self.bytes = self.calls + 1, self.bytes + partial.nbytes
        partial = partial.contiguous()
        dist.all_reduce(partial)
        return partial

    def attach(self, share: Share) -> None:
        """Let the modules of a share return sums."""
        model = share.model
        for path in share.sums:
            model.set_submodule(path, Summed(model.get_submodule(path), self.add))
        if share.vocabulary is not None:
            path, first = share.vocabulary
            model.set_submodule(path, SplitEmbedding(model.get_submodule(path), first, self.add))


class Summed(nn.Module):
    """A module whose results are partial. It is no hook, because a layer with hooks is not made fast."""

    def __init__(self, module: nn.Module, add: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.module, self.add = module, add

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return self.add(self.module(*args, **kwargs))


class SplitEmbedding(nn.Module):
    """An embedding of which the process has the rows from the token `first` on."""

    def __init__(self, embedding: nn.Module, first: int, add: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.embedding, self.first, self.add = embedding, first, add

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        own, count = token_ids - self.first, self.embedding.num_embeddings
        is_own = (own >= 0) & (own < count)
        return self.add(self.embedding(own.clamp(0, count - 1)) * is_own[..., None])


class Worker:
    """Computes passes on a share."""

    def __init__(self, start: Start):
        self.sums, self._pool = Sums(), None
        self.sums.attach(start.share)
        self.runner = start.make_fast(RaggedRunner(start.share.model, 1, 1))

    def compute(self, forward_pass: Pass) -> tuple[np.ndarray, int, int]:
        """Return logits [columns, own part of the vocabulary], float32, and the number of sums and their bytes."""
        runner, device = self.runner, self.runner.model.device
        if self._pool != forward_pass.pool:
            kind, runner.num_blocks, runner.block_size = self._pool = forward_pass.pool
            runner.pool = kind(runner.num_blocks, runner.block_size)
        token_ids, positions, columns, slots = (
            torch.tensor(numbers, dtype=torch.long, device=device)
            for numbers in (forward_pass.token_ids, forward_pass.positions, forward_pass.columns, forward_pass.slots)
        )
        segments = [QuerySegment(*segment) for segment in forward_pass.segments]
        metadata = AttentionMetadata(runner.pool, segments, slots, runner.kernel)
        calls, size = self.sums.calls, self.sums.bytes
        with torch.inference_mode():
            for source, destination in forward_pass.copies:
                runner.pool.copy_block(source, destination)
            logits = runner.call_model(token_ids, positions, columns, metadata)
        array = logits.cpu().float().numpy()  # NumPy has no bfloat16
        return array, self.sums.calls - calls, self.sums.bytes - size


class Channel:
    """Answers on the socket, and says that the process lives while it computes."""

    def __init__(self, connection: Connection):
        self._connection, self._lock, self._computing = connection, threading.Lock(), threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while self._computing.wait():
            time.sleep(BEAT)
            if self._computing.is_set():
                self._send(("alive", None))

    def _send(self, message) -> None:
        with self._lock:
            try:
                self._connection.send(message)
            except OSError:
                os._exit(1)  # the engine has ended; other threads may wait for processes that have, too

    def answer(self, compute) -> bool:
        """Send what a function returns, or its error; return whether it succeeded."""
        self._computing.set()
        try:
            message = "done", compute()
        except Exception as error:  # whatever a model raises
            message = "failed", f"{type(error).__name__}: {error}"
        self._computing.clear()
        self._send(message)
        return message[0] == "done"


def main(descriptor: int) -> None:
    """Run until the socket ends."""
    connection = Connection(descriptor)
    channel = Channel(connection)
    start: Start = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(start.threads)

    worker = None

    def join() -> str | None:
        """Join the other processes, and make the runner; return why this cannot be done as configured."""
        nonlocal worker
        backend = "nccl" if start.share.model.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{start.store}",
            rank=start.rank,
            world_size=start.size,
            timeout=timedelta(seconds=start.seconds),
        )
        try:
            worker = Worker(start)
        except ValueError as error:
            return str(error)
        return None

    if not channel.answer(join):
        return

    while True:
        try:
            forward_pass = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # without waiting for a sum that will never come
        channel.answer(lambda forward_pass=forward_pass: worker.compute(forward_pass))
