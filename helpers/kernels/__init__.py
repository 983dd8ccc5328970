"""Two loops in C++, for the places where PyTorch's operators leave a CPU waiting for memory.

    linear            multiply a few rows by a large weight, at the speed at which memory can be read
    paged_attention   compute the attention of all decodes of an iteration in one call, through their block tables

The first use compiles them, which takes some seconds; the result is kept on disk. Without a compiler, on other devices
and for other dtypes, PyTorch's own operators do the same work more slowly. `unavailable` returns the reason.
"""

from .compiled import unavailable
from .linear import linear, pack
from .paged_attention import Decodes, is_supported, paged_attention

__all__ = ["Decodes", "is_supported", "linear", "pack", "paged_attention", "unavailable"]
