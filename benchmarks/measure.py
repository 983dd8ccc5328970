"""Engines take turns on the same requests: first the check that all say the same, then the clock.

The claim: no time is measured for engines whose tokens differ. In float32 they have to be the same, every one; in
bfloat16 rounding decides near ties, so the share of requests that got the reference's tokens is reported instead.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from .engines import BenchEngine
from .workloads import Workload


class TokensDiffer(RuntimeError):
    """Two engines gave the same float32 model's same requests different tokens."""


@dataclass
class Measurement:
    """What an engine did with a workload: one time a repeat."""

    engine: str
    ours: bool
    workload: str
    dtype: str
    rows: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    identical: float  # share of requests with the reference's tokens
    seconds: list[float]


def measure(
    engines: Sequence[BenchEngine],
    workload: Workload,
    folder: Path,
    dtype: str,
    repeats: int,
    bar: tqdm | None = None,
    settle: float = 0.3,
) -> list[Measurement]:
    """Load the engines, check their tokens against the first one's, and time them in turns.

    Args:
        engines: the first one is the reference.
        workload, folder, dtype: what they run, on which model.
        repeats: how often each one is timed.
        bar: a progress bar that is moved on `runs` times in all.
        settle: seconds before each run that is timed: the threads of the engine before it spin on before they sleep.

    Raises:
        TokensDiffer: float32, and not all tokens are the same.
    """
    engines = list(engines)
    bar = tqdm(disable=True) if bar is None else bar
    loaded = []
    try:
        for engine in engines:
            loaded.append(engine)
            engine.load(folder, dtype, workload.rows)
        shares = _check(engines, workload, dtype, bar)
        seconds = {engine.name: [] for engine in engines}
        for repeat in range(repeats):
            # Everybody is first once: whoever comes behind a hot neighbour is not always the same.
            shift = repeat % len(engines)
            for engine in engines[shift:] + engines[:shift]:
                bar.set_description(f"{workload.name} {dtype}, repeat {repeat + 1}: {engine.name}")
                gc.collect()
                time.sleep(settle)
                start = time.perf_counter()
                engine.run(workload.requests)
                seconds[engine.name].append(time.perf_counter() - start)
                bar.update()
    finally:
        for engine in loaded:
            engine.close()
    return [
        Measurement(
            engine.name, engine.ours, workload.name, dtype, workload.rows, len(workload.requests),
            workload.prompt_tokens, workload.output_tokens, shares[engine.name], seconds[engine.name],
        )
        for engine in engines
    ]  # fmt: skip


def runs(engines: Sequence[BenchEngine], repeats: int) -> int:
    """How many times `measure` moves its bar on: once an engine to check, once for each time."""
    return len(engines) * (repeats + 1)


def _check(engines: Sequence[BenchEngine], workload: Workload, dtype: str, bar: tqdm) -> dict[str, float]:
    """The share of requests for which each engine has the first one's tokens; the run also warms it up."""
    shares, reference = {}, None
    for engine in engines:
        bar.set_description(f"{workload.name} {dtype}, tokens: {engine.name}")
        answers = engine.run(workload.requests)
        bar.update()
        lengths = [len(answer) for answer in answers]
        if lengths != [request.max_tokens for request in workload.requests]:
            raise TokensDiffer(
                f"{engine.name} did not generate as many tokens as asked for ({workload.name}, {dtype})."
            )
        reference = reference or answers
        different = [i for i, (one, other) in enumerate(zip(reference, answers, strict=True)) if one != other]
        shares[engine.name] = 1 - len(different) / len(answers)
        if different and dtype == "float32":
            first, other = reference[different[0]], answers[different[0]]
            place = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            raise TokensDiffer(
                f"{engine.name} and {engines[0].name} gave {len(different)} of {len(answers)} requests of "
                f"{workload.name} different tokens in {dtype}, first request {different[0]} at output token {place}: "
                f"{first[place]} became {other[place]}. No time is reported for engines that do different work."
            )
    return shares
