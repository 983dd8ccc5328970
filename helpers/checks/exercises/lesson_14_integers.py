"""Lesson 14, integers of tokens: a product with a scale per token, and a KV cache with a scale per vector."""

import torch

from ..edits import add_edits
from ..exercise import Exercise

SMALL = {
    "a token": [[1.0, -0.3, 0.2]], "the same token and a larger one": [[1.0, -0.3, 0.2], [0.1, 50.0, -8.0]],
    "halves": [[127.0, 2.5, -0.5]], "a token of zeros": [[0.1, 50.0, -8.0], [0.0, 0.0, 0.0], [1.0, -0.3, 0.2]],
    "a negative token": [[-3.0, -1.0, -0.1], [0.1, 50.0, -8.0]],
}  # fmt: skip
BEYOND_127 = "", ".clamp(-127, 127)", ".clamp(-128, 127)", ".to(torch.int8)"  # what becomes of larger integers


def draw(random, *shape):
    """Return vectors [..., n] of scales of their own: none of their numbers is halfway between two integers."""
    seeded = torch.Generator().manual_seed(random.randrange(10**6))
    numbers = torch.randint(-120, 121, shape, generator=seeded) + 0.8 * torch.rand(shape, generator=seeded) - 0.4
    numbers[..., random.randrange(shape[-1])] = 127 * (2 * torch.randint(2, shape[:-1], generator=seeded) - 1.0)
    return numbers * torch.randn(*shape[:-1], 1, generator=seeded).exp() / 30


integer_product = Exercise(
    "integer_product(x, integers, scales)",
    "both scales leave the sum, which is one of integers: exact, and the same for a token in any batch",
    names=("the sums", "the outputs"),
)


@integer_product.cases
def _(random):
    weights, scales = [[1, 3, 5], [-100, 127, 2]], [0.5, 0.25]
    for name, x in SMALL.items():
        given = f"{name}: x {x}, integers {weights}, scales {scales}"
        yield (torch.tensor(x), torch.tensor(weights, dtype=torch.int8), torch.tensor(scales)), given
    for tokens, inputs, outputs in [(3, 8, 5), (4, 4, 4), (1, 9000, 3), (2, 8000, 4), (random.randint(2, 5), 12, 6)]:
        x, scales = draw(random, tokens, inputs), draw(random, outputs).abs()
        integers = torch.tensor([random.choices(range(-127, 128), k=inputs) for _ in range(outputs)], dtype=torch.int8)
        if inputs > 999:  # sums above 2**24
            x, integers = x.abs(), integers.abs()
        yield (x, integers, scales), f"{tokens} tokens, {inputs} inputs, {outputs} outputs"


@integer_product.reference
def times_both_scales(x, integers, scales):
    largest = x.abs().amax(1, keepdim=True)
    step = torch.where(largest > 0, largest / 127, 1.0)
    rounded = (x / step).round()
    sums = rounded.int() @ integers.int().T
    return sums, sums * step * scales


@integer_product.ignoring
def the_size_of_integers(result, arguments):
    sums, outputs = result
    return sums.long() if torch.equal(sums, sums.round()) else sums, outputs


LARGEST, SUMS = "x.abs().amax(1, keepdim=True)", "rounded.int() @ integers.int().T"


def rounding(dim):
    """Return misconceptions of how a vector is rounded, for both tasks."""
    signed = f".abs().amax({dim} -> .amax({dim}"
    return {
        "takes the largest number with its sign: a negative one may be larger in size.":
            [(signed, f".round() -> .round(){change}") for change in BEYOND_127],
        "maps the largest number to 128, which 8 bits cannot hold: divide by 127.":
            [("/ 127 -> / 128", f".round() -> .round(){change}") for change in BEYOND_127],
        "cuts off the fraction: the nearest integer is closer.": [".round() -> .trunc()", ".round() -> .floor()"],
    }  # fmt: skip


