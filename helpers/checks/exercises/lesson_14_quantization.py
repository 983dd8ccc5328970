"""Lesson 14, quantized weights: a zero point, a product of integers, packed integers, and a planted bug."""

from ..comparing import is_number, kind
from ..exercise import Exercise, JudgedExercise, Passed, Wrong

quantize = Exercise(
    "quantize(values, bits)",
    "a zero point moves the integers to where the values are, so no integer is wasted",
    names=("the integers", "the scale", "the zero point"),
)


quantize.table(
    [
        ([-1.0, 0.0, 2.0], 4), ([-0.3, 0.1, 0.87, 1.2], 4), ([-2.25, -0.4, 0.3], 4), ([-1.0, 0.17, 3.0, -0.7, 1.1], 8),
        ([0.5, 1.0, 3.0], 4), ([-0.47, -1.13, -3.0], 4), ([0.02, -0.01, 0.04], 2), ([12.0, -18.0, 3.3], 8),
        ([-1.0, 1.0], 4), ([-1.0, 0.3, 1.0], 8), ([-1.0, 1.0, 3.5], 4), ([-2.0, 2.5, 5.0], 4),
    ],
    lambda random: [([*(round(random.uniform(-1, 4), 2) for _ in range(7)), -1.2, 4.05], 4)],
    given="values {}, {} bits",
)  # fmt: skip


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
def with_a_zero_point(
    values, bits, limits=None, steps=lambda bits: 2**bits - 1, zero=lambda low, scale: round(-low / scale),
    to_int=round, shift=1, limit=True,
):  # fmt: skip
    """Quantize, with replaceable parts: the range, its steps, the zero point, the rounding, the shift and the limit."""
    low, high = limits(values) if limits else (min(0.0, *values), max(0.0, *values))
    scale = (high - low) / steps(bits)
    zero_point = zero(low, scale)
    integers = [to_int(value / scale) + shift * zero_point for value in values]
    return [min(one, 2**bits - 1) if limit else one for one in integers], scale, zero_point


def of_the_mean(values):
    mean = sum(map(abs, values)) / len(values)
    return -mean, mean


quantize.add_misconceptions({
    "takes the scale from the mean: values beyond it need integers that do not exist. The range decides.":
        {"limits": of_the_mean},
    "takes the scale from the largest size alone, as symmetric quantization does: half of the integers stay unused.":
        {"limits": lambda values: (-max(map(abs, values)), max(map(abs, values)))},
    "takes the range from 0 to the largest value: negative values need integers, too.":
        {"limits": lambda values: (0.0, max(0.0, *values))},
    "takes a range that need not contain 0: then the zero point is outside of the integers.":
        {"limits": lambda values: (min(values), max(values))},
    "divides the range into 2**bits steps: 2**bits integers have one step less between them, and the largest value "
    "would wrap around to 0.": {"steps": lambda bits: 2**bits},
    "divides the range into 2**(bits - 1) - 1 steps: without a sign, all bits count.":
        {"steps": lambda bits: 2 ** (bits - 1) - 1},
    "drops the zero point: negative values get negative integers, and these do not exist.": {"shift": 0},
    "subtracts the zero point: it is the integer of 0, so it is added to all.": {"shift": -1},
    "returns the smallest value as the zero point: it is an integer, the one that stands for 0.":
        {"zero": lambda low, scale: -low},
    "returns the integer of the smallest value as the zero point: it is the integer that stands for 0.":
        {"zero": lambda low, scale: round(low / scale)},
    "cuts off the fraction: the nearest integer has a smaller error.": {"to_int": int},
    "has an integer of 2**bits: where the largest value and the zero point are both rounded up, their sum is too large "
    "by one.": {"limit": False},
})  # fmt: skip


multiply = Exercise(
    "multiply(x, integers, scales, zeros, group)",
    "the zero points leave the product with the sums of the inputs, so a kernel needs no float weights",
)


