"""What a second process saves per iteration: `python -m benchmarks.tensor_parallel`.

Two processes of one thread share a model. Beside them, one process computes it with one thread and with two. The second
table says what the two processes spend their time on.
"""

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cyclopts
import torch

from helpers import Engine, EngineConfig, SamplingParams, load_model, model_engine

from .in_turns import iteration_times, random_prompts, table, take_turns
from .machine import processor
from .models import RANDOM, find_model
from .timed_sums import PassRecorder, make_fast_and_timed

SIZE, DECODES, PROMPT_TOKENS = 2, 8, 16
WAYS = {"1 process, 1 thread": (1, 1), "2 processes, 1 thread each": (SIZE, 1), "1 process, 2 threads": (1, 2)}
WORKLOADS = {
    "decode, 8 rows": (8, PROMPT_TOKENS),
    "decode, 16 rows": (16, PROMPT_TOKENS),
    "prefill, 512 tokens": (1, 512),
}


def iterations(engine: Engine, threads: int, rows: int, prompt_tokens: int, prompts) -> list[float]:
    """Return the milliseconds of each decode of so many rows; those of the prefill if there is one row."""
    torch.set_num_threads(threads)
    count = 1 if rows == 1 else 1 + DECODES
    for _ in range(rows):
        engine.add_request(next(prompts), SamplingParams(count, ignore_eos=True))
    return iteration_times(engine, count)[0 if rows == 1 else 1 :]


def parts(run: Callable[[], list[float]], recorder: PassRecorder) -> dict[str, float]:
    """Run with the recorder on, and return the milliseconds of the last iteration by what they were spent on."""
    recorder.switch(True)
    whole = run()[-1]
    recorder.switch(False)
    found = {name: 1000 * seconds for name, seconds in recorder.seconds().items()}
    return found | {"engine, messages": whole - found.pop("pass"), "iteration": whole}


def measure(name: str, dtype: str, rounds: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of both tables for a model."""
    model, tokenizer = load_model(find_model(name).folder, dtype=getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record")
        recorder, usual = PassRecorder(path, SIZE), model_engine.make_fast
        engines = {}
        for way, (size, threads) in WAYS.items():
            torch.set_num_threads(threads * size)  # each process has its part of them
            model_engine.make_fast = partial(make_fast_and_timed, path=path, size=SIZE) if size > 1 else usual
            config = EngineConfig(
                max_batch_size=16, num_blocks=256, execution="ragged", tensor_parallel_size=size, trace_length=10
            )
            engines[way] = Engine(model, tokenizer, config)
        model_engine.make_fast = usual
        runs = {}
        for workload, (rows, tokens) in WORKLOADS.items():
            prompts = random_prompts(model.config.vocab_size, tokens)
            for way, (_, threads) in WAYS.items():
                run = partial(iterations, engines[way], threads, rows, tokens, prompts)
                runs[workload, way] = run
                if engines[way].config.tensor_parallel_size > 1:
                    runs[workload, "parts"] = partial(parts, run, recorder)
        results = take_turns(runs, rounds)
        for engine in engines.values():
            if engine.config.tensor_parallel_size > 1:
                engine.runner.group.end()
    title = RANDOM[name][0].removeprefix("a Qwen 2 of ")
    times, spent = [], []
    for workload in WORKLOADS:
        cells = [f"{title}, {dtype}", workload]
        pooled = {way: [time for run in results[workload, way] for time in run] for way in WAYS}
        times.append(cells + [spread(pooled[way]) for way in WAYS])
        found = results[workload, "parts"]
        spent.append(cells + [f"{statistics.median(measured[part] for measured in found):.1f}" for part in found[0]])
    return times, spent


def spread(times: list[float]) -> str:
    """Return the median, and the quartiles in brackets."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main(*models: str, dtypes: tuple[str, ...] = ("float32", "bfloat16"), rounds: int = 4) -> None:
    """Measure iterations of one process and of two, in turns.

    Args:
        models: names in `benchmarks/models.py`; GPT-2 124M and Qwen2.5-0.5B's shape if omitted.
        dtypes: of the weights.
        rounds: how many batches of each kind are measured.
    """
    times, spent = [], []
    for name in models or ("gpt2", "qwen2.5"):
        for dtype in dtypes:
            for rows, new in zip((times, spent), measure(name, dtype, rounds), strict=True):
                rows += new
    parts_header = (
        "products",
        "waiting for the other",
        "sums",
        "attention, norms, rest",
        "engine, messages",
        "iteration",
    )
    print(
        f"Processor: {processor()}. Milliseconds per iteration, medians and quartiles of {rounds} rounds.\n\n"
        f"{table(['model', 'iteration', *WAYS], times)}\n\n"
        f"What the two processes spend on an iteration, in milliseconds: medians, means over both processes.\n\n"
        f"{table(['model', 'iteration', *parts_header], spent)}"
    )


if __name__ == "__main__":
    cyclopts.run(main)
