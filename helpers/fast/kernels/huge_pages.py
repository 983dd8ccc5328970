"""Allocate tensors in huge pages, so that reading them takes few translations of addresses.

The processor translates addresses page by page, and its own prefetching ends at the end of a page. A weight of 5 MB
fills 1,200 ordinary pages of 4 KB, or three huge ones of 2 MB. Linux makes a huge page only where 2 MB from a multiple
of 2 MB on belong to one allocation, and only on request. Weights that are allocated one by one contain few such ranges,
so here they are cut from larger regions. A region is freed with the last of its tensors. A tensor of more than half a
region does not share one, because a small tensor would keep its memory.
"""

import contextlib
import math
import mmap
import threading
import weakref

import torch

REGION = 64 * 2**20  # bytes; pages that are never used take no memory
LINE = 64  # bytes; tensors begin at a multiple


class HugePages:
    """Cuts tensors from regions of memory, one after the other. Freed tensors leave gaps."""

    def __init__(self):
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None  # only the tensors keep a region
        self._used = 0  # bytes of the newest region

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor on the CPU, in huge pages if the system has them."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = -(-count * dtype.itemsize // LINE) * LINE
        if size > REGION // 2:
            return torch.frombuffer(_map(size), dtype=dtype, count=count).view(shape)
        with self._lock:
            region = self._newest() if self._newest is not None else None
            if region is None or self._used + size > len(region):
                region = _map(size)
                self._newest, self._used = weakref.ref(region), 0
            start, self._used = self._used, self._used + size
        return torch.frombuffer(region, dtype=dtype, count=count, offset=start).view(shape)


def _map(size: int) -> mmap.mmap:
    flags = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows has no such flags
    region = mmap.mmap(-1, -(-size // REGION) * REGION, **flags)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


empty = HugePages().empty
