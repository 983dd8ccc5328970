"""Free blocks, kept as gaps: neighbors of allocated blocks and the largest gap are found without a scan.

Contiguous blocks can be read as one slice. A sequence therefore gets the block after its last one if that is free.
Otherwise it gets the middle block of the largest gap, where it has room to grow, or block 0 if that gap begins there.
"""

import heapq


class FreeBlocks:
    """The set of free blocks. Taking or returning one costs O(log gaps), amortized.

    Args:
        count: the number of blocks, all free at first.
    """

    def __init__(self, count: int):
        self._count = 0
        self._end_of: dict[int, int] = {}  # by a gap's first block: the block after its last one
        self._start_of: dict[int, int] = {}  # by the block after a gap: the gap's first block
        self._largest: list[tuple[int, int]] = []  # a heap of (-length, start); some of these gaps no longer exist
        self._add_gap(0, count)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def take(self, after: int | None = None) -> int:
        """Take a free block, the one after `after` if possible, and return its number.

        Args:
            after: the last block of a sequence; None if it has no blocks.

        Raises:
            IndexError: no block is free.
        """
        if after is not None and after + 1 in self._end_of:
            start = block = after + 1
        else:
            while self._end_of.get(self._largest[0][1]) != self._largest[0][1] - self._largest[0][0]:
                heapq.heappop(self._largest)
            start = self._largest[0][1]
            block = (start + self._end_of[start]) // 2 if start > 0 else 0
        end = self._remove_gap(start)
        self._add_gap(start, block)
        self._add_gap(block + 1, end)
        self._count -= 1
        return block

    def put(self, block: int) -> None:
        """Return an allocated block to the free ones."""
        start, end = block, block + 1
        if block in self._start_of:
            start = self._start_of[block]
            self._remove_gap(start)
        if end in self._end_of:
            end = self._remove_gap(end)
        self._add_gap(start, end)
        self._count += 1

    def _add_gap(self, start: int, end: int) -> None:
        if start == end:
            return
        self._end_of[start], self._start_of[end] = end, start
        if len(self._largest) > 2 * len(self._end_of) + 16:  # most of these gaps no longer exist
            self._largest = [(one - other, one) for one, other in self._end_of.items()]
            heapq.heapify(self._largest)
        else:
            heapq.heappush(self._largest, (start - end, start))

    def _remove_gap(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._start_of[end]
        return end
