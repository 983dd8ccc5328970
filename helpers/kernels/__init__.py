"""C++ kernels, for work that PyTorch's operators do more slowly on a CPU.

    linear            multiplies a few rows by a large weight, as fast as memory can be read
    unpacked_linear   does so without a copy of the weight in another order
    quantized_linear  does so with a weight of integers, which take fewer bytes
    paged_attention   computes the attention of all sequences of an iteration in one call, through their block tables
    add_norm, gelu_   compute what lies between linear layers in one pass over memory
    gpt2_blocks       calls these kernels for all blocks of GPT-2 at once

The first use compiles them, which takes some seconds; the result is kept on disk. Without a compiler, on other devices
and for dtypes other than float32 and bfloat16, PyTorch's operators do this work. `unavailable` returns the reason.
"""

from .compiled import unavailable
from .elementwise import add_norm, gelu_
from .gpt2 import GPT2Block, gpt2_block, gpt2_blocks
from .linear import PackedWeight, linear, pack
from .paged_attention import Segments, is_supported, paged_attention
from .quantized import quantized_linear
from .unpacked_linear import unpacked_linear

__all__ = [
    "GPT2Block",
    "PackedWeight",
    "Segments",
    "add_norm",
    "gelu_",
    "gpt2_block",
    "gpt2_blocks",
    "is_supported",
    "linear",
    "pack",
    "paged_attention",
    "quantized_linear",
    "unavailable",
    "unpacked_linear",
]
