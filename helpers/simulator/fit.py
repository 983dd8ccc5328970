"""Fit a cost model to this machine, and measure how well it predicts requests that it has not seen.

A real engine runs requests of all lengths in real time, first with many of them waiting, then at a rate that rises from
almost nothing to more than the engine can serve (`measure`). So its iterations have few rows and many, short contexts
and long ones, prompts and none. The coefficients are the non-negative ones with the smallest relative errors. With a
negative coefficient, more work could take less time.

Iterations are timed as they follow each other, because what the one before left in the processor's caches decides how
long an iteration takes.

This module alone needs a model, torch and numpy. The other modules of the simulator read the file that it writes.
"""

import itertools
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..engine import EngineConfig, EngineCore, Plan, SamplingParams, Scheduler
from ..hardware import cpuinfo
from ..metrics import RequestMetrics, percentile
from ..model_engine import Engine
from ..models import context_length, load_model
from .cost_model import FEATURES, CostModel, features
from .simulate import simulate

FREE_TOKENS = (0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # those that a fit tries
TOKENS = FEATURES.index("tokens")
PEAK = 1.5  # times what the engine can serve: the highest rate of arrivals while it is measured
ROUNDS = 20  # of a fit, until it hardly changes
_CHOICES = [list(chosen) for size in range(1, 7) for chosen in itertools.combinations(range(len(FEATURES)), size)]
Counts = tuple[float, ...]  # of a plan, in the order of FEATURES
Measured = list[tuple[Counts, float]]  # for each iteration, the counts of its plan and its seconds
Requests = Seq[tuple[list[int], int]]  # prompts as token ids, and numbers of tokens to generate


class _Recording(Scheduler):
    """The engine's scheduler, which keeps its last plan."""

    plan: Plan

    def schedule(self) -> Plan:
        self.plan = super().schedule()
        return self.plan


def timing_config(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose engine can be timed: it keeps its last plan, and no prompt finds cached blocks."""
    return replace(config, scheduler_cls=_Recording, prefix_caching=False, speculative=None, trace_length=1)


@dataclass(frozen=True)
class LiveRun:
    """What an engine did with requests that arrived in real time.

    Attributes:
        iterations: the counts and the seconds of each, from the end of the one before, or from the end of a pause.
        makespan: the seconds until the last token.
        ttft: the time to first token of each request, in the order of the requests.
    """

    iterations: Measured
    makespan: float
    ttft: list[float]


def run_live(engine: EngineCore, requests: Requests, arrivals: Seq[float]) -> LiveRun:
    """Run requests that arrive in real time, the first one at 0.

    Args:
        engine: made with a `timing_config`, without requests.
        requests: prompts as token ids, and numbers of tokens to generate.
        arrivals: in seconds, in ascending order.
    """
    iterations, firsts, index_of = [], {}, {}
    next_index, start = 0, time.perf_counter()
    end = 0.0  # of the iteration or the pause before
    while next_index < len(requests) or engine.has_unfinished_requests():
        while next_index < len(requests) and arrivals[next_index] <= time.perf_counter() - start:
            prompt, output_tokens = requests[next_index]
            index_of[engine.add_request(prompt, SamplingParams(output_tokens, ignore_eos=True))] = next_index
            next_index += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[next_index] - (time.perf_counter() - start)))
            end = time.perf_counter() - start
            continue
        outputs = engine.step()
        begin, end = end, time.perf_counter() - start
        iterations.append((features(engine.scheduler.plan), end - begin))
        for output in outputs:
            firsts.setdefault(index_of[output.request_id], end)
    return LiveRun(iterations, end, [firsts[index] - arrival for index, arrival in enumerate(arrivals)])


def measure(engine: EngineCore, context: int, count: int = 100, seed: int = 0) -> Measured:
    """Time the iterations of requests of all lengths, at all loads.

    The requests run twice. First, all of them wait from the beginning, and those with similar prompts are neighbors: so
    all rows have short contexts at first, and long ones at last. Then they arrive at random, at a rising rate.

    Args:
        engine: made with a `timing_config`, without requests.
        context: the most tokens of a request.
        count: how many requests.
        seed: of all choices.

    Returns:
        For each iteration, the counts of its plan and its seconds.
    """
    draw = random.Random(seed)
    requests = _draw_requests(draw, count, longest_prompt=context * 3 // 4, longest_output=context // 5)
    run_live(engine, requests[:10], [0.0] * min(10, count))  # warms up
    by_prompt = sorted(requests, key=lambda request: len(request[0]))
    waiting = run_live(engine, by_prompt, [0.0] * count)
    seconds = 2 / PEAK * waiting.makespan  # the rate rises from 0, so its mean is half of its peak
    arrivals = sorted(seconds * math.sqrt(draw.random()) for _ in requests)
    rising = run_live(engine, requests, [arrival - arrivals[0] for arrival in arrivals])
    return [*waiting.iterations, *rising.iterations]


def _draw_requests(draw: random.Random, count: int, longest_prompt: int, longest_output: int) -> Requests:
    """Return requests with random tokens and with short lengths as well as long ones: the logarithms are uniform."""
    return [
        (
            draw.choices(range(100, 400), k=round(longest_prompt ** draw.random())),
            round(longest_output ** draw.random()),
        )
        for _ in range(count)
    ]


def fit(measured: Measured) -> CostModel:
    """Return the cost model whose relative errors have the smallest sum, each without its sign.

    So for iterations with equal counts, the prediction is their median: those that another program slowed down hardly
    change it. That requires errors relative to the prediction. Relative to the measured seconds, a long iteration would
    count less than a short one, and the predictions would be too fast.

    The optimum is found by squares. Each has a weight: the inverse of the error in the round before.
    """
    counts = np.array([counts for counts, _ in measured], dtype=float)
    seconds = np.array([seconds for _, seconds in measured])
    weights = np.ones(len(seconds))
    for _ in range(ROUNDS):
        cost = _least_squares(counts, seconds, weights)
        predicted = np.array([cost.seconds_for(*row) for row in counts])
        ratios = seconds / np.maximum(predicted, seconds / 10)  # a prediction may be 0
        weights = ratios**2 / np.maximum(np.abs(ratios - 1), 0.01)  # without the 0.01, one iteration could count alone
    return cost


def _least_squares(counts: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> CostModel:
    """Return the cost model with the smallest weighted sum of squared relative errors.

    The optimum with non-negative coefficients is the ordinary optimum over those features whose coefficients are not 0.
    There are 6 features, hence 63 sets of them: all are tried, for each number of free tokens.
    """
    best, least = {}, np.inf
    for free_tokens in FREE_TOKENS:
        paid = counts.copy()
        paid[:, TOKENS] = np.maximum(0, paid[:, TOKENS] - free_tokens)
        counted = paid.any(0)
        relative = paid / seconds[:, None]  # times the coefficients, this is 1 where the prediction is perfect
        scale = relative.max(0) + 1e-30
        system = np.column_stack([relative / scale, np.ones(len(seconds))]) * np.sqrt(weights)[:, None]
        system = np.linalg.qr(system, mode="r")  # 7 equations with the same optima
        for chosen in _CHOICES:
            if not counted[chosen].all():  # rounding alone would decide the coefficient of a count that is always 0
                continue
            coefficients, *_ = np.linalg.lstsq(system[:, chosen], system[:, -1])
            error = float(((system[:, chosen] @ coefficients - system[:, -1]) ** 2).sum())
            if (coefficients >= 0).all() and error < least:
                names = (FEATURES[index] for index in chosen)
                best = dict(zip(names, (coefficients / scale[chosen]).tolist(), strict=True), free_tokens=free_tokens)
                least = error
    return CostModel(**best)


@dataclass(frozen=True)
class Errors:
    """How far a prediction is from a live run, as relative errors.

    Attributes:
        iteration: the median over all iterations.
        makespan: of the seconds until the last token.
        ttft_p99: of the 99th percentile of the TTFT.
    """

    iteration: float
    makespan: float
    ttft_p99: float

    def __str__(self) -> str:
        return (
            f"{self.iteration:.1%} per iteration, {self.makespan:.1%} of the makespan, {self.ttft_p99:.1%} of the p99 "
            f"TTFT"
        )


def prediction_errors(
    cost: CostModel, live: LiveRun, config: EngineConfig, requests: Requests, arrivals: Seq[float]
) -> Errors:
    """Return how far the simulation of a workload is from a live run of it."""
    trace = simulate(requests, replace(config, prefix_caching=False, scheduler_cls=None), arrivals, cost)
    times = trace.token_times
    ttft = [RequestMetrics(index, arrivals[index], times[index]).ttft for index in range(len(requests))]
    return Errors(
        statistics.median(abs(cost.seconds_for(*counts) / seconds - 1) for counts, seconds in live.iterations),
        abs(trace.seconds / live.makespan - 1),
        abs(percentile(ttft, 99) / percentile(live.ttft, 99) - 1),
    )


def held_out(
    cost: CostModel, config: EngineConfig, context: int, load: float, count: int, seconds: float = math.inf
) -> tuple[Requests, list[float]]:
    """Return requests that the fit has not seen, and Poisson arrivals at a share of what a replica can serve.

    Args:
        cost, config: what the load refers to.
        context: the most tokens of a request.
        load: the share.
        count: the most requests.
        seconds: about how long the requests may take to arrive.
    """
    draw, prompt, output = random.Random(f"held out {load}"), min(200, context * 2 // 5), min(100, context // 5)
    requests = [
        (draw.choices(range(100, 400), k=draw.randint(min(8, prompt), prompt)), draw.randint(min(8, output), output))
        for _ in range(count)
    ]
    capacity = count / simulate(requests, replace(config, prefix_caching=False), seconds=cost).seconds
    if seconds < math.inf:
        requests = requests[: max(10, int(load * capacity * seconds))]
    gaps = (draw.expovariate(load * capacity) for _ in requests[1:])
    return requests, list(itertools.accumulate(gaps, initial=0.0))


def fit_machine(
    path: str | Path,
    count: int = 3000,
    name: str | None = None,
    dtype: str = "float32",
    rows: int = 16,
    tokens: int = 256,
) -> CostModel:
    """Measure a model on this machine, print how far the predictions are off, and save the cost model.

    The errors are those of requests that the fit has not seen, at 50% and 80% load.

    Args:
        path: the file to write.
        count: the most requests of a live run. A run takes about a minute, and has fewer requests if they take longer.
        name: the model, as for `load_model`; the embedded one if omitted.
        dtype: the precision of the weights and of the computation.
        rows, tokens: the engine's rows, and its tokens per iteration.

    Raises:
        OSError: the file cannot be written.
        ValueError: see `load_model` and `EngineConfig`.
    """
    Path(path).touch()  # fail now rather than after the measurement
    config = EngineConfig(max_batch_size=rows, max_tokens_per_step=tokens)
    model, tokenizer = load_model(name, dtype=getattr(torch, dtype))
    context = min(context_length(model) or 2048, 2048)
    engine = Engine(model, tokenizer, timing_config(config))
    measured = [iteration for seed in range(2) for iteration in measure(engine, context, min(count, 200), seed)]
    print(f"{len(measured)} iterations measured for the fit", flush=True)
    cost, errors = fit(measured), {}
    for load in (0.5, 0.8):
        workload = held_out(cost, config, context, load, count, seconds=60)
        off = prediction_errors(cost, run_live(engine, *workload), config, *workload)
        print(f"{len(workload[0])} other requests at {load:.0%} load: the prediction is off by {off}.")
        errors[f"{load:.0%} load"] = asdict(off)
    about = {
        "machine": f"{cpuinfo().get('model name', platform.processor() or platform.machine())}, {os.cpu_count()} cores",
        "model": f"{name or 'the embedded model'} in {dtype}",
        "source": "measured",
        "rows": rows,
        "tokens per iteration": tokens,
        "errors": errors,
    }
    decoder = model.config.get_text_config()
    sums, sum_bytes = 2 * decoder.num_hidden_layers + 1, float(decoder.hidden_size * model.dtype.itemsize)
    cost = replace(cost, sums=sums, sum_bytes=sum_bytes, about=about)
    cost.save(path)
    return cost