multiply.table(
    [
        ([1.0, 2.0], [3, 7], [0.5], [5], 2), ([1.0, -2.0, 0.5, 3.0], [15, 0, 8, 2], [0.5, 2.0], [8, 8], 2),
        ([1.0, -2.0, 0.5, 3.0], [15, 0, 8, 2], [0.5, 2.0], [3, 11], 2),
        ([2.0, 1.0, 4.0, -1.0], [1, 2, 3, 4], [0.25], [6], 4),
        ([2.0, 1.0, 4.0], [9, 2, 7], [0.25, 1.0, 0.5], [6, 1, 15], 1),
        ([0.0, 1.0, 1.0, 0.0], [5, 5, 9, 9], [1.0, 3.0], [0, 0], 2),
        ([1.0, 2.0, -1.0, 3.0, 1.0, 2.0], [4, 15, 0, 9, 1, 7], [0.5, 0.125], [13, 4], 3),
    ],
    lambda random: [
        ([float(random.randint(-3, 3)) for _ in range(6)], random.choices(range(16), k=6), [0.5, 0.125], [9, 4], 3)
    ],
)  # fmt: skip


@multiply.reference
def by_group(x, integers, scales, zeros, group, zero=lambda zero, x: zero * sum(x), scale=lambda scales, g: scales[g]):
    """Multiply, with replaceable parts: what the zero point takes away from a group's sum, and the group's scale."""
    total = 0.0
    for number, start in enumerate(range(0, len(x), group)):
        part = x[start : start + group]
        products = sum(one * other for one, other in zip(part, integers[start:], strict=False))
        total += scale(scales, number) * (products - zero(zeros[number], part))
    return total


multiply.add_misconceptions({
    "drops the zero points: an integer stands for (integer - zero point) * scale.": {"zero": lambda zero, x: 0},
    "subtracts a zero point once per group: each weight of the group contains it, so each input multiplies it.":
        {"zero": lambda zero, x: zero},
    "subtracts a zero point once per weight, but does not multiply it by the inputs.":
        {"zero": lambda zero, x: zero * len(x)},
    "adds the zero points: a weight is (integer - zero point) * scale.": {"zero": lambda zero, x: -zero * sum(x)},
    "subtracts the first group's zero point everywhere: each group has its own.":
        lambda x, q, s, z, group: by_group(x, q, s, [z[0]] * len(z), group),
    "uses the first scale for all groups: each group has its own.": {"scale": lambda scales, g: scales[0]},
    "leaves out the scales: an integer counts steps, and a scale is their size.": {"scale": lambda scales, g: 1.0},
    "divides by the scales: they are multiplied to get the weights back.": {"scale": lambda scales, g: 1 / scales[g]},
})  # fmt: skip


@multiply.misconception("subtracts the zero points after scaling: they are integers, so they are scaled, too.")
def zeros_after_scaling(x, integers, scales, zeros, group):
    without = by_group(x, integers, scales, [0] * len(zeros), group)
    return without - sum(zero * sum(x[n * group : (n + 1) * group]) for n, zero in enumerate(zeros))


@multiply.misconception("multiplies a zero point by the sum of all inputs: only those of its own group have it.")
def zeros_times_all_inputs(x, integers, scales, zeros, group):
    without = by_group(x, integers, scales, [0] * len(zeros), group)
    return without - sum(scale * zero for scale, zero in zip(scales, zeros, strict=True)) * sum(x)


unpack = Exercise("unpack(words, bits)", "packed integers mean something only together with their order and their sign")


@unpack.cases
def _(random):
    for words, bits in [
        ([0x000F0001], 4), ([0x00020001], 8), ([0x76543210], 4), ([0xFEDCBA98, 0x00000009], 4), ([0x80FF7F01], 8),
        ([0x12345678, 0x9ABCDEF0], 8), ([0x89ABCDEF], 4), ([0], 8),
        ([random.getrandbits(32), random.getrandbits(32)], random.choice([4, 8])),
    ]:  # fmt: skip
        yield (words, bits), f"words [{', '.join(f'0x{word:08X}' for word in words)}], {bits} bits"


def with_sign(integer, bits):
    return integer - 2**bits * (integer >= 2 ** (bits - 1))


