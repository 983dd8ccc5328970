"""Engines take turns on the same requests: first the check that all say the same, then the clock.

The claim: no time is measured for engines whose tokens differ by more than rounding. Where two engines differ, the
plain model in float32 reads prompt and answer, and each of the answer's tokens has to be the best one, or as good as
tied with it: rounding decides near ties, rarely in float32, often in bfloat16. The share of requests with the very
tokens of the first engine is reported, and so is how far from the best the others' tokens are.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch
from tqdm.auto import tqdm

from helpers import load_model

from .engines import BenchEngine
from .workloads import TokenRequest, Workload

# What is a near tie: the share of the logits' range by which a token may fall short of the best one. The random model's
# second best token is 0.025 short of the best in the mean, any other token 0.5. In bfloat16, 0.004 was the most seen.
TIES = MappingProxyType({"float32": 0.001, "bfloat16": 0.02})

Shortfall = Callable[[TokenRequest, list[int]], float]


class TokensDiffer(RuntimeError):
    """Two engines gave the same model's same requests different tokens, and it was not rounding."""


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
    shortfall: float  # of the tokens of all others, at most: see `shortfall_of`
    seconds: list[float]


def measure(
    engines: Sequence[BenchEngine],
    workload: Workload,
    folder: Path,
    dtype: str,
    repeats: int,
    bar: tqdm | None = None,
    settle: float = 0.3,
    shortfall: Shortfall | None = None,
) -> list[Measurement]:
    """Load the engines, check their tokens against the first one's, and time them in turns.

    Args:
        engines: the first one is the reference.
        workload, folder, dtype: what they run, on which model.
        repeats: how often each one is timed.
        bar: a progress bar that is moved on `runs` times in all.
        settle: seconds before each run that is timed: the threads of the engine before it spin on before they sleep.
        shortfall: how far an answer is from the model's own; asked of the model in `folder` if left out.

    Raises:
        TokensDiffer: an engine's tokens are not the first one's, and not as good as tied with the best ones either.
    """
    engines = list(engines)
    bar = tqdm(disable=True) if bar is None else bar
    loaded = []
    try:
        for engine in engines:
            loaded.append(engine)
            engine.load(folder, dtype, workload.rows)
        checked = _check(engines, workload, dtype, bar, shortfall or shortfall_of(folder))
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
            workload.prompt_tokens, workload.output_tokens, *checked[engine.name], seconds[engine.name],
        )
        for engine in engines
    ]  # fmt: skip


def runs(engines: Sequence[BenchEngine], repeats: int) -> int:
    """How many times `measure` moves its bar on: once an engine to check, once for each time."""
    return len(engines) * (repeats + 1)


def shortfall_of(folder: Path) -> Shortfall:
    """How far an answer is from what the model in `folder` says, in float32 and in one pass over prompt and answer.

    Answers with the largest of its tokens' shortfalls: of the best logit at its place, given all before it, as a share
    of the range of the logits there. 0 for the very tokens of greedy decoding.
    """
    plain = cache(lambda: load_model(folder, dtype=torch.float32)[0])  # most runs need it for no answer

    def shortfall(request: TokenRequest, answer: list[int]) -> float:
        ids = torch.tensor([request.prompt + answer[:-1]], device=plain().device)
        with torch.inference_mode():
            logits = plain()(ids, logits_to_keep=len(answer), use_cache=False).logits[0]
        chosen = logits[torch.arange(len(answer)), answer]
        best, least = logits.amax(dim=-1), logits.amin(dim=-1)
        return float(((best - chosen) / (best - least)).max())

    return shortfall


def _check(
    engines: Sequence[BenchEngine], workload: Workload, dtype: str, bar: tqdm, shortfall: Shortfall
) -> dict[str, tuple[float, float]]:
    """For each engine, the share of requests with the first one's tokens, and the shortfall of those with others.

    The run also warms it up.
    """
    checked, reference = {}, None
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
        farthest = 0.0
        for i in different:
            for name, answer in ((engine.name, answers[i]), (engines[0].name, reference[i])):
                farthest = max(farthest, distance := shortfall(workload.requests[i], answer))
                if distance > TIES[dtype]:
                    raise TokensDiffer(
                        f"{engine.name} and {engines[0].name} gave {len(different)} of {len(answers)} requests of "
                        f"{workload.name} different tokens in {dtype}, and this is more than rounding: a token of "
                        f"{name}'s for request {i} falls short of the best one by {distance:.1%} of the logits' range, "
                        f"and {TIES[dtype]:.1%} is allowed. No time is reported for engines that do different work."
                    )
        checked[engine.name] = (1 - len(different) / len(answers), farthest)
    return checked
