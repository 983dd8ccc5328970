"""A quantized KV cache: keys and values are stored as 8-bit integers, so the same memory holds about twice the tokens.

Each token's key, and its value, is rounded for each KV head when it is written: to integers from -127 to 127 and one
float32 scale. Every reader gets the rounded vector, the token's own chunk included. So it does not matter to a request
whether its tokens were computed in chunks, after a preemption, or for another request with the same prefix. KIVI (Liu
et al., ICML 2024) needs only 2 bits, with scales for groups of tokens, too.

rounding.py   rounds vectors; an ordinary transformers cache that does so is the reference
pool.py       the tensors behind the blocks, as integers and scales

Compiled kernels read the integers themselves (`fast/kernels/paged_attention.cpp`). Without them, attention computes the
rounded vectors of one sequence at a time.
"""

from ...engine import EngineCore, Feature


class QuantizedKVCache(Feature):
    """Stands for the setting `kv_cache`. The pool does the work, so no hook is needed."""

    name = "quantized_kv_cache"


def attach(engine: EngineCore) -> QuantizedKVCache | None:
    """Attach the feature to an engine with a quantized KV cache."""
    return QuantizedKVCache() if engine.config.kv_cache != "auto" else None
