"""The tensors behind the blocks: keys and values of all layers, allocated once and written in place.

A *slot* holds the keys and values of one token. Its number is block * block size + offset in the block. The block
manager, not this file, decides which blocks a sequence has.
"""

from collections.abc import Iterator

import torch


class KVPool:
    """The keys and values of all sequences: two tensors [kv heads, slots, head dim] per layer.

    Args:
        num_blocks: the number of blocks.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_slots, self.block_size = num_blocks * block_size, block_size
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, key, value, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values [kv heads, T, head dim] of new tokens in their slots [T].

        Returns:
            The layer's keys and values, [kv heads, slots, head dim] each. The first call for a layer allocates them,
            because their shapes are not known before.
        """
        if layer not in self.layers:
            self.layers[layer] = self.allocate(key), self.allocate(value)
        for stored, new in zip(self.layers[layer], (key, value), strict=True):
            stored.index_copy_(1, slots, new)
        return self.layers[layer]

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return empty slots for keys or values such as these, [kv heads, T, head dim]."""
        return like.new_zeros(like.shape[0], self.num_slots, like.shape[2])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors; their second dimension is that of the slots."""
        return (tensor for layer in self.layers.values() for tensor in layer)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy a block's keys and values in all layers."""
        size = self.block_size
        for tensor in self.tensors():
            tensor[:, destination * size : (destination + 1) * size] = tensor[:, source * size : (source + 1) * size]


def slot_mapping(block_table: list[int], block_size: int, start: int, end: int) -> list[int]:
    """Return the slots of a sequence's tokens from `start` to `end` - 1."""
    return [block_table[token // block_size] * block_size + token % block_size for token in range(start, end)]


def key_slots(block_table: list[int], block_size: int, length: int, device) -> slice | torch.Tensor:
    """Return the slots of a sequence's first `length` tokens: a slice if its blocks are contiguous, otherwise a tensor.

    A slice is read in place; scattered slots must be gathered first.
    """
    first = block_table[0]
    if block_table == list(range(first, first + len(block_table))):
        return slice(first * block_size, first * block_size + length)
    blocks = torch.tensor(block_table, device=device)[:, None] * block_size
    return (blocks + torch.arange(block_size, device=device)).flatten()[:length]
