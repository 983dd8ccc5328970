"""Batch-invariant execution: a request's logits depend on its own tokens and on nothing else, bit for bit.

The sum of floating-point numbers depends on their order. A fast product chooses its order by the number of rows, and
fast attention by the length of a chunk. So the same request gets slightly different logits in another batch, and a near
tie between two tokens may go the other way. Here the order is fixed. One backend computes all linear layers, and its
sums for a row do not depend on the other rows. Each token is a segment of its own for attention, so it attends in the
same way whether it is a decode or part of a chunk. Then chunks, prefix caching and preemptions change no bit either.

Two things are not covered. Another processor, number of threads or version of PyTorch gives other bits. And PyTorch's
elementwise operators compute the last few numbers of a thread's share with other instructions than the rest. Where the
model is too narrow for that, or multiplies outside of linear layers, as mixtures of experts do, a trial finds it and
the model is refused.

The price is speed where the compiled kernel is not the fastest backend, and in the attention of prompts, whose keys are
read anew for each token.

He and Thinking Machines Lab describe the idea in "Defeating Nondeterminism in LLM Inference" (2025).
"""

from collections.abc import Callable

import torch

from ..engine import Chunk, Plan, Sequence
from ..models import context_length
from ..runners.attention import QuerySegment
from ..runners.ragged import RaggedRunner


class BatchInvariantRunner(RaggedRunner):
    """A ragged runner in which neither the chunks nor the batch of a sequence change a bit of its logits.

    Its model must consist of layers that compute each token on its own; `why_not_invariant` tries that out.
    """

    def __init__(self, model, num_blocks: int, block_size: int, kernel: Callable | None = None):
        super().__init__(model, num_blocks, block_size)
        self.kernel = kernel

    def segments(self, chunk: Chunk, column: int) -> list[QuerySegment]:
        """Return a segment for each token of a chunk that begins at a column of the row."""
        return [QuerySegment(column + n, 1, chunk.start + n, chunk.block_table) for n in range(chunk.tokens)]


def why_not_invariant(model, **options) -> str | None:
    """Return why a model's logits depend on a request's batch or chunks, or None if a trial shows no dependence.

    A sequence is computed alone in one pass, and then token by token or in chunks beside up to 40 other tokens. It is a
    trial on a few tokens, not a proof.

    Args:
        model: a clone of a model, because its attention and its config are changed.
        options: arguments of the runner.
    """
    expected = _logits(model, [11], 0, options)
    most = min(40, context_length(model) or 40, model.config.get_text_config().vocab_size - 20)
    for chunks, others in (([1] * 11, 0), ([11], 1), ([4, 7], min(6, most)), ([10, 1], min(17, most)), ([3, 8], most)):
        if not torch.equal(_logits(model, chunks, others, options), expected):
            return f"in chunks of {chunks} tokens beside {others} others, its logits differ from those of one chunk"
    return None


def _logits(model, sizes: list[int], num_others: int, options: dict) -> torch.Tensor:
    """Return the logits after a text in chunks of these sizes, each beside `num_others` others in scattered blocks."""
    runner = BatchInvariantRunner(model, num_blocks=32, block_size=4, **options)
    text = Sequence("text", list(range(1, 1 + sum(sizes))), 1)
    for size in sizes:
        chunks = [Chunk(text, size, [7, 2, 12] if num_others else [0, 1, 2])]
        if num_others:
            others = Sequence("others", list(range(20, 20 + num_others)), 1)
            chunks.append(Chunk(others, num_others, list(range(13, 32))))
        logits = runner.forward(Plan(chunks))
        text.computed += size
    return logits[0]