@unpack.reference
def from_the_lowest(words, bits, place=lambda number, bits: number * bits, value=with_sign):
    """Unpack, with replaceable parts: the lowest bit of an input, and the value of its bits."""
    mask = 2**bits - 1
    return [value(word >> place(number, bits) & mask, bits) for word in words for number in range(32 // bits)]


def _sign_and_size(integer, bits):
    half = 2 ** (bits - 1)
    return -(integer - half) if integer >= half else integer


unpack.add_misconceptions({
    "loses the signs: a first bit of 1 means that 2**bits is subtracted.": {"value": lambda integer, bits: integer},
    "takes the first bit for a minus sign before the rest: in two's complement, it subtracts 2**bits.":
        {"value": _sign_and_size},
    "subtracts half of the range from all integers: only those with a first bit of 1 are negative, and by 2**bits.":
        {"value": lambda integer, bits: integer - 2 ** (bits - 1)},
    "starts with the highest bits: input 0 has the lowest ones.":
        {"place": lambda number, bits: 32 - bits - number * bits},
    "reads 8 inputs from every word, however many bits each has.":
        lambda words, bits: [with_sign(w >> 4 * n & 15, 4) for w in words for n in range(8)],
    "reads 4 inputs from every word, however many bits each has.":
        lambda words, bits: [with_sign(w >> 8 * n & 255, 8) for w in words for n in range(4)],
    "reads only the first word.": lambda words, bits: from_the_lowest(words[:1], bits),
})  # fmt: skip

to_int8 = Exercise(
    "to_int8(weights)",
    "the largest integer is 127, so a scale of largest / 128 turns the largest weight around",
    names=("the integers", "the scale"),
)


to_int8.table(
    [([0.64, -1.27, 0.1],), ([0.64, 1.27, -0.1],), ([-0.3, 0.3, 0.02],), ([2.0, -1.996, 0.5],), ([-5.0, 4.99, 0.011],),
     ([0.001],), ([-0.5, -3.0],), ([0.0, 7.0],)],
    lambda random: [([*(round(random.uniform(-2, 2), 2) for _ in range(6)), 2.5],)],
)  # fmt: skip


def wrap(integer):
    """Return what a cast to 8 bits makes of an integer."""
    return (integer + 128) % 256 - 128


@to_int8.reference
def up_to_127(weights, scale=lambda weights: max(map(abs, weights)) / 127, to_int=round, limit=lambda integer: integer):
    """Quantize, with replaceable parts: the scale, the rounding, and what becomes of integers that are too large."""
    step = scale(weights)
    return [limit(to_int(weight / step)) for weight in weights], step


def by_128(weights):
    return max(map(abs, weights)) / 128


to_int8.add_misconceptions({
    "still contains the bug: 128 wraps around to -128, so the largest weight changes its sign.":
        {"scale": by_128, "limit": wrap},
    "returns 128, which 8 bits cannot hold: a cast would make -128 of it.": {"scale": by_128},
    "divides by 127.5: the largest weight becomes 127.5, and that rounds to 128.":
        {"scale": lambda weights: max(map(abs, weights)) / 127.5, "limit": wrap},
    "takes the scale from the mean: larger weights need integers beyond 127.":
        {"scale": lambda weights: sum(map(abs, weights)) / len(weights) / 127, "limit": wrap},
    "cuts off the fraction: the nearest integer has a smaller error.": {"to_int": int},
})  # fmt: skip
for _lowest in (-128, -127):
    to_int8.misconception(
        "cuts 128 to 127 and keeps the scale: the largest weight then moves by a whole step. Choose a scale for which "
        "it is 127.",
        lambda weights, lowest=_lowest: up_to_127(weights, by_128, limit=lambda one: max(lowest, min(127, one))),
    )
for _limit in (wrap, lambda one: one, lambda one: max(-127, min(127, one)), lambda one: max(-128, min(127, one))):
    to_int8.misconception(
        "takes the largest weight with its sign: a negative weight may be larger in size.",
        lambda weights, limit=_limit: up_to_127(weights, lambda weights: max(weights) / 127, limit=limit),
    )


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
    integers, scale = up_to_127(weights, scale=by_128, to_int=round, limit=wrap)
    errors = [abs(integer * scale - weight) for integer, weight in zip(integers, weights, strict=True)]
    worst = max(range(len(weights)), key=errors.__getitem__)
    if errors[worst] > 0.51 * scale:
        return Passed(f"The weight {weights[worst]:g} becomes {integers[worst] * scale:g}.")
    return "returns weights for which `to_int8_with_a_bug` is right. Which integer does the largest weight become?"


failing_weights = JudgedExercise(
    "failing_weights()", "the bug shows where a positive weight becomes 128, which 8 bits cannot hold", exposes_the_bug
)
