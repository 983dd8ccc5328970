"""C++ kernels, for work that PyTorch's operators do more slowly on a CPU.

    linear            multiplies a few rows by a large weight, as fast as memory can be read
    unpacked_linear   does so without a copy of the weight in another order
    quantized_linear  does so with a weight of integers, which take fewer bytes; it may round the rows to integers, too
    dequantize        returns such a weight as floats, for products of many rows
    paged_attention   computes the attention of all sequences of an iteration in one call, through their block tables
    add_norm, rotate_, activate   compute what lies between linear layers in one pass over memory
    compute_blocks    calls these kernels for all blocks of a decoder at once

The first use compiles them, which takes some seconds; the result is kept on disk. Without a compiler, on other devices
and for dtypes other than float32 and bfloat16, PyTorch's operators do this work. `unavailable` returns the reason.
"""

from .blocks import NORMS, AdaptedBlock, AdaptedRows, Block, LowRankPair, Norm, Sizes, compute_blocks
from .compiled import unavailable
from .elementwise import (
    GELU,
    LAYER_NORM,
    RELU,
    RMS_NORM,
    SILU,
    TANH_GELU,
    ZERO_CENTERED_RMS_NORM,
    activate,
    add_norm,
    rotate_,
)
from .linear import Linear, PackedWeight, linear, pack, unpacked_linear
from .paged_attention import NO_WINDOW, Cache, Segments, is_supported, paged_attention
from .quantized import QuantizedWeight, dequantize, quantized_linear
