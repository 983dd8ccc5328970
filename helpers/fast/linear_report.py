"""Time the backends of a model's linear layers on this machine, keep the times, and show which ones are chosen.

    python -m helpers.fast.linear_report
    python -m helpers.fast.linear_report --model openai-community/gpt2 --dtype bfloat16 --weights int8

The table gives the gigabytes of weights read per second. Decoding cannot be faster than memory, so the last column
compares the chosen backend with the measured bandwidth. It means little for many rows, which wait for arithmetic. A
share above 100% means that weights were still in the cache.
"""

from typing import Literal

import cyclopts
import torch

from ..hardware import memory_bandwidth
from ..models import load_model
from ..models.quantization import QuantizedLinear
from .linear import is_plain
from .linear_backends import available_backends, bytes_of, candidates, kind_of
from .linear_choice import ROWS, Times, processor, shape_of, times_of

app = cyclopts.App(name="python -m helpers.fast.linear_report", help=__doc__, result_action="return_value")


@app.default
def main(
    model: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    weights: Literal["int8", "int4"] | None = None,
) -> None:
    """Time the backends and print a table.

    Args:
        model: a model folder or the name of a model; the default model if omitted.
        dtype: the dtype of the weights, or of their inputs if the weights are quantized.
        weights: quantize the weights; layers that stay as they are, are left out.
    """
    loaded, _ = load_model(model, dtype=getattr(torch, dtype), weights=weights)
    is_timed = is_plain if weights is None else lambda module: isinstance(module, QuantizedLinear)
    layers = [module for module in loaded.modules() if is_timed(module)]
    if not layers:
        raise SystemExit("The model has no plain linear layers.")
    backends = available_backends(*kind_of(layers[0]))
    bandwidth = memory_bandwidth()
    times = times_of(layers, backends, fresh=True)
    print(f"{processor().split(';')[0]}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, {dtype}")
    print(f"Memory is read at {bandwidth / 1e9:.0f} GB/s. Weights read, in GB/s; * is chosen:\n")
    sizes = {shape_of(layer): bytes_of(layer) for layer in layers}
    print("\n".join(table(times, sizes, backends, bandwidth)))


def table(times: dict[str, Times], sizes: dict[str, int], backends: list[str], bandwidth: float) -> list[str]:
    """Return the lines of the table: a line for each shape and number of rows."""
    lines = [f"{'layer':22}{'rows':>5}" + "".join(f"{name:>18}" for name in backends) + f"{'of bandwidth':>15}"]
    for shape, measured in times.items():
        chosen = measured.choose(candidates(backends, copies=True))
        for index, rows in enumerate(ROWS[: len(measured.seconds[backends[0]])]):
            rates = {name: sizes[shape] / measured.seconds[name][index] for name in backends}
            cells = [f"{rates[name] / 1e9:.1f}" + " *"[name == chosen[index]] for name in backends]
            share = f"{rates[chosen[index]] / bandwidth:.0%}"
            lines.append(f"{shape:22}{rows:5}" + "".join(f"{cell:>18}" for cell in cells) + f"{share:>15}")
    return lines


if __name__ == "__main__":
    app()
