"""What choosing tokens costs per iteration: `python -m benchmarks.sampling_cost`.

The goals, for a decode of 16 rows: top-p sampling takes at most 1.1 times as long as greedy decoding with GPT-2 124M,
and at most 1.15 times with a vocabulary of 151,936 tokens; log-probabilities take at most 1.1 times as long.
"""

import statistics
from collections.abc import Callable

import cyclopts
import torch

from helpers import Engine, EngineConfig, SamplingParams, load_model

from .in_turns import iteration_times, measured_on, random_prompts, table, take_turns
from .models import find_model

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 16, 32
WAYS = {
    "greedy": {},
    "5 log-probabilities": {"logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "min-p": {"temperature": 0.8, "min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.1},
}


def measure(name: str, dtype: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return, for each way to choose tokens, the median milliseconds of an iteration and how many times greedy's."""
    engine = Engine(
        *load_model(find_model(name).folder, dtype=getattr(torch, dtype)), EngineConfig(max_batch_size=ROWS)
    )
    prompts = random_prompts(engine.model_info.vocab_size, PROMPT_TOKENS)

    def decodes(settings: dict) -> Callable[[], float]:
        def run() -> float:
            for row in range(ROWS):
                seed = row if "temperature" in settings else None
                engine.add_request(next(prompts), SamplingParams(OUTPUT_TOKENS, ignore_eos=True, seed=seed, **settings))
            return statistics.median(iteration_times(engine, OUTPUT_TOKENS)[1:])  # the first one prefills

        return run

    results = take_turns({way: decodes(settings) for way, settings in WAYS.items()}, rounds)
    ratios = {
        way: [time / greedy for time, greedy in zip(times, results["greedy"], strict=True)]
        for way, times in results.items()
    }
    return {way: (statistics.median(times), statistics.median(ratios[way])) for way, times in results.items()}


def main(*models: str, dtype: str = "float32", rounds: int = 5) -> None:
    """Measure iterations of 16 rows that decode, greedily and with other parameters.

    Args:
        models: names in `benchmarks/models.py`; GPT-2 124M and Qwen2.5-0.5B's shape if omitted.
        dtype: the precision of the weights.
        rounds: how many batches of each kind are measured.
    """
    rows = []
    for name in models or ("gpt2", "qwen2.5"):
        found = measure(name, dtype, rounds)
        rows.append([f"{name}, {dtype}", *(f"{time:.1f} ({ratio:.2f})" for time, ratio in found.values())])
    print(
        f"{measured_on()} Milliseconds per iteration of {ROWS} rows that decode, and how many times greedy's in the "
        f"same round; medians.\n\n{table(['model', *WAYS], rows)}"
    )


if __name__ == "__main__":
    cyclopts.run(main)
