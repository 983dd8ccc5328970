"""How close prompts come to the machine's arithmetic limit: `python -m benchmarks.prefill_rate`.

The goals: a prompt of 4,096 tokens is computed at 80% of the best rate of one large matrix product, in float32 and in
bfloat16, and quantized weights do not make it slower. The operations of a prompt are two per weight and token, without
the LM head, which only the last token needs, and four per pair of tokens and unit of attention's width.
"""

import statistics
from collections.abc import Callable

import cyclopts
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers import Engine, EngineConfig, SamplingParams, load_model

from .in_turns import measured_on, random_prompts, seconds, table, take_turns
from .models import find_model

TOKENS, SIZE = 4096, 4096
FORMATS = (None, "int8", "int4")


def operations(model) -> float:
    """Return the additions and multiplications that a prompt takes."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    pairs = TOKENS * (TOKENS + 1) / 2
    return 2 * TOKENS * sum(layer.weight.numel() for layer in layers) + 4 * pairs * width * config.num_hidden_layers


def prefill(engine: Engine) -> Callable[[], float]:
    """Return a function that measures the seconds of a prompt in one iteration."""
    prompts = random_prompts(engine.model_info.vocab_size, TOKENS)

    def run() -> float:
        engine.add_request(next(prompts), SamplingParams(1))
        return seconds(engine.step)

    return run


def measure(name: str, dtype: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Return the limit in operations per second, and the rate of each format of weights."""
    folder, kind = find_model(name).folder, getattr(torch, dtype)
    left, right, product = torch.randn(3, SIZE, SIZE, dtype=kind)
    runs = {"limit": lambda: seconds(lambda: torch.mm(left, right, out=product))}
    config = EngineConfig(max_batch_size=1, max_tokens_per_step=TOKENS, prefix_caching=False)
    count = operations(load_model(folder, dtype=kind)[0])
    for weights in FORMATS:
        runs[weights or dtype] = prefill(Engine(*load_model(folder, dtype=kind, weights=weights), config))
    times = take_turns(runs, rounds)
    limit = 2 * SIZE**3 / min(times.pop("limit"))
    return limit, {way: count / statistics.median(found) for way, found in times.items()}


def main(*models: str, dtypes: tuple[str, ...] = ("float32", "bfloat16"), rounds: int = 3) -> None:
    """Measure prompts of 4,096 tokens.

    Args:
        models: names in `benchmarks/models.py`; SmolLM2-135M's and Qwen2.5-0.5B's shapes if omitted.
        dtypes: the precisions.
        rounds: how many prompts of each kind are measured.
    """
    rows = []
    for name in models or ("smollm2", "qwen2.5"):
        for dtype in dtypes:
            limit, rates = measure(name, dtype, rounds)
            cells = [f"{rate / 1e9:.0f} ({rate / limit:.0%})" for rate in rates.values()]
            rows.append([f"{name}, {dtype}", f"{limit / 1e9:.0f}", *cells])
    header = ["model", "one product", "weights as they are", "int8", "int4"]
    print(
        f"{measured_on()} Billions of operations per second, and the share of the best rate of one product of {SIZE} x "
        f"{SIZE} matrices; prompts of {TOKENS} tokens, medians.\n\n{table(header, rows)}"
    )


if __name__ == "__main__":
    cyclopts.run(main)
