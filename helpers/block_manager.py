"""Keys and values in blocks: a sequence's cache need not lie in one piece, so memory is given out as it is needed.

The idea is PagedAttention's (Kwon et al., vLLM, SOSP 2023): memory is cut into blocks of a few tokens, and a sequence
has a *block table* that says which block holds which of its tokens, as an operating system's page table does. Nothing
is reserved for answers that may never become long, and two sequences that begin alike can have the same blocks.

Every block is in one of three places:

    used     in the table of at least one sequence; `references` counts in how many
    cached   in no table, but its tokens are known by their hash: the next request that begins alike can have it back
    free     nothing of interest in it

New tokens go to free blocks, and when there are none to the cached one that was used least recently. Only the books
are kept here, without torch; `ragged.py` holds the tensors.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256

from .sequence import Sequence

FREE, TAKEN = 1, 0


class BlockManager:
    """Gives out blocks; answers as `scheduler.Memory`.

    Args:
        blocks: how many there are.
        block_size: tokens in a block.
        prefix_caching: keep full blocks for requests that begin alike.

    Attributes:
        tables: for each sequence with memory, its block table.
        references: for each block, in how many tables it is.
        copies: (from, to) blocks whose contents have to be copied before the next forward pass writes anything.

    Raises:
        ValueError: fewer than one block or a block of fewer than one token.
    """

    def __init__(self, blocks: int, block_size: int = 16, prefix_caching: bool = True):
        if blocks < 1 or block_size < 1:
            raise ValueError(f"There is at least 1 block of at least 1 token, not {blocks} of {block_size}.")
        self.blocks, self.block_size, self.prefix_caching = blocks, block_size, prefix_caching
        self.tables: dict[Sequence, list[int]] = {}
        self.references = [0] * blocks
        self.copies: list[tuple[int, int]] = []
        self._free = bytearray([FREE]) * blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}  # by hash
        self._hash_of: dict[int, bytes] = {}
        self._hashes: dict[Sequence, list[bytes]] = {}  # of a sequence's full blocks, as far as they were computed

    # --- what a scheduler asks ----------------------------------------------------------------------------------

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence are there already; its last one is always left to read."""
        return self._shared(sequence)[1]

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Room for the next `tokens` tokens, or False and no change. A sequence that joins gets what it can share."""
        joins = sequence not in self.tables
        if joins:
            table, computed = self._shared(sequence)
        else:
            table, computed = self.tables[sequence], sequence.computed
        # The first new token may fall into a block that others have, too. They must not see it: write to a copy.
        last = computed // self.block_size
        copy = last < len(table) and self.references[table[last]] + joins > 1
        needed = self.blocks_for(computed + tokens) - len(table) + copy
        revived = sum(block in self._cached for block in table) if joins else 0
        if needed > self.available - revived:
            return False

        if joins:
            for block in table:
                self._refer(block)
            self.tables[sequence], sequence.computed = table, computed
        self._remember(sequence)
        if copy:
            old, table[last] = table[last], self._new(after=table[last - 1] if last else None)
            self.copies.append((old, table[last]))
            self._drop(old)
        for _ in range(self.blocks_for(computed + tokens) - len(table)):
            table.append(self._new(after=table[-1] if table else None))
        return True

    def release(self, sequence: Sequence) -> None:
        """The sequence gives up its blocks; those that are full can be had back, the first ones longest."""
        self._remember(sequence)
        for block in reversed(self.tables.pop(sequence, [])):
            self._drop(block)
        self._hashes.pop(sequence, None)
        sequence.computed = 0

    # --- what others ask ----------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def block_table(self, sequence: Sequence, length: int | None = None) -> list[int]:
        """Which block holds which tokens; filled up to `length` with -1, not allocated."""
        table = self.tables.get(sequence, [])
        return table + [-1] * ((length or 0) - len(table))

    def slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Where the tokens from `start` to `end` are: block * block size + place in the block."""
        table, size = self.tables[sequence], self.block_size
        return [table[token // size] * size + token % size for token in range(start, end)]

    @property
    def available(self) -> int:
        """Blocks that can be given out: free or cached."""
        return self._free.count(FREE) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks in the table of at least one sequence."""
        return self.blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks in no table that are kept for requests that begin alike."""
        return len(self._cached)

    @property
    def unused_tokens(self) -> int:
        """Room in used blocks that holds no token yet: all that paging wastes, less than a block a sequence."""
        return sum(len(table) * self.block_size - sequence.computed for sequence, table in self.tables.items())

    # --- blocks change places -------------------------------------------------------------------------------------

    def _shared(self, sequence: Sequence) -> tuple[list[int], int]:
        """Blocks of others that begin with the sequence's tokens, and how many tokens to use of them."""
        readable = len(sequence.token_ids) - 1  # reading the last one yields the next
        parent = sequence.parent
        if parent in self.tables and parent.computed >= readable and sequence.generated == 0:
            return self.tables[parent][: self.blocks_for(readable)], readable
        blocks = []
        if self.prefix_caching:
            for digest in self._chain(sequence.token_ids[:readable]):
                if digest not in self._block_of:
                    break
                blocks.append(self._block_of[digest])
        return blocks, len(blocks) * self.block_size

    def _chain(self, token_ids: list[int], known: list[bytes] | None = None) -> Iterator[bytes]:
        """A hash for each full block: of its tokens and of the hash before, so of everything up to its end."""
        known = known or []
        digest = known[-1] if known else b""
        for end in range(self.block_size * (len(known) + 1), len(token_ids) + 1, self.block_size):
            digest = sha256(digest + array("q", token_ids[end - self.block_size : end]).tobytes()).digest()
            yield digest

    def _remember(self, sequence: Sequence) -> None:
        """Hash the full blocks that have been computed since the last time."""
        if not self.prefix_caching or sequence not in self.tables:
            return
        hashes = self._hashes.setdefault(sequence, [])
        if sequence.computed // self.block_size > len(hashes):
            for digest in self._chain(sequence.token_ids[: sequence.computed], hashes):
                block = self.tables[sequence][len(hashes)]
                hashes.append(digest)
                if digest not in self._block_of:
                    self._block_of[digest], self._hash_of[block] = block, digest

    def _new(self, after: int | None) -> int:
        """A block to write to: the next one in memory if it is free, since neighbours can be read without copying.

        Else one in the middle of the largest gap, where there is room to grow; else the one cached longest ago.
        """
        if after is not None and after + 1 < self.blocks and self._free[after + 1]:
            block = after + 1
        else:
            gap = max(re.finditer(b"\x01+", self._free), key=lambda run: run.end() - run.start(), default=None)
            if gap:
                block = (gap.start() + gap.end()) // 2 if gap.start() > 0 else 0
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
        self._free[block] = TAKEN
        self.references[block] = 1
        return block

    def _refer(self, block: int) -> None:
        self.references[block] += 1
        self._cached.pop(block, None)

    def _drop(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free[block] = FREE