add_edits(integer_product, {
    "takes one scale for the whole batch: beside a larger token, a token has other integers than alone.":
        f"{LARGEST} -> x.abs().max()",
    "takes the first token's scale for all: with other tokens before it, a token has other integers.":
        [(f"{LARGEST} -> x[:1].abs().amax(1, keepdim=True)", f".round() -> .round(){change}") for change in BEYOND_127],
    "takes a scale per input instead of one per token: each product of a sum has another one, so none can leave it.":
        [(f"{LARGEST} -> x.abs().amax(0)", own) for own in (
            "sums * step -> sums * step", "sums * step -> (rounded * step) @ integers.float().T")],
    **rounding(1),
    "adds up in 8 bits: a single product of two such integers may need 15.": ".int() -> .to(torch.int8)",
    "adds up in 16 bits, which hold the sum of two products: use 32.": ".int() -> .short()",
    "adds up in float32: beyond 2**24, it leaves out integers, and a sum depends on its order.":
        f"{SUMS} -> rounded @ integers.float().T",
    "forgets the tokens' scales: their integers count steps of that size.": "sums * step * -> sums * ",
    "forgets the outputs' scales: the weights' integers count steps of that size.": "* step * scales -> * step",
})  # fmt: skip

rounded_cache = Exercise(
    "rounded_cache(keys)",
    "a key is rounded once, when it is written, so its scale must not depend on any other",
    names=("the integers", "the scales"),
)


@rounded_cache.cases
def _(random):
    for name, keys in SMALL.items():
        yield (torch.tensor([keys]),), f"{name}: keys {[keys]}"
    for heads, tokens, head_dim in [(2, 5, 8), (3, 4, 3), (1, 4, 16), (4, 1, 6), (random.randint(2, 4), 6, 4)]:
        yield (draw(random, heads, tokens, head_dim),), f"{heads} heads, {tokens} tokens, head dim {head_dim}"


@rounded_cache.reference
def key_by_key(keys):
    largest = keys.abs().amax(2)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (keys / scales[..., None]).round().to(torch.int8), scales


@rounded_cache.ignoring
def the_shape_of_the_scales(result, arguments):
    """Give each key its scale, even if several share one: the message is about that, not about a shape."""
    (integers, scales), (heads, tokens, _) = result, arguments[0].shape
    rows = 1 if scales.numel() in (1, tokens) else heads
    return integers, scales.reshape(rows, -1).expand(heads, tokens)


add_edits(rounded_cache, {
    "takes one scale per head: a new token that is larger would change the integers of all earlier ones.":
        "keys.abs().amax(2) -> keys.abs().amax((1, 2))[:, None].expand(keys.shape[:2])",
    "takes one scale per token: a head of large numbers leaves few steps to the other heads.":
        "keys.abs().amax(2) -> keys.abs().amax((0, 2)).expand(keys.shape[:2])",
    "takes a scale per number of the head dim: with a new token, those of all earlier ones would change.":
        ("amax(2) -> amax(1)", "scales[..., None] -> scales[:, None]"),
    **rounding(2),
})  # fmt: skip

cache_bytes = Exercise(
    "cache_bytes(layers, heads, kv_heads, head_dim, kind, memory)",
    "the scales are part of the cache, and longer vectors have fewer of them",
    names=("the bytes of a token", "the tokens"),
)
cache_bytes.table([
    (12, 12, 12, 64, "bfloat16", 10**9), (12, 12, 12, 64, "int8", 10**9), (32, 32, 8, 128, "int8", 8 * 2**30),
    (32, 32, 8, 128, "bfloat16", 8 * 2**30), (4, 8, 1, 16, "int8", 640 * 4), (2, 6, 2, 24, "bfloat16", 5000),
], lambda random: [
    (random.randint(3, 40), 12, random.randint(2, 4), 16 * random.randint(1, 9), kind, random.randrange(10**7, 10**9))
    for kind in ("bfloat16", "int8")
])  # fmt: skip


@cache_bytes.reference
def of_all_vectors(layers, heads, kv_heads, head_dim, kind, memory):
    vector = 2 * head_dim if kind == "bfloat16" else head_dim + 4
    token = 2 * layers * kv_heads * vector
    return token, memory // token


add_edits(cache_bytes, {
    "forgets the scales: an int8 vector has one, which takes 4 bytes.": "head_dim + 4 -> head_dim",
    "counts one scale for all heads: each KV head has its own.":
        "kv_heads * vector -> (kv_heads * vector if kind == 'bfloat16' else kv_heads * head_dim + 4)",
    "counts half of a scale per vector: the key and the value have one each, of 4 bytes.": "+ 4 -> + 2",
    "counts only the keys, or only the values: a token has both.": "2 * layers -> layers",
    "counts the query heads: several of them may share the keys and values of a KV head.": "kv_heads * -> heads * ",
    "counts one layer: each has its own keys and values.": "2 * layers -> 2",
})  # fmt: skip
