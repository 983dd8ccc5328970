"""What adapters cost per iteration: `python -m benchmarks.adapters_cost`.

The goal: a decode of 16 rows with 16 adapters of rank 8 takes at most 1.25 times as long as one of the model alone. The
rows read the model's weights once. Without that, each adapter has to be merged into the weights before its row runs,
and taken out again: "merge and swap" measures an iteration in which every one of the 16 rows gets a token that way.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import cyclopts
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers import Engine, EngineConfig, SamplingParams, load_model

from .in_turns import iteration_times, measured_on, random_prompts, seconds, table, take_turns
from .models import find_model

ROWS, RANK, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 8, 16, 32
TARGETS = {  # what PEFT changes by default, and all that it can change
    "gpt2": {"attention": ("c_attn",), "all": ("c_attn", "c_proj", "c_fc")},
    "llama": {
        "attention": ("q_proj", "v_proj"),
        "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    },
}
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # A and B by the path of the layer


def random_pairs(model, targets: tuple[str, ...], seed: int) -> Pairs:
    """Return an adapter's matrices A [rank, inputs] and B [outputs, rank]."""
    generator, pairs = torch.Generator().manual_seed(seed), {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and path.endswith(targets):
            outputs, inputs = reversed(layer.weight.shape) if isinstance(layer, Conv1D) else layer.weight.shape
            a, b = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
            pairs[path] = a, 1e-3 * b
    return pairs


def write(folder: Path, pairs: Pairs, targets: tuple[str, ...]) -> Path:
    """Write an adapter in PEFT's format."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{path}.lora_{name}.weight": matrix
        for path, pair in pairs.items()
        for name, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model, pairs: Pairs, sign: int) -> None:
    """Add an adapter's products to the weights, or subtract them."""
    with torch.no_grad():
        for path, (a, b) in pairs.items():
            layer = model.get_submodule(path)
            (layer.weight.T if isinstance(layer, Conv1D) else layer.weight).addmm_(b, a, alpha=sign)


def decodes(engine: Engine, adapters: list[str | None]) -> Callable[[], list[float]]:
    """Return a function that measures the milliseconds of each iteration of rows that decode, one for each adapter."""
    prompts = random_prompts(engine.model_info.vocab_size, PROMPT_TOKENS)

    def run() -> list[float]:
        for adapter in adapters:
            engine.add_request(next(prompts), SamplingParams(OUTPUT_TOKENS, ignore_eos=True), adapter=adapter)
        return iteration_times(engine, OUTPUT_TOKENS)[1:]  # the first one prefills

    return run


def swaps(engine: Engine, adapters: list[Pairs]) -> Callable[[], list[float]]:
    """Return a function that measures the milliseconds in which every row gets a token of its merged model.

    Each row is a pass of its own, after its adapter is merged and before it is taken out.
    """
    one_token, prompts = SamplingParams(1), random_prompts(engine.model_info.vocab_size, 1)

    def row(pairs: Pairs) -> float:
        engine.add_request(next(prompts), one_token)

        def token() -> None:
            merge(engine.model, pairs, 1)
            engine.step()
            merge(engine.model, pairs, -1)

        return 1000 * seconds(token)

    return lambda: [sum(map(row, adapters))]


def measure(name: str, kind: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of an iteration of each way to run a model."""
    folder = find_model(name).folder
    model, tokenizer = load_model(folder)
    targets = TARGETS[model.config.model_type][kind]
    pairs = [random_pairs(model, targets, seed) for seed in range(ROWS)]
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=ROWS, trace_length=10))
    names = [f"adapter {number}" for number in range(ROWS)]
    with tempfile.TemporaryDirectory() as temporary:
        for adapter, own in zip(names, pairs, strict=True):
            engine.load_adapter(adapter, write(Path(temporary, adapter), own, targets))
    # Its products read the model's own weights: copies of these would be made anew after each swap.
    swapped = Engine(load_model(folder)[0], tokenizer, EngineConfig(max_batch_size=1, linear_backend="pytorch"))
    results = take_turns(
        {
            "base": decodes(engine, [None] * ROWS),
            "1 adapter": decodes(engine, names[:1] * ROWS),
            "16 adapters": decodes(engine, names),
            "merge and swap": swaps(swapped, pairs),
        },
        rounds,
    )
    return {way: statistics.median(time for times in runs for time in times) for way, runs in results.items()}


def main(*models: str, rounds: int = 5) -> None:
    """Measure iterations of 16 rows that decode, with and without adapters of rank 8.

    Args:
        models: names in `benchmarks/models.py`; GPT-2 124M and SmolLM2-135M's shape if omitted.
        rounds: how many batches of each kind are measured.
    """
    rows = []
    for name in models or ("gpt2", "smollm2"):
        for kind in ("attention", "all"):
            times = measure(name, kind, rounds)
            cells = [f"{time:.1f} ({time / times['base']:.2f})" for time in times.values()]
            rows.append([f"{name}, {kind}", *cells])
    print(
        f"{measured_on()} Milliseconds per iteration of {ROWS} rows that decode, and how many times the base's; "
        f"adapters of rank {RANK}, medians.\n\n"
        f"{table(['model, adapted layers', 'base', '1 adapter', '16 adapters', 'merge and swap'], rows)}"
    )


if __name__ == "__main__":
    cyclopts.run(main)
