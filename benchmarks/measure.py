"""Run the same requests on all engines: first compare their tokens, then take turns and measure the time.

The claim: no time is measured for engines whose tokens differ by more than rounding. Rounding decides near ties, rarely
in float32 and often in bfloat16. So where two engines differ, the plain model computes the logits of both outputs in
float32. Every token must have the best logit or nearly the best. The report says which share of the requests has
exactly the first engine's tokens, and how far the others' tokens are from the best.

An engine that rounds weights and inputs to integers runs another model. So `helpers.integer_reference` computes the
logits of all of its outputs.
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

from helpers import integer_reference, load_model
from helpers.hardware import memory_bandwidth

from .engines import BenchEngine
from .other_programs import OtherPrograms, Watch
from .workloads import TokenRequest, Workload

# A near tie: a token falls short of the best one by at most this share of the logits' range. With random weights, the
# second best token falls short by 0.025 on average, and an arbitrary one by 0.5. The most seen in bfloat16 is 0.0064.
MAX_SHORTFALL = MappingProxyType({"float32": 0.001, "bfloat16": 0.02})

Shortfall = Callable[[TokenRequest, list[int]], float]


class TokensDiffer(RuntimeError):
    """Two engines gave different tokens for the same requests and model, and rounding does not explain it."""


@dataclass
class Measurement:
    """What an engine did with a workload.

    Attributes:
        engine, ours: its name, and whether it is the course's.
        workload, dtype, rows, requests, prompt_tokens, output_tokens: what it ran.
        identical: the share of requests with exactly the reference's tokens; None if tokens are random.
        shortfall: the largest shortfall of a token in the other requests; see `make_shortfall`.
        seconds: one time per repeat.
        bandwidth: the bytes per second at which memory was read right before and right after all engines' repeats.
        other_programs: what else ran on this machine during the repeats.
        rounds: whether the engine read integers instead of the model's weights.
    """

    engine: str
    ours: bool
    workload: str
    dtype: str
    rows: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    identical: float | None
    shortfall: float
    seconds: list[float]
    bandwidth: tuple[float, float]
    other_programs: OtherPrograms
    rounds: bool = False


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
    """Load the engines, compare their tokens with the first one's, and time them in turns.

    Args:
        engines: the first one is the reference.
        workload, folder, dtype: what they run, and on which model.
        repeats: how often each engine is timed.
        bar: a progress bar, advanced `count_runs` times in all.
        settle: seconds to wait before each timed run; the threads of the previous engine spin for a while.
        shortfall: how far an output is from greedy decoding; if left out, computed with the model in `folder`, or with
            its integer reference for an engine that rounds.

    Raises:
        TokensDiffer: an engine's tokens are neither the first one's nor nearly tied with the best ones.
    """
    engines = list(engines)
    bar = tqdm(disable=True) if bar is None else bar
    loaded = []
    try:
        for engine in engines:
            loaded.append(engine)
            engine.load(folder, dtype, workload.rows)
        shortfalls = {rounds: shortfall or make_shortfall(folder, rounds) for rounds in (False, True)}
        checked = _compare_tokens(engines, workload, dtype, bar, shortfalls)
        seconds = {engine.name: [] for engine in engines}
        watch, bandwidth_before = Watch(), memory_bandwidth()
        for repeat in range(repeats):
            # The order rotates, so no engine always runs right after the one that heats up the processor most.
            shift = repeat % len(engines)
            for engine in engines[shift:] + engines[:shift]:
                bar.set_description(f"{workload.name} {dtype}, repeat {repeat + 1}: {engine.name}")
                gc.collect()
                time.sleep(settle)
                start = time.perf_counter()
                engine.run(workload.requests)
                seconds[engine.name].append(time.perf_counter() - start)
                bar.update()
        bandwidth, others = (bandwidth_before, memory_bandwidth()), watch.stop()
    finally:
        for engine in loaded:
            engine.close()
    return [
        Measurement(
            engine.name, engine.ours, workload.name, dtype, workload.rows, len(workload.requests),
            workload.prompt_tokens, workload.output_tokens, *checked[engine.name], seconds[engine.name], bandwidth,
            others, engine.rounds,
        )
        for engine in engines
    ]  # fmt: skip


def count_runs(engines: Sequence[BenchEngine], repeats: int) -> int:
    """Return how many runs `measure` makes: one per engine to compare tokens, and one per engine and repeat."""
    return len(engines) * (repeats + 1)


def make_shortfall(folder: Path, rounds: bool = False) -> Shortfall:
    """Return a function that says how far an output is from greedy decoding with the model in `folder`, in float32.

    Args:
        folder: the model's.
        rounds: compute with the model's integer reference instead.

    A token's shortfall is the distance of its logit from the best one, as a share of the range of the logits at that
    position. The function returns the largest shortfall of an output's tokens, from one forward pass over prompt and
    output; it is 0 for the tokens of greedy decoding.
    """

    @cache  # loaded on first use: most runs never need it
    def plain() -> torch.nn.Module:
        model, _ = load_model(folder, dtype=torch.float32)
        return integer_reference(model) if rounds else model

    def shortfall(request: TokenRequest, output: list[int]) -> float:
        ids = torch.tensor([request.prompt + output[:-1]], device=plain().device)
        with torch.inference_mode():
            logits = plain()(ids, logits_to_keep=len(output), use_cache=False).logits[0]
        chosen = logits[torch.arange(len(output)), output]
        best, worst = logits.amax(dim=-1), logits.amin(dim=-1)
        return float(((best - chosen) / (best - worst)).max())

    return shortfall


def _compare_tokens(
    engines: Sequence[BenchEngine], workload: Workload, dtype: str, bar: tqdm, shortfalls: dict[bool, Shortfall]
) -> dict[str, tuple[float | None, float]]:
    """Return for each engine the share of requests with the first one's tokens, and the shortfall of all others.

    This run also warms the engine up. Of random tokens, only the number is checked.
    """
    checked, reference = {}, None
    for engine in engines:
        bar.set_description(f"{workload.name} {dtype}, tokens: {engine.name}")
        outputs = engine.run(workload.requests)
        bar.update()
        lengths = [len(output) for output in outputs]
        if lengths != [request.max_tokens for request in workload.requests]:
            raise TokensDiffer(
                f"{engine.name} did not generate as many tokens as requested ({workload.name}, {dtype})."
            )
        if workload.is_sampled:
            checked[engine.name] = (None, 0.0)
            continue
        reference = reference or outputs
        different = [i for i, (expected, got) in enumerate(zip(reference, outputs, strict=True)) if expected != got]
        compared = {engine.name: outputs} if engine.rounds else {engine.name: outputs, engines[0].name: reference}
        largest = 0.0
        for i in range(len(outputs)) if engine.rounds else different:
            for name, all_outputs in compared.items():
                distance = shortfalls[engine.rounds](workload.requests[i], all_outputs[i])
                largest = max(largest, distance)
                if distance > MAX_SHORTFALL[dtype]:
                    differ = (
                        f"{engine.name} did not give the tokens of its integer reference for {workload.name} in {dtype}"
                        if engine.rounds
                        else f"{engine.name} and {engines[0].name} gave different tokens for {len(different)} of "
                        f"{len(outputs)} requests of {workload.name} in {dtype}, by more than rounding"
                    )
                    raise TokensDiffer(
                        f"{differ}: a token of {name} for request {i} falls short of the best one by {distance:.1%} of "
                        f"the logits' range, and {MAX_SHORTFALL[dtype]:.1%} is allowed. No time is reported for "
                        f"engines that do different work."
                    )
        checked[engine.name] = (1 - len(different) / len(outputs), largest)
    return checked
