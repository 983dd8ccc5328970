"""Answers to the exercises of lesson 14."""

import numpy as np
import torch

from answers import ALMOST, RIGHT, WRONG, right


@right("quantize")
def in_numpy_with_a_zero_point(values, bits):
    values = np.array(values)
    low, high = values.clip(max=0).min(), values.clip(min=0).max()
    scale = (high - low) / (2**bits - 1)
    zero = np.rint(-low / scale).astype(int)
    integers = (np.rint(values / scale).astype(int) + zero).clip(max=2**bits - 1)
    return integers.tolist(), float(scale), int(zero)


@right("quantize")
def value_by_value(values, bits):
    low = high = 0.0
    for value in values:
        low, high = min(low, value), max(high, value)
    scale = (high - low) / ((1 << bits) - 1)
    zero = round(-low / scale)
    integers = []
    for value in values:
        integers.append(max(0, min(2**bits - 1, round(value / scale + zero))))
    return integers, scale, zero


ALMOST["quantize"] |= {
    "should be 3 values": lambda result, *_: result[:2],
    "changed its argument: `values`": lambda result, values, bits: values.sort() or result,
    "should be a list, but is": lambda result, *_: (torch.tensor(result[0]), *result[1:]),
}


@right("quantize")
def by_the_reciprocal(values, bits):
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (high - low) / (2**bits - 1)
    zero = round(-low / scale)
    return [min(round(value * (1 / scale)) + zero, 2**bits - 1) for value in values], scale, zero


@right("quantize")
def shifted_before_it_rounds(values, bits):
    """One rounding instead of two: another integer for some values, and no larger error."""
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (high - low) / (2**bits - 1)
    return [round((value - low) / scale) for value in values], scale, round(-low / scale)


