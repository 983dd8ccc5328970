"""Batch-invariant execution: a request's logits depend on its own tokens and on nothing else, bit for bit.

The sum of floating-point numbers depends on their order. A fast product chooses its order by the number of rows, and
fast attention by the length of a chunk. PyTorch's elementwise operators compute the last few numbers of a thread's
share with other instructions than the rest. So the same request gets slightly different logits in another batch, and a
near tie between two tokens may go the other way.

Here every operation treats a token by itself, whatever the number of tokens and threads. One backend computes all
linear layers, and its sums for a row do not depend on the other rows. Norms, activations and rotations are those of the
kernels, which compute row by row. Each token is a segment of its own for attention, so it attends in the same way
whether it is a decode or part of a chunk. cos and sin come from a table. PyTorch looks up embeddings and adds them,
which rounds each number by itself. A model is refused if an operation would be computed otherwise: if its blocks are
not described in `decoder_blocks.py`, for example, or if a kernel does not know one of its parts.

One thing is not covered: another processor, compiler, number of threads or version of PyTorch may give other bits.

The price is speed where the compiled kernel is not the fastest backend, and in the attention of prompts, whose keys are
read anew for each token.

He and Thinking Machines Lab describe the idea in "Defeating Nondeterminism in LLM Inference" (2025).
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..engine import Chunk
from ..runners.attention import QuerySegment
from ..runners.ragged import RaggedRunner
from .decoder_blocks import Decoder, activation_kind
from .executor import Executor
from .plain_executor import PlainExecutor, Rotary
from .recognition import find_executor

POSITIONS = 1024  # of which cos and sin are computed at once


class BatchInvariantRunner(RaggedRunner):
    """A ragged runner in which neither the chunks nor the batch of a sequence change a bit of its logits.

    Args:
        model: a clone of a model, whose linear layers are batch-invariant already.
        num_blocks, block_size: the size of the KV cache, and the number of tokens per block.
        kernel: computes attention.

    Raises:
        ValueError: the model has a part whose results would depend on the other tokens of a pass.
    """

    def __init__(self, model, num_blocks: int, block_size: int, kernel: Callable):
        super().__init__(model, num_blocks, block_size)
        self.kernel = _complete(kernel)
        executor = find_executor(self, InvariantExecutor)
        problems = (
            _problems(executor.decoder) if executor else iter(["its blocks or their attention are of other kinds"])
        )
        if problem := next(problems, None):
            raise ValueError(
                f"{type(model).__name__} cannot run batch-invariant: {problem}. Use batch_invariant=False."
            )
        self.call_model = executor

    def segments(self, chunk: Chunk, column: int) -> list[QuerySegment]:
        """Return a segment for each token of a chunk that begins at a column of the row."""
        return [QuerySegment(column + n, 1, chunk.start + n, chunk.block_table) for n in range(chunk.tokens)]


class InvariantExecutor(Executor):
    """A forward pass of one kernel after the other, with cos and sin from a table.

    The table grows by `POSITIONS` rows at a time, so each is computed by the same call, whichever positions come first.
    """

    def __init__(self, *parts):
        super().__init__(*parts)
        self._table: list[torch.Tensor] = []  # cos and sin, [rotations, positions, rotated numbers of a head] each

    def __call__(self, *row) -> torch.Tensor:
        if self.is_hooked():
            raise ValueError("Batch-invariant execution calls no hooks, and one is registered on the model: remove it.")
        return super().__call__(*row)

    def cos_and_sin(self, hidden: torch.Tensor, positions: torch.Tensor) -> Rotary:
        last = int(positions.max())
        while not self._table or self._table[0].shape[1] <= last:
            start = self._table[0].shape[1] if self._table else 0
            more = super().cos_and_sin(hidden, torch.arange(start, start + POSITIONS, device=hidden.device))
            table = zip(self._table, more, strict=True) if self._table else ([tensor] for tensor in more)
            self._table = [torch.cat(list(parts), dim=1) for parts in table]
        cos, sin = self._table
        return cos[:, positions], sin[:, positions]

    def _executor(self, hidden, row) -> PlainExecutor:
        return self.plain


def _complete(kernel: Callable) -> Callable:
    """Return a kernel that raises an error where it would leave segments to PyTorch."""

    def complete(*arguments) -> list[QuerySegment]:
        if kernel(*arguments):
            raise ValueError("the kernel cannot compute the attention of a layer")
        return []

    return complete


def _problems(decoder: Decoder) -> Iterator[str]:
    """Yield the parts of a model that PyTorch would compute instead of a kernel, or whose numbers depend on others."""
    for number, block in enumerate(decoder.blocks):
        if activation_kind(block.activation) is None:
            yield f"no kernel computes the activation of block {number}, {block.activation}"
        for name, norm in block.norms.items():
            if not _has_kernel(norm, decoder):
                yield f"no kernel computes {name} of block {number}: its dtype is not the model's"
    if not _has_kernel(decoder.final_norm, decoder):
        yield "no kernel computes the last norm: its dtype is not the model's"
    rope = getattr(decoder.rotary, "rope_type", "default")
    for kind in rope.values() if isinstance(rope, dict) else [rope]:
        if "dynamic" in kind or kind == "longrope":
            yield f"its positions ({kind}) depend on the longest sequence of a pass"


def _has_kernel(norm: nn.Module, decoder: Decoder) -> bool:
    weights = [tensor for tensor in (norm.weight, getattr(norm, "bias", None)) if tensor is not None]
    return all(tensor.dtype == decoder.embedding.weight.dtype and tensor.is_contiguous() for tensor in weights)
