"""Lesson 14, quantized weights: a zero point, a product without float weights, and a planted bug."""

from ..comparing import is_number, kind
from ..edits import add_edits
from ..exercise import Exercise, JudgedExercise, Passed, Wrong

quantize = Exercise(
    "quantize(values, bits)",
    "a zero point moves the integers to where the values are, so no integer is wasted",
    names=("the integers", "the scale", "the zero point"),
)
quantize.table([
    ([-1.0, 0.0, 2.0], 4), ([-0.3, 0.1, 0.87, 1.2], 4), ([-2.25, -0.4, 0.3], 4), ([-1.0, 0.17, 3.0, -0.7, 1.1], 8),
    ([0.5, 1.0, 3.0], 4), ([-0.47, -1.13, -3.0], 4), ([0.02, -0.01, 0.04], 2), ([12.0, -18.0, 3.3], 8),
    ([-1.0, 1.0], 4), ([-1.0, 0.3, 1.0], 8), ([-1.0, 1.0, 3.5], 4), ([-2.0, 2.5, 5.0], 4),
], lambda random: [([*(round(random.uniform(-1, 4), 2) for _ in range(7)), -1.2, 4.05], 4)],
   given="values {}, {} bits")  # fmt: skip


@quantize.ignoring
def however_it_rounds(result, arguments):
    """Accept any rounding: every value within half a step of its integer, less or more by the zero point's rounding."""
    (integers, scale, zero_point), (values, bits) = result, arguments
    right, step, zero = with_a_zero_point(values, bits)
    shift = -min(0.0, *values) / step
    fits = abs(scale - step) < 1e-5 * step and abs(zero_point - shift) <= 0.501 and len(integers) == len(values)
    slack = 0.501 + abs(zero_point - shift)
    errors = [abs((one - zero_point) * step - value) / step for one, value in zip(integers, values, strict=False)]
    if fits and max(errors) <= slack and all(0 <= one < 2**bits for one in integers):
        kept = [int(one) if float(one).is_integer() else one for one in integers]
        same = type(integers)(right) if kept == integers else integers
        return same, scale, zero if zero_point == int(zero_point) else zero_point
    return result


@quantize.reference
def with_a_zero_point(values, bits):
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (high - low) / (2**bits - 1)
    zero_point = round(-low / scale)
    integers = [round(value / scale) + zero_point for value in values]
    return [min(one, 2**bits - 1) for one in integers], scale, zero_point


LIMITS = "min(0.0, *values), max(0.0, *values)"
add_edits(quantize, {
    "takes the scale from the mean: values beyond it need integers that do not exist. The range decides.":
        f"{LIMITS} -> -(mean := sum(map(abs, values)) / len(values)), mean",
    "takes the scale from the largest size alone, as symmetric quantization does: half of the integers stay unused.":
        f"{LIMITS} -> -max(map(abs, values)), max(map(abs, values))",
    "takes the range from 0 to the largest value: negative values need integers, too.": "min(0.0, *values) -> 0.0",
    "takes a range that need not contain 0: then the zero point is outside of the integers.":
        f"{LIMITS} -> min(values), max(values)",
    "divides the range into 2**bits steps: 2**bits integers have one step less between them, and the largest value "
    "would wrap around to 0.": "/ (2**bits - 1) -> / 2**bits",
    "drops the zero point: negative values get negative integers, and these do not exist.": " + zero_point -> ",
    "subtracts the zero point: it is the integer of 0, so it is added to all.": "+ zero_point -> - zero_point",
    "returns the smallest value as the zero point: it is an integer, the one that stands for 0.":
        "round(-low / scale) -> -low",
    "returns the integer of the smallest value as the zero point: it is the integer that stands for 0.": "-low -> low",
    "cuts off the fraction: the nearest integer has a smaller error.": "round(value -> int(value",
    "has an integer of 2**bits: where the largest value and the zero point are both rounded up, their sum is too large "
    "by one.": "min(one, 2**bits - 1) -> one",
})  # fmt: skip

