"""The blocks of the KV cache: a sequence's blocks need not be contiguous, so memory is allocated as it is needed.

The idea is PagedAttention's (Kwon et al., vLLM, SOSP 2023). Memory is divided into blocks of a few tokens each. A
sequence's *block table* lists the blocks that hold its tokens, in order, like an operating system's page table. No
memory is reserved for tokens that may never be generated, and sequences with the same prefix can share blocks.

Every block is in one of three states:

    used     in the table of at least one sequence; `references` counts the tables
    cached   in no table, but registered by the hash of its tokens: a request with the same prefix can reuse it
    free     its contents are no longer needed

New tokens are written to free blocks. If no block is free, the least recently used cached block is evicted. This file
does the bookkeeping only, without torch. `runners/kv_pool.py` holds the tensors.
"""

import itertools
from collections import OrderedDict
from collections.abc import KeysView

from ..block_hashes import RecordedBlocks, hash_blocks
from .sequence import Sequence


class UnlimitedMemory:
    """Stands in for a `BlockManager` where a sequence needs only a row: nothing is refused, and nothing is shared."""

    def cached_tokens(self, sequence: Sequence) -> int:
        return 0

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        return True

    def allocate_drafts(self, sequence: Sequence, tokens: int) -> int:
        return tokens

    def free_rejected_drafts(self, sequence: Sequence) -> None:
        pass

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        return False

    def free(self, sequence: Sequence) -> None:
        sequence.computed = 0

    def block_table(self, sequence: Sequence) -> list[int]:
        return []

    def take_copies(self) -> list[tuple[int, int]]:
        return []


