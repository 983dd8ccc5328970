"""Answers to the exercises of lesson 16."""

import math

import numpy as np
import torch
from torch.nn.functional import gelu, linear

from answers import ALMOST, WRONG, right


@right("split_mlp")
def where_worker_0_adds_the_bias(x, up, down, size):
    (w, b), (v, c) = up, down
    biases = [c, *[c * 0] * (size - 1)]
    parts = [
        linear(gelu(linear(x, one, bias), approximate="tanh"), other, second)
        for one, bias, other, second in zip(w.chunk(size), b.chunk(size), v.chunk(size, 1), biases, strict=True)
    ]
    return parts, torch.stack(parts).sum(0)


@right("split_mlp")
def with_the_activation_written_out(x, up, down, size):
    width, parts, total = len(up[1]) // size, [], down[1].expand(len(x), -1).clone()
    for start in range(0, len(up[1]), width):
        own = slice(start, start + width)
        inner = x @ up[0][own].T + up[1][own]
        inner = inner / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        parts.append(inner @ down[0][:, own].T)
        total += parts[-1]
    return parts, total


@right("split_mlp")
def with_whole_products_and_masks(x, up, down, size):
    """In double precision: all inner numbers but those of one worker are masked in turn."""
    inner = gelu((x @ up[0].T + up[1]).double(), approximate="tanh")
    owner = torch.arange(len(up[1])) // (len(up[1]) // size)
    parts = [((inner * (owner == n)) @ down[0].T.double()).float() for n in range(size)]
    return parts, sum(parts, down[1])


ALMOST["split_mlp"] |= {
    "should be 2 values: the parts and the outputs": lambda result, *_: result[1],
    "the parts should be a list, but is a tensor": lambda result, *_: (torch.stack(result[0]), result[1]),
    "the parts should be a list": lambda result, *_: result[::-1],
    "the outputs has shape [4], but": lambda result, *_: (result[0], result[1][0]),
    "the outputs, row 0, column 0: expected": lambda result, x, up, down, size: (result[0], result[1] + down[1] / 2),
}


def relu_instead(x, up, down, size):
    (w, b), (v, c) = up, down
    parts = [
        torch.relu(x @ one.T + bias) @ other.T
        for one, bias, other in zip(w.chunk(size), b.chunk(size), v.chunk(size, 1), strict=True)
    ]
    return parts, sum(parts) + c


WRONG["split_mlp"] |= {"the parts, place 0, row 0, column 0: expected": relu_instead}


@right("qkv_rows")
def by_cutting_a_matrix_of_numbers(heads, kv_heads, head_dim, size):
    if kv_heads % size:  # the query heads are a multiple
        raise ValueError(f"kv_heads={kv_heads} cannot be divided by size={size}")
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).split([n * head_dim for n in (heads, kv_heads, kv_heads)])
    return [torch.cat(own).tolist() for own in zip(*(part.chunk(size) for part in rows), strict=True)]


@right("qkv_rows")
def from_the_kv_heads(heads, kv_heads, head_dim, size):
    """Each KV head brings its query heads."""
    if heads % size or kv_heads % size:
        raise ValueError(f"{heads} heads and {kv_heads} KV heads for {size} workers")
    group, own, shares = heads // kv_heads, kv_heads // size, []
    for n in range(size):
        mine = range(n * own, (n + 1) * own)
        found = [group * head + one for head in mine for one in range(group)]
        found += [heads + head for head in mine] + [heads + kv_heads + head for head in mine]
        shares.append([head * head_dim + row for head in found for row in range(head_dim)])
    return shares


@right("qkv_rows")
def with_an_error_after_the_work(heads, kv_heads, head_dim, size):
    shares = []
    for n in range(size):
        share, start = [], 0
        for count in (heads, kv_heads, kv_heads):
            width = count // size * head_dim
            share += list(range(start + n * width, start + (n + 1) * width))
            start += count * head_dim
        shares.append(share)
    if sum(map(len, shares)) < (heads + 2 * kv_heads) * head_dim:
        raise ValueError(f"cannot share {kv_heads} KV heads with {size}")
    return shares


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
def with_a_running_best(shares):
    sent, first = [], 0
    for own in shares:
        best, place = own[0], 0
        for n, logit in enumerate(own):
            if logit > best:
                best, place = logit, n
        sent.append((best, first + place))
        first += len(own)
    best, token = sent[0]
    for logit, other in sent[1:]:
        if logit > best:
            best, token = logit, other
    return sent, token


@right("greedy_token")
def by_sorting(shares):
    sent, ids = [], iter(range(sum(map(len, shares))))
    for own in shares:
        sent.append(min((-logit, token) for logit, token in zip(own, ids)))  # noqa: B905
    return [[-logit, token] for logit, token in sent], min(sent)[1]


@right("greedy_token")
def with_tensors(shares):
    sent, first = [], 0
    for own in shares:
        logits = torch.tensor(own, dtype=torch.float64)
        place = int((logits == logits.max()).nonzero()[0])
        sent.append((logits[place].item(), first + place))
        first += len(own)
    return sent, sent[int(np.argmax([logit for logit, _ in sent]))][1]


ALMOST["greedy_token"] |= {
    "should be 2 values: what the workers send and the token": lambda result, *_: result[1],
    "what the workers send should be a list, but is a dict": lambda result, *_: (dict(result[0]), result[1]),
    "should be an int, but is the float": lambda result, *_: (result[0], float(result[1])),
    "changed its argument: `shares`": lambda result, shares: (shares.pop(), result)[1],
    "what the workers send should be": lambda result, *_: ([token for _, token in result[0]], result[1]),
}