multiply = Exercise(
    "multiply(x, integers, scales, zeros, group)",
    "the zero points leave the product with the sums of the inputs, so a kernel needs no float weights",
)
multiply.table([
    ([1.0, 2.0], [3, 7], [0.5], [5], 2), ([1.0, -2.0, 0.5, 3.0], [15, 0, 8, 2], [0.5, 2.0], [8, 8], 2),
    ([1.0, -2.0, 0.5, 3.0], [15, 0, 8, 2], [0.5, 2.0], [3, 11], 2),
    ([2.0, 1.0, 4.0, -1.0], [1, 2, 3, 4], [0.25], [6], 4),
    ([2.0, 1.0, 4.0], [9, 2, 7], [0.25, 1.0, 0.5], [6, 1, 15], 1),
    ([0.0, 1.0, 1.0, 0.0], [5, 5, 9, 9], [1.0, 3.0], [0, 0], 2),
    ([1.0, 2.0, -1.0, 3.0, 1.0, 2.0], [4, 15, 0, 9, 1, 7], [0.5, 0.125], [13, 4], 3),
], lambda random: [
    ([float(random.randint(-3, 3)) for _ in range(6)], random.choices(range(16), k=6), [0.5, 0.125], [9, 4], 3)
])  # fmt: skip


@multiply.reference
def by_group(x, integers, scales, zeros, group):
    total = 0.0
    for n, start in enumerate(range(0, len(x), group)):
        part = x[start : start + group]
        products = sum(one * other for one, other in zip(part, integers[start:], strict=False))
        total += scales[n] * (products - zeros[n] * sum(part))
    return total


add_edits(multiply, {
    "drops the zero points: an integer stands for (integer - zero point) * scale.": " - zeros[n] * sum(part) -> ",
    "subtracts a zero point once per group: each weight of the group contains it, so each input multiplies it.":
        "zeros[n] * sum(part) -> zeros[n]",
    "subtracts a zero point once per weight, but does not multiply it by the inputs.": "sum(part) -> len(part)",
    "adds the zero points: a weight is (integer - zero point) * scale.": "products - -> products +",
    "subtracts the first group's zero point everywhere: each group has its own.": "zeros[n] -> zeros[0]",
    "uses the first scale for all groups: each group has its own.": "scales[n] -> scales[0]",
    "leaves out the scales: an integer counts steps, and a scale is their size.": "scales[n] * -> 1 *",
    "subtracts the zero points after scaling: they are integers, so they are scaled, too.":
        "(products - zeros[n] * sum(part)) -> products - zeros[n] * sum(part)",
    "multiplies a zero point by the sum of all inputs: only those of its own group have it.": "sum(part) -> sum(x)",
})  # fmt: skip


def with_the_bug(weights):
    """Return what `to_int8_with_a_bug` of the exercise returns."""
    scale = max(map(abs, weights)) / 128
    return [(round(weight / scale) + 128) % 256 - 128 for weight in weights], scale


def exposes_the_bug(failing_weights, seed: int) -> str | Passed:
    """Judge weights: possible ones, for which the planted bug moves one by more than half a step."""
    weights = failing_weights()
    if not isinstance(weights, list | tuple):
        raise Wrong(f"should return a list of weights, but returned {kind(weights)}.")
    if not weights:
        raise Wrong("should return at least one weight, but returned none.")
    if not all(is_number(weight) and abs(weight) < 1e30 for weight in weights):
        raise Wrong("returns weights that are not finite numbers.")
    if not any(abs(weight) > 1e-30 for weight in weights):
        raise Wrong("returns zeros only: at least one weight must not be zero.")
    integers, scale = with_the_bug(weights)
    errors = [abs(integer * scale - weight) for integer, weight in zip(integers, weights, strict=True)]
    worst = max(range(len(weights)), key=errors.__getitem__)
    if errors[worst] > 0.51 * scale:
        return Passed(f"The weight {weights[worst]:g} becomes {integers[worst] * scale:g}.")
    return "returns weights for which `to_int8_with_a_bug` is right. Which integer does the largest weight become?"


failing_weights = JudgedExercise(
    "failing_weights()", "the bug shows where a positive weight becomes 128, which 8 bits cannot hold", exposes_the_bug
)
