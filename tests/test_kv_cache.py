"""Each operation on small caches: two layers, one head and one dimension, so that a row is a list of numbers."""

import pytest
import torch

from helpers import kv_cache


def make_cache(*rows: list[int]):
    """Return a cache with these keys in its first layer, negated keys as values, and ten times both in the second."""
    keys = torch.tensor(rows, dtype=torch.float32)[:, None, :, None]
    cache = kv_cache.new()
    cache.update(keys, -keys, layer_idx=0)
    cache.update(10 * keys, -10 * keys, layer_idx=1)
    return cache


def contents(cache) -> list:
    """Return keys and values of all layers as nested lists [B][T], with their shapes: an empty list has no width."""
    return [(t.shape, t[:, 0, :, 0].tolist()) for layer in cache.layers for t in (layer.keys, layer.values)]


def expected(*rows: list[int]) -> list:
    return contents(make_cache(*rows))


def test_selecting_no_rows_keeps_the_columns():
    shapes = [shape for shape, _ in contents(kv_cache.select_rows(make_cache([1, 2], [3, 4]), []))]
    assert shapes == [(0, 1, 2, 1)] * 4


def test_the_length_is_the_number_of_columns_and_shapes_are_heads_and_head_dim_of_every_layer():
    cache = kv_cache.new()
    assert (kv_cache.length(cache), kv_cache.shapes(cache)) == (0, [])
    cache.update(torch.zeros(3, 2, 5, 4), torch.zeros(3, 2, 5, 4), 0)
    cache.update(torch.zeros(3, 1, 5, 8), torch.zeros(3, 1, 5, 8), 1)
    assert (kv_cache.length(cache), kv_cache.shapes(cache)) == (5, [(2, 4), (1, 8)])


OPERATIONS = {  # on [1, 2] and [3, 4], and what they give
    "copy": (kv_cache.copy, [[1, 2], [3, 4]]),
    "left_pad": (lambda cache: kv_cache.left_pad(cache, 2), [[0, 0, 1, 2], [0, 0, 3, 4]]),
    "left_pad by 0": (lambda cache: kv_cache.left_pad(cache, 0), [[1, 2], [3, 4]]),
    "concatenate first": (lambda cache: kv_cache.concatenate(cache, make_cache([7, 8])), [[1, 2], [3, 4], [7, 8]]),
    "concatenate second": (lambda cache: kv_cache.concatenate(make_cache([7, 8]), cache), [[7, 8], [1, 2], [3, 4]]),
    "select_rows": (lambda cache: kv_cache.select_rows(cache, [1, 0]), [[3, 4], [1, 2]]),
    "trim_left": (lambda cache: kv_cache.trim_left(cache, 1), [[2], [4]]),
    "trim_left by 0": (lambda cache: kv_cache.trim_left(cache, 0), [[1, 2], [3, 4]]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_leaves_its_argument_unchanged_and_both_can_grow_apart(name):
    cache, (operation, rows) = make_cache([1, 2], [3, 4]), OPERATIONS[name]
    result = operation(cache)
    assert contents(result) == expected(*rows)
    assert contents(cache) == expected([1, 2], [3, 4])
    # A model that grows one of them in place must not change the other.
    before = contents(result)
    cache.update(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1), 0)
    assert contents(result) == before
    grown = torch.ones(result.layers[1].keys.size(0), 1, 1, 1)
    result.update(grown, grown, 1)
    assert contents(cache)[2:] == expected([1, 2], [3, 4])[2:]
