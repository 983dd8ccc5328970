"""Answers to the exercises of lesson 14."""

import struct

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


@right("unpack")
def as_signed_bytes(words, bits):
    integers = []
    for word in words:
        places = range(0, 32, bits)
        integers += [((word >> place) % 2**bits + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for place in places]
    return integers


@right("unpack")
def by_shifting_twice(words, bits):
    """Shift to the left and back: in int32, the first bit is repeated."""
    signed = [struct.unpack("<i", struct.pack("<I", word))[0] for word in words]
    numbers = torch.arange(32 // bits, dtype=torch.int32)
    shifts = numbers * bits
    return (torch.tensor(signed, dtype=torch.int32)[:, None] << (32 - bits - shifts) >> (32 - bits)).flatten().tolist()


ALMOST["unpack"] |= {
    "should be a list, but is": lambda integers, *_: np.array(integers),
    "changed its argument: `words`": lambda integers, words, bits: words.clear() or integers,
}


@right("to_int8")
def in_numpy(weights):
    scale = float(np.abs(weights).max()) / 127
    return np.rint(np.array(weights) / scale).astype(np.int8).tolist(), scale


@right("to_int8")
def with_limits(weights):
    scale = max(max(weights), -min(weights)) / 127
    return [max(-127, min(127, round(weight / scale))) for weight in weights], scale


ALMOST["to_int8"] |= {
    "returns only the integers": lambda result, *_: result[0],
    "changed its argument: `weights`": lambda result, weights: weights.clear() or result,
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
