"""Answers to the exercises of lesson 16."""

import torch
from torch.nn.functional import gelu, linear

from answers import ALMOST, WRONG, right


@right("split_mlp")
def where_worker_0_adds_the_bias(x, up, down, size):
    (w, b), (v, c) = up, down
    biases = [c, *[c * 0] * (size - 1)]
    parts = [
        linear(gelu(linear(x, own_w, own_b), approximate="tanh"), own_v, own_c)
        for own_w, own_b, own_v, own_c in zip(w.chunk(size), b.chunk(size), v.chunk(size, 1), biases, strict=True)
    ]
    return parts, torch.stack(parts).sum(0)


ALMOST["split_mlp"] |= {
    "should be 2 values: the parts and the outputs": lambda result, *_: result[1],
    "the parts should be a list, but is a tensor": lambda result, *_: (torch.stack(result[0]), result[1]),
    "the outputs, row 0, column 0: expected": lambda result, x, up, down, size: (result[0], result[1] + down[1] / 2),
}


def relu_instead(x, up, down, size):
    (w, b), (v, c) = up, down
    parts = [
        torch.relu(x @ own_w.T + own_b) @ own_v.T
        for own_w, own_b, own_v in zip(w.chunk(size), b.chunk(size), v.chunk(size, 1), strict=True)
    ]
    return parts, sum(parts) + c


WRONG["split_mlp"] |= {"the parts, place 0, row 0, column 0: expected": relu_instead}


@right("qkv_rows")
def by_cutting_a_matrix_of_numbers(heads, kv_heads, head_dim, size):
    if kv_heads % size:  # the query heads are a multiple
        raise ValueError(f"kv_heads={kv_heads} cannot be divided by size={size}")
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).split([n * head_dim for n in (heads, kv_heads, kv_heads)])
    return [torch.cat(own).tolist() for own in zip(*(part.chunk(size) for part in rows), strict=True)]


WRONG["qkv_rows"] |= {
    "stopped with AssertionError": lambda heads, kv_heads, head_dim, size: _refusing(
        heads, kv_heads, head_dim, size, AssertionError(f"{kv_heads} heads, {size} workers")
    ),
    "`error` should be None, but is 'not enough values to unpack (expected 2, got 1)'": lambda *case: (
        [(a, b) for a, b in [case[:1]]]
    ),
    "place 0 should be a list, but is a range": lambda heads, kv_heads, head_dim, size: [
        range(own[0], own[-1] + 1) for own in by_cutting_a_matrix_of_numbers(heads, kv_heads, head_dim, size)
    ],
}


def _refusing(heads, kv_heads, head_dim, size, error):
    if kv_heads % size:
        raise error
    return by_cutting_a_matrix_of_numbers(heads, kv_heads, head_dim, size)


@right("greedy_token")
def by_sorting(shares):
    sent, ids = [], iter(range(sum(map(len, shares))))
    for own in shares:
        sent.append(min((-logit, token) for logit, token in zip(own, ids)))  # noqa: B905
    return [[-logit, token] for logit, token in sent], min(sent)[1]


ALMOST["greedy_token"] |= {
    "should be 2 values: what the workers send and the token": lambda result, *_: result[1],
    "what the workers send should be a list, but is a dict": lambda result, *_: (dict(result[0]), result[1]),
    "should be an int, but is the float": lambda result, *_: (result[0], float(result[1])),
    "changed its argument: `shares`": lambda result, shares: (shares.pop(), result)[1],
    "what the workers send should be": lambda result, *_: ([token for _, token in result[0]], result[1]),
}
