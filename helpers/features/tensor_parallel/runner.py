"""A ragged runner whose forward pass is computed by several processes."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...engine import EngineConfig, Plan, RunnerOutput
from ...engine.plan import Clock
from ...models import same_logits
from ...runners import PaddedRunner, RaggedRunner
from ...runners.attention import AttentionMetadata
from ...runners.kv_pool import KVPool
from ...runners.trial import BLOCK_SIZE, NUM_BLOCKS, trial_passes, trial_texts
from ...trace import Traffic
from .group import Group
from .split import check_divides, split_styles
from .worker import Pass


class _RemotePool:
    """Stands for the keys and values of all processes: remembers which blocks the next pass copies first."""

    def __init__(self, num_blocks: int, block_size: int, kind: type[KVPool] = KVPool):
        self.parts = kind, num_blocks, block_size
        self.copies: list[tuple[int, int]] = []

    def copy_block(self, source: int, destination: int) -> None:
        self.copies.append((source, destination))

    def take_copies(self) -> list[tuple[int, int]]:
        copies, self.copies = self.copies, []
        return copies


class TensorParallelRunner(RaggedRunner):
    """Computes all chunks of a plan in one forward pass of several processes; a `Runner`.

    Args:
        model: the whole model, of which each process gets a share.
        num_blocks, block_size: the size of the KV cache. Each process has these blocks for its heads.
        size: the number of processes.
        make_fast: lets the runner of each process use kernels; see `Start`.

    Attributes:
        group: the processes.
        has_lost_keys: whether keys and values were lost, with processes that failed.
        traffic: what the processes have sent to one another in the latest pass.

    Raises:
        ValueError: the model cannot be split, or a process cannot run as configured.
    """

    def __init__(
        self, model, num_blocks: int, block_size: int, size: int, make_fast: Callable[[RaggedRunner], RaggedRunner]
    ):
        super().__init__(model, num_blocks, block_size)
        check_divides(model, size)
        split_styles(model)  # before processes are started
        self.group, self.pool = Group(model, size, make_fast), _RemotePool(num_blocks, block_size)
        self.has_lost_keys, self.traffic = False, Traffic()
        self._weights = [weight for weight in model.parameters() if not weight.is_inference()]
        self._start()

    def _start(self) -> None:
        self._versions = [weight._version for weight in self._weights]
        self.group.start()

    def try_out(self, model) -> None:
        """Raise a ValueError unless the processes give the logits of the whole model, in a few short passes."""
        with torch.no_grad():
            texts = (torch.tensor([text], device=model.device) for text in trial_texts())
            alone = torch.cat([model(text).logits[0, -1:] for text in texts])
        trial_runner = copy.copy(self)
        trial_runner.block_size, trial_runner.pool = BLOCK_SIZE, _RemotePool(NUM_BLOCKS, BLOCK_SIZE)
        logits = torch.cat(list(trial_passes(trial_runner.forward)))
        if not same_logits(logits.to(alone.dtype), alone.cpu()):  # the dtype sets the tolerance
            self.group.end()
            raise ValueError(
                f"{type(self.model).__name__} cannot be split: on a trial, {self.group.size} processes give other "
                f"logits than one. Use tensor_parallel_size=1."
            )

    def run(self, plan: Plan, clock: Clock) -> RunnerOutput:
        """Do what `RaggedRunner` does, and note what the processes have sent."""
        output = super().run(plan, clock)
        return replace(output, passes=[replace(forward_pass, traffic=self.traffic) for forward_pass in output.passes])

    def _call_model(self, token_ids, positions, columns, metadata: AttentionMetadata) -> torch.Tensor:
        """Return logits [columns, vocabulary], as `RaggedRunner` does."""
        versions = [weight._version for weight in self._weights]
        segments = [(segment.start, segment.tokens, segment.past, segment.block_table) for segment in metadata.segments]
        numbers = (tensor.tolist() for tensor in (token_ids, positions, columns, metadata.slots))
        pool = metadata.pool
        try:
            if not self.group.is_running or versions != self._versions:
                self._start()  # after changed weights, the engine computes all keys again
            logits, *counts = self.group.compute(Pass(pool.parts, pool.take_copies(), *numbers, segments))
        except BaseException:
            self.has_lost_keys = True
            raise
        self.traffic = Traffic(*counts)
        return logits


def split_runner(
    runner: PaddedRunner | RaggedRunner, model, config: EngineConfig, make_fast: Callable
) -> TensorParallelRunner:
    """Return a runner that splits a model over `config.tensor_parallel_size` processes.

    Args:
        runner: the runner that was chosen for the model.
        model: the model.
        make_fast: given a runner and a configuration, returns a runner that uses kernels as configured; a function that
            other processes can import.

    Raises:
        ValueError: the model runs padded or cannot be split, or another setting cannot be combined with this one.
    """
    if runner.not_ragged_because:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} requires ragged execution, but "
            f"{runner.not_ragged_because}. Use tensor_parallel_size=1."
        )
    if config.batch_invariant:
        raise ValueError("A split model is not batch-invariant: use batch_invariant=False or tensor_parallel_size=1.")
    own = EngineConfig(linear_backend=config.linear_backend, kernels=config.kernels)  # all else is the engine's
    split = TensorParallelRunner(
        runner.model, runner.num_blocks, runner.block_size, config.tensor_parallel_size, partial(make_fast, config=own)
    )
    split.pool = _RemotePool(runner.num_blocks, runner.block_size, type(runner.pool))
    split.try_out(model)
    return split
