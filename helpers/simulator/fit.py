"""Fit a cost model to this machine, and measure how well it predicts requests that it has not seen.

A few hundred iterations of a real engine are timed (`timing.py`). The coefficients are the non-negative ones with
the smallest relative error. With a negative coefficient, more work could take less time.

This module and `timing.py` alone need a model, torch and numpy. The other modules of the simulator read the file that
this one writes.
"""

import itertools
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..engine import EngineConfig, EngineCore
from ..hardware import cpuinfo
from ..metrics import RequestMetrics, percentile
from ..model_engine import Engine
from ..models import context_length, load_model
from .cost_model import FEATURES, CostModel
from .simulate import simulate
from .timing import Counts, add, draw_situations, recording, time_rounds, timed_step

FREE_TOKENS = (0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # those that a fit tries
TOKENS = FEATURES.index("tokens")
_CHOICES = [list(one) for size in range(1, 7) for one in itertools.combinations(range(len(FEATURES)), size)]
Measured = list[tuple[Counts, float]]  # for each iteration, the counts of its plan and its seconds


@dataclass(frozen=True)
class LiveRun:
    """What an engine did with requests that arrived in real time.

    Attributes:
        iterations: the counts and the seconds of each.
        makespan: the seconds until the last token.
        ttft: the time to first token of each request, in the order of the requests.
    """

    iterations: Measured
    makespan: float
    ttft: list[float]


@dataclass(frozen=True)
class Errors:
    """Relative errors: of the time of an iteration (median and p90), of the makespan, and of the p99 TTFT."""

    iteration: float
    iteration_p90: float
    makespan: float
    ttft_p99: float

    def __str__(self) -> str:
        iteration = _percent((self.iteration, self.iteration_p90))
        return f"{iteration} per iteration, {self.makespan:.1%} of the makespan, {self.ttft_p99:.1%} of the p99 TTFT"


def _median_and_p90(ratios: Iterable[float]) -> tuple[float, float]:
    """Return how far ratios are from 1: the median and the 90th percentile; zeros without any."""
    errors = [abs(ratio - 1) for ratio in ratios] or [0.0]
    return statistics.median(errors), percentile(errors, 90)


def _percent(errors: tuple[float, float]) -> str:
    return f"{errors[0]:.1%} in the median and {errors[1]:.1%} at p90"


def measure(engine: EngineCore, context: int, iterations: int = 300, repeats: int = 3, seed: int = 0) -> Measured:
    """Time iterations with batches of many sizes and requests of many lengths.

    Args:
        engine: made with a `recording` configuration, without requests.
        context: the most tokens of a request.
        iterations: about how many different iterations.
        repeats: how often each is timed, after one run that warms up.
        seed: of all choices.

    Returns:
        For each iteration, the counts of its plan and the median of its seconds.
    """
    config = engine.config
    situations = list(draw_situations(iterations, config.max_batch_size, config.max_tokens_per_step, context, seed))
    return [(counts, statistics.median(seconds)) for counts, seconds in time_rounds(engine, situations, repeats)]


def fit(measured: Measured) -> CostModel:
    """Return the cost model with the smallest sum of squared relative errors.

    The optimum with non-negative coefficients is the ordinary optimum over those features whose coefficients are not 0.
    There are 6 features, hence 63 sets of them: all are tried, for each number of free tokens.
    """
    counts = np.array([counts for counts, _ in measured], dtype=float)
    seconds = np.array([[seconds] for _, seconds in measured])
    best, least = None, np.inf
    for free_tokens in FREE_TOKENS:
        paid = counts.copy()
        paid[:, TOKENS] = np.maximum(0, paid[:, TOKENS] - free_tokens)
        relative = paid / seconds  # times the coefficients, this is 1 where the prediction is perfect
        scale = relative.max(0) + 1e-30
        for chosen in _CHOICES:
            product = relative[:, chosen] / scale[chosen]
            coefficients, *_ = np.linalg.lstsq(product, np.ones(len(product)))
            error = float(((product @ coefficients - 1) ** 2).sum())
            if (coefficients >= 0).all() and error < least:
                names = (FEATURES[one] for one in chosen)
                best = dict(zip(names, (coefficients / scale[chosen]).tolist(), strict=True), free_tokens=free_tokens)
                least = error
    return CostModel(**best)


def run_live(engine: EngineCore, requests: Seq[tuple[list[int], int]], arrivals: Seq[float]) -> LiveRun:
    """Run requests that arrive in real time, the first one at 0.

    Args:
        engine: made with a `recording` configuration, without requests.
        requests: prompts as token ids, and numbers of tokens to generate.
        arrivals: in seconds, in ascending order.
    """
    iterations, firsts, places = [], {}, {}
    place, start = 0, time.perf_counter()
    while place < len(requests) or engine.has_unfinished_requests():
        while place < len(requests) and arrivals[place] <= time.perf_counter() - start:
            places[add(engine, *requests[place])] = place
            place += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[place] - (time.perf_counter() - start)))
            continue
        counts, seconds, outputs = timed_step(engine)
        now = time.perf_counter() - start
        iterations.append((counts, seconds))
        for output in outputs:
            firsts.setdefault(places[output.request_id], now)
    return LiveRun(iterations, now, [firsts[place] - arrival for place, arrival in enumerate(arrivals)])


