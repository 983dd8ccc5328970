"""The chain of hashes by which blocks of the KV cache are recognized: equal hashes mean equal prefixes.

The block manager registers blocks by these hashes. A router that knows the hashes of a replica's blocks can therefore
tell how much of a prompt the replica has cached (`cluster/replica_state.py`).
"""

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from hashlib import sha256


def hash_blocks(token_ids: Seq[int], block_size: int, previous: bytes = b"") -> Iterator[bytes]:
    """Yield a hash for each full block of tokens.

    A hash covers the block's tokens and the hash of the block before it, hence all tokens up to the block's end.

    Args:
        token_ids: the tokens from the beginning of a block on.
        block_size: tokens per block.
        previous: the hash of the block before the first one; the salt at the beginning of a sequence.
    """
    for end in range(block_size, len(token_ids) + 1, block_size):
        previous = sha256(previous + array("q", token_ids[end - block_size : end]).tobytes()).digest()
        yield previous


class RecordedBlocks(dict):
    """The registered blocks by hash, with a record of changes: a hash, and whether it was registered or evicted."""

    def __init__(self, blocks: dict[bytes, int]):
        super().__init__(blocks)
        self.events = deque((digest, True) for digest in blocks)

    def __setitem__(self, digest: bytes, block: int) -> None:
        super().__setitem__(digest, block)
        self.events.append((digest, True))

    def __delitem__(self, digest: bytes) -> None:
        super().__delitem__(digest)
        self.events.append((digest, False))

    def clear(self) -> None:
        self.events.extend((digest, False) for digest in self)
        super().clear()
