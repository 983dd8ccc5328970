"""The attention kernel on chunks: many queries of a sequence at once, each over the keys before it.

test_kernels.py tests it on decodes, test_ragged_exactness.py in an engine.
"""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers.fast import kernels
from helpers.fast.kernels import Segments

pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable()), reason=f"there are no compiled kernels: {kernels.unavailable()}"
)
in_both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=["float32", "bfloat16"]
)
# (tokens, past): a decode, chunks shorter and longer than a tile of queries, a piece of keys and a task, with and
# without a past.
SIZES = [(1, 0), (5, 0), (1, 40), (130, 17), (8, 260), (300, 0)]


class Cache:
    """Keys and values of sequences of SIZES in random blocks; NaN wherever no token has been written."""

    def __init__(self, sizes, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype):
        torch.manual_seed(0)
        blocks_of = [-(-(tokens + past) // block_size) for tokens, past in sizes]
        num_blocks = sum(blocks_of) + 3
        free_blocks = iter(torch.randperm(num_blocks).tolist())
        self.tables = [[next(free_blocks) for _ in range(count)] for count in blocks_of]
        self.keys, self.values = (
            torch.full((kv_heads, num_blocks * block_size, dim), math.nan).to(dtype) for _ in range(2)
        )
        self.slots = [
            [table[i // block_size] * block_size + i % block_size for i in range(tokens + past)]
            for (tokens, past), table in zip(sizes, self.tables, strict=True)
        ]
        for slots in self.slots:
            for tensor in (self.keys, self.values):
                tensor[:, slots] = torch.randn(kv_heads, len(slots), dim).to(dtype)
        starts = [sum(tokens for tokens, _ in sizes[:i]) for i in range(len(sizes))]
        lengths = [tokens + past for tokens, past in sizes]
        self.segments = Segments(starts, [tokens for tokens, _ in sizes], lengths, self.tables, block_size)
        self.starts, self.total = starts, sum(tokens for tokens, _ in sizes)

    def attend(self, query, window=None, segments=None):
        output = query.new_full((query.shape[1], query.shape[0], query.shape[2]), math.nan)
        kernels.paged_attention(query, self.keys, self.values, segments or self.segments, output, 0.3, window)
        return output


@in_both_dtypes
@pytest.mark.parametrize("dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 9, 150])
@pytest.mark.parametrize("block_size", [4, 16, 300])
def test_every_query_attends_to_the_keys_before_it_within_the_window(
    dtype, tolerance, dim, heads, kv_heads, window, block_size
):
    cache = Cache(SIZES, kv_heads, dim, block_size, dtype)
    query = torch.randn(cache.total, 3, heads, dim).to(dtype)[:, 1].transpose(0, 1)  # a view of a larger tensor
    output = cache.attend(query, window)
    for (tokens, past), start, slots in zip(SIZES, cache.starts, cache.slots, strict=True):
        queries, keys = torch.arange(past, past + tokens)[:, None], torch.arange(past + tokens)
        mask = (keys <= queries) & (keys > queries - (window or math.inf))
        q, k, v = query[:, start : start + tokens], cache.keys[:, slots], cache.values[:, slots]
        expected = scaled_dot_product_attention(
            q[None].float(), k[None].float(), v[None].float(), mask, scale=0.3, enable_gqa=True
        )[0].transpose(0, 1)
        difference = (output[start : start + tokens].float() - expected).abs().max()
        assert difference < tolerance, (tokens, past)  # NaN, from an unwritten slot, fails, too


@in_both_dtypes
@pytest.mark.parametrize("window", [None, 20])
def test_the_result_of_a_query_does_not_depend_on_the_size_of_its_chunk(dtype, tolerance, window):
    """A chunk of one token is a decode, which sums in another order."""
    cache = Cache([(300, 0)], 2, 64, 16, dtype)
    query = torch.randn(4, 300, 64).to(dtype)
    whole = cache.attend(query, window)
    sizes = [2, 3, 90, 33, 5, 167]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    lengths = [start + size for start, size in zip(starts, sizes, strict=True)]
    chunks = Segments(starts, sizes, lengths, cache.tables * len(sizes), 16)
    assert torch.equal(cache.attend(query, window, chunks), whole)


@in_both_dtypes
@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_the_bits_of_a_decode_do_not_depend_on_the_size_of_blocks(dtype, tolerance, dim, window):
    torch.manual_seed(0)
    query, keys, values = (torch.randn(2, tokens, dim).to(dtype) for tokens in (1, 301, 301))
    outputs = []
    for block_size in (4, 7, 16, 301):
        segments = Segments([0], [1], [301], [list(range(-(-301 // block_size)))], block_size)
        outputs.append(query.new_empty(1, 2, dim))
        kernels.paged_attention(query, keys, values, segments, outputs[-1], 0.3, window)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@in_both_dtypes
@pytest.mark.parametrize(("first", "last"), [(0, 12), (0, 4), (3, 9), (8, 12)])
def test_keys_with_the_score_minus_infinity_have_no_weight(dtype, tolerance, first, last):
    """A query for which all scores are -inf gets zeros."""
    keys, values = torch.zeros(1, 12, 8), torch.randn(1, 12, 8).to(dtype)
    keys[0, first:last, 0] = -math.inf
    query = torch.zeros(1, 12, 8)
    query[..., 0] = 1
    query, keys = query.to(dtype), keys.to(dtype)
    output = query.new_empty(12, 1, 8)
    kernels.paged_attention(query, keys, values, Segments([0], [12], [12], [[0, 1, 2]], 4), output, 1.0)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    expected = scaled_dot_product_attention(query[None], keys[None], values[None], mask, scale=1.0)[0, 0]
    torch.testing.assert_close(output[:, 0], expected, rtol=tolerance, atol=tolerance)
