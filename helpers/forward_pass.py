"""What every way to execute an iteration hands back to the engine: who read how much, and what came out."""

from dataclasses import dataclass

import torch

from .scheduler import Chunk


@dataclass(frozen=True)
class ForwardPass:
    """What a forward pass did.

    Attributes:
        chunks: who read how much.
        padding: for each of them, the pads that were read beside.
        logits: [chunks that read their sequence to its end, vocabulary], in their order.
    """

    chunks: list[Chunk]
    padding: list[int]
    logits: torch.Tensor