@right("multiply")
def weight_by_weight(x, integers, scales, zeros, group):
    total = 0.0
    for place, (one, integer) in enumerate(zip(x, integers, strict=True)):
        total += one * (integer - zeros[place // group]) * scales[place // group]
    return total


@right("multiply")
def in_torch_by_group(x, integers, scales, zeros, group):
    x, integers = torch.tensor(x).view(-1, group), torch.tensor(integers).view(-1, group)
    sums = (x * integers).sum(-1) - torch.tensor(zeros) * x.sum(-1)
    return float((torch.tensor(scales) * sums).sum())


ALMOST["multiply"] |= {"should be a number": lambda y, *_: [y]}
WRONG["multiply"] |= {"stopped with IndexError": lambda x, integers, scales, zeros, group: scales[len(x)] * x[0]}


@right("integer_product")
def through_float64(x, integers, scales):
    """Floats of 53 bits hold these sums exactly, and int64 is as good as int32."""
    steps = (x.abs().max(dim=1).values / 127).clamp(min=1e-20)
    sums = torch.round(x / steps[:, None]).double() @ integers.double().T
    return sums.long(), (sums * torch.outer(steps, scales)).float()


@right("integer_product")
def in_numpy_token_by_token(x, integers, scales):
    sums, outputs = [], []
    for token in x.numpy():
        step = max(token.max(), -token.min()) / np.float32(127)
        rounded = np.rint(token / step if step else token).astype(np.int8)
        sums.append(integers.numpy().astype(np.int32) @ rounded)
        outputs.append(sums[-1] * step * scales.numpy())
    return torch.tensor(np.array(sums)), torch.tensor(np.array(outputs), dtype=torch.float32)


@right("integer_product")
def in_slabs_of_exact_floats(x, integers, scales):
    """As the engine does without a compiler: float32 holds the sum of 1,024 products, and int32 adds these sums."""
    steps = x.abs().amax(dim=-1, keepdim=True) / 127 + 1e-30
    rounded = (x * (1 / steps)).round()
    pairs = zip(rounded.split(1024, dim=1), integers.split(1024, dim=1), strict=True)
    sums = sum((one @ other.float().T).int() for one, other in pairs)
    return [sums, sums.float() * scales * steps]


def halves_rounded_up(numbers):
    return (numbers + 0.5).floor()


@right("integer_product")
def with_quotients_of_zeros_replaced(x, integers, scales):
    """0 / 0 is no error as long as no NaN becomes an integer."""
    steps = x.abs().amax(1, keepdim=True) / 127
    sums = (x / steps).nan_to_num().round().to(torch.int8).int() @ integers.int().T
    return sums, sums * steps * scales


def with_casts_of_nan(x, integers, scales):
    """8 bits of the integer that this processor makes of NaN are 0, so all results are right here."""
    steps = x.abs().amax(1, keepdim=True) / 127
    sums = (x / steps).round().to(torch.int8).int() @ integers.int().T
    return sums, sums * steps * scales


def with_casts_of_nan_in_numpy(x, integers, scales):
    steps = np.abs(x.numpy()).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore"):
        quotients = x.numpy() / steps
    sums = np.rint(quotients).astype(np.int8).astype(np.int32) @ integers.numpy().astype(np.int32).T
    return torch.tensor(sums), torch.tensor(sums * steps * scales.numpy())


def integer_product_that(rounds=torch.round, step=lambda largest: largest / 127 + 1e-30, kind=torch.int32):
    """Return a function for the product with its own rounding, scale, or kind of sums."""

    def product(x, integers, scales):
        steps = step(x.abs().amax(1, keepdim=True))
        sums = rounds(x / steps).to(kind) @ integers.to(kind).T
        return sums, (sums * steps * scales).float()

    return product


WRONG["integer_product"] |= {
    "halves: x": integer_product_that(rounds=halves_rounded_up),
    "divides the zeros of a token by a step of 0": with_casts_of_nan,
    "invalid value encountered in cast": with_casts_of_nan_in_numpy,
    "a token of zeros: x": integer_product_that(step=lambda largest: largest / 127, kind=torch.float64),
    "the sums, row 0, column 0: expected 138, got 6 ": integer_product_that(step=lambda largest: largest / 7 + 1e-30),
}
ALMOST["integer_product"] |= {
    "should be 2 values: the sums and the outputs": lambda result, *_: result[1],
    "the outputs has shape": lambda result, *_: (result[0], result[1].T),
    "changed its argument: `x`": lambda result, x, *_: (x.zero_(), result)[1],
}


@right("rounded_cache")
def vector_by_vector(keys):
    integers, scales = torch.zeros(keys.shape, dtype=torch.int8), torch.ones(keys.shape[:2])
    for head, of_head in enumerate(keys):
        for token, key in enumerate(of_head.tolist()):
            if any(key):
                scales[head, token] = max(map(abs, key)) / 127
                integers[head, token] = torch.tensor([round(one / scales[head, token].item()) for one in key])
    return integers, scales


@right("rounded_cache")
def in_numpy_by_the_norm(keys):
    keys = keys.numpy()
    scales = np.linalg.norm(keys, np.inf, axis=-1, keepdims=True) / 127
    scales[scales == 0] = 1
    return torch.tensor(np.rint(keys / scales).astype(np.int8)), torch.tensor(scales[..., 0])


def rounded_by(dim, keepdim=False):
    """Return a function that takes one scale for several keys, and leaves the scales in a shape of its own."""

    def rounded(keys):
        scales = keys.abs().amax(dim, keepdim=True) / 127
        scales = scales.where(scales > 0, 1.0)
        return (keys / scales).round().to(torch.int8), scales if keepdim else scales.flatten()

    return rounded


WRONG["rounded_cache"] |= {
    "takes one scale per head": rounded_by((1, 2)),
    "takes one scale per token": rounded_by((0, 2), keepdim=True),
    "(given: the same token and a larger one: keys": rounded_by((0, 1, 2)),
}
ALMOST["rounded_cache"] |= {
    "the integers holds float32, but should hold int8": lambda result, *_: (result[0].float(), result[1]),
    "the scales, row 0, column 1": lambda result, *_: (result[0], result[1].T),
    "expected 1, got 0": lambda result, keys: (result[0], keys.abs().amax(2) / 127),
    "(given: halves": lambda result, keys: (halves_rounded_up(keys / result[1][..., None]).to(torch.int8), result[1]),
}

RIGHT["failing_weights"] |= {
    "one_weight": lambda: [1.0],
    "the_largest_is_negative": lambda: [0.999, -1.0],
    "the_largest_is_positive": lambda: (0.5, -0.999, 1.0),
}
WRONG["failing_weights"] |= {
    "returns weights for which": lambda: [0.5, -1.0],
    "should return a list of weights": lambda: 1.0,
    "should return at least one weight, but returned none": lambda: [],
    "not finite numbers": lambda: [1.0, float("inf")],
    "returns zeros only": lambda: [0.0, 0.0],
}
