"""Make a runner fast: linear layers with the fastest products, attention by a kernel, the forward pass written out."""

from transformers import PreTrainedModel

from ..engine import EngineConfig
from ..hardware import memory_bytes
from ..models import clone_sharing_weights
from ..runners import PaddedRunner, RaggedRunner
from . import kernels
from .attention import attend_with_kernel
from .batch_invariant import BatchInvariantRunner
from .linear import choose_linear_backends, unchanged_layers
from .linear_backends import BATCH_INVARIANT
from .recognition import find_executor

# Weights of a model that is larger are copied only if the configuration names such a backend.
MAX_COPIED_BYTES = max(2**30, memory_bytes() // 8)


def accelerate(runner: PaddedRunner | RaggedRunner, config: EngineConfig) -> PaddedRunner | RaggedRunner:
    """Return a runner that gives the same results sooner: this one, changed in place, or another one.

    Raises:
        ValueError: the configuration requires batch-invariant execution, kernels or a linear backend, but they are
            unavailable.
    """
    model, reason = runner.model, runner.not_ragged_because
    if config.batch_invariant and reason:
        raise ValueError(f"Batch-invariant execution must be ragged, but {reason}. Use batch_invariant=False.")
    kernel = attend_with_kernel if _use_kernels(model, config) else None
    if isinstance(model, PreTrainedModel):
        if reason:
            model = clone_sharing_weights(model)  # a ragged runner has a clone already
        if _choose_linear_backends(model, config):
            runner.model = model
    if reason:
        return runner
    if config.batch_invariant:
        _require_invariant_layers(model, kernel)
        invariant = BatchInvariantRunner(model, runner.num_blocks, runner.block_size, kernel)
        invariant.pool = runner.pool
        return invariant
    runner.kernel = kernel
    if executor := find_executor(runner):
        runner.call_model = executor
    return runner


def _choose_linear_backends(clone: PreTrainedModel, config: EngineConfig) -> int:
    copies = _may_copy(clone)
    if not config.batch_invariant:
        return choose_linear_backends(clone, config.linear_backend, copies)
    if config.linear_backend not in ("auto", *BATCH_INVARIANT):
        raise ValueError(
            f"With the linear backend {config.linear_backend!r}, a row depends on the number of rows. "
            f"batch_invariant=True requires {' or '.join(map(repr, BATCH_INVARIANT))}."
        )
    packed, unpacked = BATCH_INVARIANT
    chosen = config.linear_backend if config.linear_backend != "auto" else packed if copies else unpacked
    return choose_linear_backends(clone, chosen)


def _may_copy(model: PreTrainedModel) -> bool:
    """Return whether the model is small enough for further copies of its weights."""
    return sum(parameter.nbytes for parameter in model.parameters()) <= MAX_COPIED_BYTES


def _require_invariant_layers(model: PreTrainedModel, kernel) -> None:
    name = type(model).__name__
    if kernel is None:
        raise ValueError(f"{name} cannot run batch-invariant without kernels: leave out kernels=False.")
    if layers := unchanged_layers(model):
        raise ValueError(
            f"{name} cannot run batch-invariant: its layer {layers[0]} is not a plain linear layer, so its products "
            f"may depend on the number of rows. Use batch_invariant=False."
        )


def _use_kernels(model, config: EngineConfig) -> bool:
    """Return whether the kernels are requested and available; the first call compiles them."""
    if config.kernels is False or not isinstance(model, PreTrainedModel):
        return False
    problem = kernels.unavailable(model.dtype, model.device)
    if problem and config.kernels:
        raise ValueError(f"No kernels can be compiled here: {problem}. With kernels=None, PyTorch does their work.")
    return problem is None