class BlockManager:
    """Allocates blocks to sequences.

    Args:
        num_blocks: the number of blocks.
        block_size: tokens per block.
        prefix_caching: whether full blocks are kept for later requests with the same prefix.

    Attributes:
        tables: the block table of every sequence that has blocks.
        references: for each block, the number of tables that contain it.
        copies: (source, destination) blocks to copy before the next forward pass writes anything.

    Raises:
        ValueError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix_caching: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"There must be at least 1 block of at least 1 token, not {num_blocks} of {block_size}.")
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.tables: dict[Sequence, list[int]] = {}
        self.references = [0] * num_blocks
        self.copies: list[tuple[int, int]] = []
        self._free = FreeBlocks(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}  # by hash
        self._hash_of: dict[int, bytes] = {}
        self._registered: dict[Sequence, int] = {}  # how many of a sequence's full blocks are registered

    # --- what the scheduler calls -------------------------------------------------------------------------------

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence are cached already: at most all but the last one."""
        return self._shared(sequence)[1]

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks for the next `tokens` tokens, or return False and change nothing.

        A sequence without blocks first gets those that it can share, and its `computed` is set to their tokens.
        """
        admitted = sequence not in self.tables
        table, computed = self._shared(sequence) if admitted else (self.tables[sequence], sequence.computed)
        # If the first new token falls into a block that other sequences share, it is written to a copy.
        last = computed // self.block_size
        copy = last < len(table) and self.references[table[last]] + admitted > 1
        new = self.blocks_for(computed + tokens) - len(table)
        reused = sum(block in self._cached for block in table) if admitted else 0
        if new + copy > self.available - reused:
            return False

        if admitted:
            for block in table:
                self._refer(block)
            self.tables[sequence], sequence.computed = table, computed
        self._register(sequence)
        if copy:
            self._copy(table, last)
        for _ in range(new):
            table.append(self._new(after=table[-1] if table else None))
        return True

    def allocate_drafts(self, sequence: Sequence, tokens: int) -> int:
        """Allocate blocks for drafts that follow a decode, and return how many of them fit.

        Only free blocks are taken: drafts may be wrong, so they evict no cached block and preempt no sequence.
        """
        table, end = self.tables[sequence], sequence.computed + 1
        for _ in range(min(self.blocks_for(end + tokens) - len(table), len(self._free))):
            table.append(self._new(after=table[-1]))
        return min(tokens, len(table) * self.block_size - end)

    def free_rejected_drafts(self, sequence: Sequence) -> None:
        """Free the blocks after a sequence's computed tokens; they held rejected drafts only."""
        table = self.tables[sequence]
        while len(table) > self.blocks_for(sequence.computed):
            self._drop(table.pop())

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a sequence share all blocks of another one instead of its own, or return False if that one has none."""
        if parent not in self.tables:
            return False
        self.free(child)
        self.tables[child], child.computed = list(self.tables[parent]), parent.computed
        for block in self.tables[child]:
            self._refer(block)
        return True

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's blocks and set its `computed` to 0.

        With prefix caching, full blocks stay cached, and the first ones are evicted last.
        """
        self._register(sequence)
        for block in reversed(self.tables.pop(sequence, [])):
            self._drop(block)
        self._registered.pop(sequence, None)
        sequence.computed = 0

    def forget_cached(self) -> None:
        """Free all cached blocks, and share no block of now: its keys and values would be those of other weights."""
        for block in self._cached:
            self._free.add(block)
        for known in (self._cached, self._block_of, self._hash_of, self._registered):
            known.clear()

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (source, destination) blocks to copy before the next forward pass, and clear the list."""
        copies, self.copies = self.copies, []
        return copies

    def take_cache_events(self) -> list[tuple[bytes, bool]]:
        """Return what was registered and evicted since the last call, and forget it; at first, what is registered.

        Another thread may make all calls but the first one while the engine runs.

        Returns:
            The hashes of blocks, each with whether it was registered or, otherwise, evicted, in order.
        """
        if not isinstance(self._block_of, RecordedBlocks):
            self._block_of = RecordedBlocks(self._block_of)
        events = self._block_of.events
        return [events.popleft() for _ in range(len(events))]

    # --- counts and tables --------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks this many tokens need."""
        return -(-tokens // self.block_size)

    def block_table(self, sequence: Sequence) -> list[int]:
        """Return the block table of a sequence, which the caller must not change; empty if it has no blocks."""
        return self.tables.get(sequence, [])

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """The number of blocks in the table of at least one sequence."""
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """The number of blocks that are in no table, but kept for requests with the same prefix."""
        return len(self._cached)

    @property
    def cached_blocks(self) -> KeysView[int]:
        """These blocks, the one that will be evicted first at the beginning."""
        return self._cached.keys()

    @property
    def unused_tokens(self) -> int:
        """The number of allocated slots without a token: all that paging wastes, less than a block per sequence."""
        return sum(len(table) * self.block_size - sequence.computed for sequence, table in self.tables.items())

    # --- sharing ------------------------------------------------------------------------------------------------

    def _shared(self, sequence: Sequence) -> tuple[list[int], int]:
        """Return the blocks that already hold a prefix of a waiting sequence, and the prefix's length in tokens."""
        limits = [feature.num_reusable_tokens(sequence) for feature in sequence.request.features]
        usable = min([len(sequence.token_ids) - 1, *limits])  # the last token's logits give the next token
        first, prefix = sequence.request.sequences[0], sequence.token_ids[:usable]
        # A further output of a prompt shares all blocks of the first one, the last and partly filled one included.
        if first in self.tables and first.computed >= usable and first.token_ids[:usable] == prefix:
            return self.tables[first][: self.blocks_for(usable)], usable
        hashes = self._hashes(sequence, usable) if self.prefix_caching else []
        blocks = [self._block_of[digest] for digest in itertools.takewhile(self._block_of.__contains__, hashes)]
        return blocks, len(blocks) * self.block_size

    def _hashes(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """Return a hash for each full block of the first `tokens` tokens."""
        known, size = sequence.block_hashes, self.block_size
        if len(known) < tokens // size:
            previous = known[-1] if known else sequence.request.salt
            known += hash_blocks(sequence.token_ids[len(known) * size : tokens], size, previous)
        return known[: tokens // size]

    def _register(self, sequence: Sequence) -> None:
        """Register the full blocks that were computed since the last call, so that other sequences can share them."""
        registered, full = self._registered.get(sequence, 0), sequence.computed // self.block_size
        if full <= registered or not self.prefix_caching or sequence not in self.tables:
            return
        table, hashes = self.tables[sequence], self._hashes(sequence, sequence.computed)
        for index in range(registered, full):
            if hashes[index] not in self._block_of:
                self._block_of[hashes[index]], self._hash_of[table[index]] = table[index], hashes[index]
        self._registered[sequence] = full

    # --- blocks change state ------------------------------------------------------------------------------------

    def _new(self, after: int | None) -> int:
        """Return a block to write to: a free one, if possible the one after `after`, or else an evicted one."""
        if self._free:
            block = self._free.take(after)
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self.references[block] = 1
        return block

    def _copy(self, table: list[int], index: int) -> None:
        """Put a copy into a table, to write to, in place of a block that other tables contain, too."""
        old, table[index] = table[index], self._new(after=table[index - 1] if index else None)
        self.copies.append((old, table[index]))
        self._drop(old)

    def _refer(self, block: int) -> None:
        self.references[block] += 1
        self._cached.pop(block, None)

    def _drop(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.add(block)


class FreeBlocks(set):
    """The free blocks.

    Contiguous blocks can be read as one slice. A sequence therefore gets the block after its last one if that is free.
    Otherwise it starts somewhere else, where it probably has room to grow: the starts halve the memory, then its
    halves, and so on (bit-reversal order, the van der Corput sequence).

    Args:
        count: the number of blocks, all free at first.
    """

    def __init__(self, count: int):
        super().__init__(range(count))
        self._count = count
        self._starts = itertools.cycle(sorted(range(count), key=lambda block: f"{block:064b}"[::-1]))

    def take(self, after: int | None = None) -> int:
        """Take a free block, if possible the one after the last block of a sequence, and return its number.

        Raises:
            KeyError: no block is free.
        """
        block = -1 if after is None else after + 1
        if block not in self and 16 * len(self) < self._count:
            return self.pop()  # most starts are taken, so a free one would be far
        while block not in self:
            block = next(self._starts)
        self.remove(block)
        return block
