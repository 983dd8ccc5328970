"""Two loops in C++, where PyTorch's operators leave a CPU waiting for memory.

    linear            a few rows times a large weight, at the speed at which memory can be read
    paged_attention   all decodes of an iteration in one call, each from the blocks of its block table

They are compiled when they are first needed, once, in some seconds. Without a compiler, on another device and for other
dtypes, PyTorch's own operators do the same work, slower: ask `unavailable`.
"""

from .compiled import unavailable
from .linear import linear, pack
from .paged_attention import Decodes, paged_attention, takes

__all__ = ["Decodes", "linear", "pack", "paged_attention", "takes", "unavailable"]
