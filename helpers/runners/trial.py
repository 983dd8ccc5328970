"""A short run that shows whether two ways to run a model give the same logits: decodes, chunks and prompts in one row.

A trial is no proof. It is shorter than sliding windows, and it has few tokens.
"""

from collections.abc import Callable, Iterator

import torch

from ..engine import Chunk, Plan, Sequence

NUM_BLOCKS, BLOCK_SIZE = 4, 4  # what the trial's runner needs


def trial_passes(forward: Callable[[Plan], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the logits of three passes over two sequences: [1, vocabulary], then twice [2, vocabulary].

    The first sequence computes its 5 tokens, then decodes. The second one computes its 7 tokens in chunks of 3 and 4,
    then decodes.
    """
    first, second = Sequence("first", list(range(1, 6)), 3), Sequence("second", list(range(1, 8)), 3)
    tables = {first: [0, 1], second: [2, 3]}
    for sizes in ({first: 5, second: 3}, {first: 1, second: 4}, {first: 1, second: 1}):
        chunks = [Chunk(sequence, tokens, tables[sequence]) for sequence, tokens in sizes.items()]
        yield forward(Plan(chunks))
        for chunk in chunks:
            chunk.sequence.computed += chunk.tokens
            if chunk.samples_token:
                chunk.sequence.token_ids.append(len(chunk.sequence.token_ids) + 1)


def trial_texts() -> list[list[int]]:
    """Return the texts after which the trial samples, in the order of its logits [5, vocabulary]."""
    return [list(range(1, end)) for end in (6, 7, 8, 8, 9)]
