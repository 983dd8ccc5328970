"""Lesson 14, quantization: zero points, products of integers, a KV cache of integers, and a planted bug."""

import torch

from ..comparing import is_number, kind
from ..exercise import Exercise, JudgedExercise, Passed, Wrong


@Exercise.declare(
    "a zero point moves the integers to where the values are, so no integer is wasted",
    names=("the integers", "the scale", "the zero point"),
)
def quantize(values, bits):
    low, high = min(0.0, *values), max(0.0, *values)
    scale = (high - low) / (2**bits - 1)
    zero_point = round(-low / scale)
    integers = [round(value / scale) + zero_point for value in values]
    return [min(integer, 2**bits - 1) for integer in integers], scale, zero_point


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
    right, step, zero = quantize.solution(values, bits)
    shift = -min(0.0, *values) / step
    fits = abs(scale - step) < 1e-5 * step and abs(zero_point - shift) <= 0.501 and len(integers) == len(values)
    slack = 0.501 + abs(zero_point - shift)
    errors = [
        abs((integer - zero_point) * step - value) / step for integer, value in zip(integers, values, strict=False)
    ]
    if fits and max(errors) <= slack and all(0 <= integer < 2**bits for integer in integers):
        kept = [int(integer) if float(integer).is_integer() else integer for integer in integers]
        same = type(integers)(right) if kept == integers else integers
        return same, scale, zero if zero_point == int(zero_point) else zero_point
    return result


LIMITS = "min(0.0, *values), max(0.0, *values)"
quantize.add_misconceptions({
    "takes the scale from the largest size alone, as symmetric quantization does: half of the integers stay unused.":
        f"{LIMITS} -> -max(map(abs, values)), max(map(abs, values))",
    "takes the range from 0 to the largest value: negative values need integers, too.": "min(0.0, *values) -> 0.0",
    "puts the zero point into the middle of the integers: where it is depends on the range.":
        "zero_point = round(-low / scale) -> zero_point = 2 ** (bits - 1)",
    "returns integers around 0: the task asks for those from 0 to `2**bits - 1`.":
        "integers = -> zero_point -= 2 ** (bits - 1); integers =",
    "takes a range without 0: then the zero point is outside of the integers.": f"{LIMITS} -> min(values), max(values)",
    "divides the range into 2**bits steps: 2**bits integers have one step less between them, and the largest value "
    "would wrap around to 0.": "/ (2**bits - 1) -> / 2**bits",
    "drops the zero point: negative values get negative integers, and these do not exist.": " + zero_point -> ",
    "returns the smallest value as the zero point, the integer that stands for 0.": "round(-low / scale) -> -low",
    "returns the integer of the smallest value as the zero point: it is the integer that stands for 0.": "-low -> low",
    "cuts off the fraction, or rounds it up: the nearest integer has a smaller error.":
        ["round(value -> int(value", "round(value -> math.ceil(value"],
    "has an integer of 2**bits: where the largest value and the zero point are both rounded up, their sum is too large "
    "by one.": "min(integer, 2**bits - 1) -> integer",
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


SMALL = {
    "a token": [[1.0, -0.3, 0.2]], "the same token and a larger one": [[1.0, -0.3, 0.2], [0.1, 50.0, -8.0]],
    "halves": [[127.0, 2.5, -0.5]], "a negative token": [[-3.0, -1.0, -0.1], [0.1, 50.0, -8.0]],
}  # fmt: skip
BEYOND_127 = "", ".clamp(-127, 127)", ".clamp(-128, 127)", ".to(torch.int8)"  # what becomes of larger integers


def draw(random, *shape):
    """Return vectors [..., n] of scales of their own: none of their numbers is halfway between two integers."""
    seeded = torch.Generator().manual_seed(random.randrange(10**6))
    numbers = torch.randint(-120, 121, shape, generator=seeded) + 0.8 * torch.rand(shape, generator=seeded) - 0.4
    numbers[..., random.randrange(shape[-1])] = 127 * (2 * torch.randint(2, shape[:-1], generator=seeded) - 1.0)
    return numbers * torch.randn(*shape[:-1], 1, generator=seeded).exp() / 30


@Exercise.declare(
    "both scales leave the sum, which is one of integers: exact, and the same for a token in any batch",
    names=("the sums", "the outputs"),
)
def integer_product(x, integers, scales):
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / step).round()
    sums = rounded.int() @ integers.int().T
    return sums, sums * step * scales


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


@integer_product.ignoring
def the_size_of_integers(result, arguments):
    sums, outputs = result
    return sums.long() if torch.equal(sums, sums.round()) else sums, outputs


LARGEST, SUMS = "x.abs().amax(1, keepdim=True)", "rounded.int() @ integers.int().T"
integer_product.add_misconceptions({
    "takes one scale for the batch: beside a larger token, a token's integers change.": f"{LARGEST} -> x.abs().max()",
    "takes a scale per input instead of one per token: each product of a sum has another one, so none can leave it.":
        [(f"{LARGEST} -> x.abs().amax(0)", f"sums * step -> {scaled}")
         for scaled in ("sums * step", "(rounded * step) @ integers.float().T")],
    "takes the largest number with its sign: a negative one may be larger in size.":
        [(".abs().amax( -> .amax(", f".round() -> .round(){change}") for change in BEYOND_127],
    "maps the largest number to 128, which 8 bits cannot hold: divide by 127.":
        [("/ 127 -> / 128", f".round() -> .round(){change}") for change in BEYOND_127],
    "cuts off the fraction: the nearest integer is closer.": [".round() -> .trunc()", ".round() -> .floor()"],
    "computes the outputs from the inputs as they were: they come from the same sums of integers.":
        "sums * step * scales -> x @ integers.float().T * scales",
    "adds up in 8 or 16 bits: a single product of two such integers may need 15, so their sum needs 32.":
        [".int() -> .to(torch.int8)", ".int() -> .short()"],
    "adds up in float32: beyond 2**24, it leaves out integers, and a sum depends on its order.":
        f"{SUMS} -> rounded @ integers.float().T",
    "forgets the scales of the tokens or of the outputs: integers count steps of that size.":
        ["sums * step * -> sums * ", "* step * scales -> * step"],
    "takes the first token's scale for all: with other tokens before it, a token has other integers.":
        [(f"{LARGEST} -> x[:1].abs().amax(1, keepdim=True)", f".round() -> .round(){change}") for change in BEYOND_127],
})  # fmt: skip
