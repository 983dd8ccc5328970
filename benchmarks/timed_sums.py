"""Record where the processes of a split model spend a forward pass, without a barrier and only while it is asked for.

A process writes when it enters and leaves each sum into a file that all of them map. Linux gives all processes the same
clock. So a process has waited until the last one entered, and everything after that is the sum itself.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers.fast.linear import FastLinear
from helpers.model_engine import make_fast

MOST_SUMS = 200  # of a pass
ON, PASS, PRODUCTS, SUMS, FIRST = range(
    5
)  # columns: the switch, seconds, the number of sums, when they began and ended


class PassRecorder:
    """What the processes have written about the latest pass.

    Args:
        path: the file, which is written anew.
        size: the number of processes.
    """

    def __init__(self, path: Path, size: int):
        self.table = np.memmap(path, float, "w+", shape=(size, FIRST + 2 * MOST_SUMS))

    def switch(self, on: bool) -> None:
        """Let the processes record their passes from now on, or no longer."""
        self.table[:, ON] = on

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the latest pass, by what they were spent on, as means over the processes."""
        sums = self.table[:, FIRST : FIRST + 2 * int(self.table[0, SUMS])].reshape(len(self.table), -1, 2)
        all_entered = sums[:, :, 0].max(0)
        parts = {
            "products": self.table[:, PRODUCTS].mean(),
            "waiting for the other": (all_entered - sums[:, :, 0]).sum(1).mean(),
            "sums": (sums[:, :, 1] - all_entered).sum(1).mean(),
        }
        total = self.table[:, PASS].mean()
        return parts | {"attention, norms, rest": total - sum(parts.values()), "pass": total}


def make_fast_and_timed(runner, config, path: Path, size: int):
    """Stand for `make_fast` in a process: return a runner that records its passes."""
    own = np.memmap(path, float, "r+", shape=(size, FIRST + 2 * MOST_SUMS))[dist.get_rank()]
    runner = make_fast(runner, config)
    call_model, all_reduce = runner.call_model, dist.all_reduce

    def timed_call(*args):
        own[PRODUCTS] = own[SUMS] = 0
        start = time.perf_counter()
        logits = call_model(*args)
        own[PASS] = time.perf_counter() - start
        return logits

    def timed_sum(tensor):
        if not own[ON]:
            return all_reduce(tensor)
        column = FIRST + 2 * int(own[SUMS])
        own[column] = time.perf_counter()
        all_reduce(tensor)
        own[column + 1], own[SUMS] = time.perf_counter(), own[SUMS] + 1

    def timed(product: Callable) -> Callable:
        def call(x):
            if not own[ON]:
                return product(x)
            start = time.perf_counter()
            output = product(x)
            own[PRODUCTS] += time.perf_counter() - start
            return output

        return call

    layers = [module for module in runner.model.modules() if isinstance(module, FastLinear | nn.Linear | Conv1D)]
    originals = {layer.layer for layer in layers if isinstance(layer, FastLinear)}
    for layer in layers:
        if layer not in originals:
            layer.forward = timed(layer.forward)
    runner.call_model, dist.all_reduce = timed_call, timed_sum
    return runner
