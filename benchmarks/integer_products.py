"""What products of integers gain, layer by layer: `python -m benchmarks.integer_products`.

For each shape of a linear layer in GPT-2 124M, SmolLM2-135M and Qwen2.5-0.5B, and some numbers of rows, it reports the
milliseconds of the fastest product that the engine has: of float32 and bfloat16 numbers, of bfloat16 numbers and int8
weights, and of integers, where the time includes rounding the rows. `_int_mm` is PyTorch's product of integers, rounded
and scaled by PyTorch's operators. Before each call, weights leave the cache, as in a model that is larger than it.
"""

import time
from collections.abc import Callable
from functools import partial

import cyclopts
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers.fast.linear_backends import available_backends, backends_of, kind_of
from helpers.fast.linear_choice import evictor, last_level_cache
from helpers.models import round_inputs
from helpers.models.quantization import FORMATS, QuantizedLinear, round_to_integers

from .in_turns import measured_on, seconds, table
from .models import RANDOM

ROWS = (1, 8, 16, 64, 512)
HEADS_UP_TO = 64  # rows: the engine computes the LM head of one token per sequence
Product = Callable[[torch.Tensor], torch.Tensor]


def shapes(name: str) -> list[tuple[int, int]]:
    """Return the (outputs, inputs) of a model's linear layers, the LM head last."""
    with torch.device("meta"):  # shapes without weights
        model = AutoModelForCausalLM.from_config(RANDOM[name][1])
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | Conv1D)]
    weights = [layer.weight.T if isinstance(layer, Conv1D) else layer.weight for layer in layers]
    return list(dict.fromkeys(tuple(weight.shape) for weight in weights))


def products(layer: nn.Module) -> list[Product]:
    """Return the available products of a layer."""
    return [backends_of(layer)[name](layer) for name in available_backends(*kind_of(layer))]


def int_mm(quantized: QuantizedLinear) -> Product:
    """Return PyTorch's product of integers, for bfloat16 rows."""
    integers, scales = quantized.integers_and_scales()
    weight, scales = integers.T.contiguous(), scales.T.contiguous()

    def product(x: torch.Tensor) -> torch.Tensor:
        rounded, own = round_to_integers(x, FORMATS["int8"])
        return torch._int_mm(rounded, weight).float().mul_(own).mul_(scales).to(x.dtype)

    return product


@torch.no_grad()
def milliseconds(outputs: int, inputs: int, budget: float) -> list[list[float]]:
    """Return the shortest time of each way to multiply, for each number of rows.

    Args:
        budget: seconds for a number of rows.
    """
    layer = nn.Linear(inputs, outputs, bias=False)
    half = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    quantized, integers = QuantizedLinear(half, "int8"), round_inputs(QuantizedLinear(half, "int8"))
    ways = [products(module) for module in (layer, half, quantized, integers)] + [[int_mm(quantized)]]
    evict, times = evictor(min(last_level_cache(), 300_000_000)), []
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        deadline, best = time.perf_counter() + budget, [[float("inf")] * len(way) for way in ways]
        skipped = rows > HEADS_UP_TO and outputs > 32_000
        for number in range(0 if skipped else 6):
            if number > 1 and time.perf_counter() > deadline:
                break
            for way, own in zip(ways, best, strict=True):
                numbers = x if way is ways[0] else x.bfloat16()
                for index, product in enumerate(way):
                    if number and own[index] > 4 * min(own):  # it has lost
                        continue
                    evict()
                    own[index] = min(own[index], seconds(partial(product, numbers)))
        times.append([1000 * min(own) for own in best])
    return times


def main(*models: str, budget: float = 1.5) -> None:
    """Time products of linear layers.

    Args:
        models: names in `benchmarks/models.py`; all three shapes if omitted.
        budget: seconds for each shape and number of rows.
    """
    lines = []
    for name in models or ("gpt2", "smollm2", "qwen2.5"):
        for outputs, inputs in shapes(name):
            for rows, times in zip(ROWS, milliseconds(outputs, inputs, budget), strict=True):
                if min(times) < float("inf"):
                    gain = f"{min(times[:3]) / times[3]:.2f}"
                    lines.append([f"{name}, {outputs}x{inputs}", rows, *(f"{fastest:.3f}" for fastest in times), gain])
    print(f"{measured_on()} Milliseconds per product, the fastest of each kind, weights out of the cache.\n")
    header = ["weight", "rows", "float32", "bfloat16", "int8 weights", "int8 by int8", "`_int_mm`", "gain"]
    print(table(header, lines))
    print("\nGain: the fastest of the first three, over int8 by int8.")


if __name__ == "__main__":
    cyclopts.run(main)
