"""Answers to the exercises of lesson 14."""

import torch

from answers import ALMOST, RIGHT, WRONG, right

ALMOST["quantize"] |= {
    "should be 3 values": lambda result, *_: result[:2],
    "changed its argument: `values`": lambda result, values, bits: values.sort() or result,
    "should be a list, but is": lambda result, *_: (torch.tensor(result[0]), *result[1:]),
}


@right("quantize")
def shifted_before_it_rounds(values, bits):
    """One rounding instead of two: another integer for some values, and no larger error."""
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (high - low) / (2**bits - 1)
    return [round((value - low) / scale) for value in values], scale, round(-low / scale)


@right("integer_product")
def in_slabs_of_exact_floats(x, integers, scales):
    """As the engine does without a compiler: float32 holds the sum of 1,024 products, and int32 adds these sums."""
    steps = x.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (x * (1 / steps)).round()
    pairs = zip(rounded.split(1024, dim=1), integers.split(1024, dim=1), strict=True)
    sums = sum((inputs @ weights.float().T).int() for inputs, weights in pairs)
    return [sums, sums.float() * scales * steps]


def halves_rounded_up(numbers):
    return (numbers + 0.5).floor()


def integer_product_that(rounds=torch.round, step=lambda largest: largest / 127, kind=torch.int32):
    """Return a function for the product with its own rounding, scale, or kind of sums."""

    def product(x, integers, scales):
        steps = step(x.abs().amax(1, keepdim=True))
        sums = rounds(x / steps).to(kind) @ integers.to(kind).T
        return sums, (sums * steps * scales).float()

    return product


WRONG["integer_product"] |= {
    "halves: x": integer_product_that(rounds=halves_rounded_up),
    "the sums, row 0, column 0: expected 138, got 6 ": integer_product_that(step=lambda largest: largest / 7),
}
ALMOST["integer_product"] |= {
    "should be 2 values: the sums and the outputs": lambda result, *_: result[1],
    "the outputs has shape": lambda result, *_: (result[0], result[1].T),
    "changed its argument: `x`": lambda result, x, *_: (x.zero_(), result)[1],
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