def prediction_errors(
    cost: CostModel, live: LiveRun, config: EngineConfig, requests: Seq[tuple[list[int], int]], arrivals: Seq[float]
) -> Errors:
    """Return how far the simulation of a workload is from a live run of it."""
    trace = simulate(requests, replace(config, prefix_caching=False, scheduler_cls=None), arrivals, cost)
    times = trace.token_times
    ttft = [RequestMetrics(place, arrivals[place], times[place]).ttft for place in range(len(requests))]
    return Errors(
        *_median_and_p90(cost.of(*counts) / seconds for counts, seconds in live.iterations if counts[0]),
        abs(trace.seconds / live.makespan - 1),
        abs(percentile(ttft, 99) / percentile(live.ttft, 99) - 1),
    )


def spread(one: LiveRun, other: LiveRun) -> Errors:
    """Return how far two live runs of a workload are from each other: no prediction can be expected to do better.

    Their plans differ, because a request can arrive during a different iteration. So the medians of the iterations that
    decode the same number of rows are compared.
    """
    decodes: list[dict[float, list[float]]] = [{}, {}]
    for run, by_rows in zip((one, other), decodes, strict=True):
        for counts, seconds in run.iterations:
            if counts[5] == 0:  # no prefill
                by_rows.setdefault(counts[3], []).append(seconds)
    common = [rows for rows in decodes[0] if rows in decodes[1]]
    medians = [[statistics.median(by_rows[rows]) for rows in common] for by_rows in decodes]
    return Errors(
        *_median_and_p90(left / right for left, right in zip(*medians, strict=True)),
        abs(one.makespan / other.makespan - 1),
        abs(percentile(one.ttft, 99) / percentile(other.ttft, 99) - 1),
    )


def held_out(
    cost: CostModel, config: EngineConfig, context: int, load: float, count: int, seconds: float = math.inf
) -> tuple[list, list]:
    """Return requests that the fit has not seen, and Poisson arrivals at a share of what a replica can serve.

    Args:
        cost, config: what the load refers to.
        context: the most tokens of a request.
        load: the share.
        count: the most requests.
        seconds: about how long the requests may take to arrive.
    """
    draw = random.Random(f"held out {load}")
    requests = []
    for _ in range(count):
        prompt = [draw.randint(100, 400) for _ in range(draw.randint(8, context * 2 // 5))]
        requests.append((prompt, draw.randint(8, context // 5)))
    capacity = count / simulate(requests, replace(config, prefix_caching=False), seconds=cost).seconds
    if seconds < math.inf:
        requests = requests[: max(10, int(load * capacity * seconds))]
    gaps = (draw.expovariate(load * capacity) for _ in requests[1:])
    return requests, list(itertools.accumulate(gaps, initial=0.0))


def fit_machine(
    path: str | Path,
    count: int = 300,
    name: str | None = None,
    dtype: str = "float32",
    rows: int = 16,
    tokens: int = 256,
) -> CostModel:
    """Measure a model on this machine, print how far the predictions are off, and save the cost model.

    The errors are those of iterations and of requests that the fit has not seen. Beside them stands how far two
    measurements of the same are from each other.

    Args:
        path: the file to write.
        count: the most requests of a live run. A run takes about 30 s, and has fewer requests if they take longer.
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
    engine = Engine(model, tokenizer, recording(config))
    situations = [
        *draw_situations(300, rows, tokens, context, seed=0),
        *draw_situations(100, rows, tokens, context, seed=1),  # which the fit does not see
    ]
    timed = time_rounds(engine, situations)
    cost = fit([(counts, statistics.median(seconds)) for counts, seconds in timed[:300]])
    unseen = timed[300:]
    off = _median_and_p90(cost.of(*counts) / statistics.median(seconds) for counts, seconds in unseen)
    apart = _median_and_p90(one / other for _, (one, other, *_) in unseen)
    print(f"100 other iterations: the predictions are off by {_percent(off)};")
    print(f"    two rounds differ by {_percent(apart)}.", flush=True)
    errors = {"iterations": {"prediction": off, "two rounds": apart}}
    for load in (0.5, 0.8):
        requests, arrivals = held_out(cost, config, context, load, count, seconds=30)
        runs = [run_live(engine, requests, arrivals) for _ in range(2)]
        predicted = prediction_errors(cost, runs[0], config, requests, arrivals)
        apart = spread(*runs)
        print(f"{len(requests)} other requests at {load:.0%} load: the prediction is off by {predicted};")
        print(f"    two live runs differ by {apart}.", flush=True)
        errors[f"{load:.0%} load"] = {"prediction": asdict(predicted), "two live runs": asdict(apart)}
    about = {
        "machine": f"{cpuinfo().get('model name', platform.processor() or platform.machine())}, {os.cpu_count()} cores",
        "model": f"{name or 'the embedded model'} in {dtype}",
        "source": "measured",
        "rows": rows,
        "tokens per iteration": tokens,
        "errors": errors,
    }
    cost = replace(cost, about=about)
    cost.save(path)
    return cost
