"""Fit a cost model to this machine, and measure how well it predicts requests that it has not seen.

A few hundred iterations of a real engine are timed, with one row to all rows, and with short and long prompts and
contexts. The plans are the same in each repeat, so the median of the repeats is the time of a plan. The weights are the
non-negative ones with the smallest relative error. With a negative weight, more work could take less time.

This module alone needs a model, torch and numpy. The other modules of the simulator read the file that it writes.
"""

import itertools
import os
import platform
import random
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ..engine import EngineConfig, EngineCore, Plan, SamplingParams, Scheduler
from ..hardware import cpuinfo
from ..metrics import RequestMetrics, percentile
from ..model_engine import Engine
from ..models import context_length, load_model
from .cost_model import FEATURES, CostModel, features
from .simulate import simulate

Measured = list[tuple[tuple[float, ...], float]]  # for each iteration, the counts of its plan and its seconds


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
    """Relative errors: of an iteration's time (the median), of the makespan, and of the p99 TTFT."""

    iteration: float
    makespan: float
    ttft_p99: float

    def __str__(self) -> str:
        return (
            f"{self.iteration:.1%} per iteration in the median, {self.makespan:.1%} of the makespan, "
            f"{self.ttft_p99:.1%} of the p99 TTFT"
        )


class _Recording(Scheduler):
    """The engine's scheduler, which keeps its last plan."""

    plan: Plan

    def schedule(self) -> Plan:
        self.plan = super().schedule()
        return self.plan


def recording(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose engine can be timed: it keeps its plans, and no prompt finds cached blocks."""
    return replace(config, scheduler_cls=_Recording, prefix_caching=False, speculative=None, trace_length=1)


def timed_step(engine: EngineCore) -> tuple[tuple[float, ...], float, list]:
    """Run an iteration; return the counts of its plan, its seconds and its outputs."""
    start = time.perf_counter()
    outputs = engine.step()
    seconds = time.perf_counter() - start
    return features(engine.scheduler.plan), seconds, outputs


def measure(engine: EngineCore, context: int, iterations: int = 300, repeats: int = 3, seed: int = 0) -> Measured:
    """Time iterations with batches of many sizes and requests of many lengths.

    Args:
        engine: made with a `recording` configuration, without requests.
        context: the most tokens of a request.
        iterations: about how many different iterations.
        repeats: how often each is timed, after one run that warms up.
        seed: of lengths and token ids.

    Returns:
        For each iteration, the counts of its plan and the median of its seconds.
    """
    rows = engine.config.max_batch_size
    sizes = sorted({1, 2, max(1, rows // 4), max(1, rows // 2), rows})
    runs: list[list] = [[] for _ in range(repeats)]
    for repeat, size in itertools.product(range(-1, repeats), sizes):
        draw = random.Random(f"{seed} {size}")
        left = iterations // len(sizes)
        while left > 0:
            while engine.num_running + engine.num_waiting < size:
                prompt = draw.randint(1, max(1, draw.choice([context // 8, context * 3 // 4])))
                output = draw.randint(2, max(2, min(context - prompt, 40)))
                _add(engine, [draw.randint(100, 400) for _ in range(prompt)], output)
            counts, seconds, _ = timed_step(engine)
            left -= 1
            if repeat >= 0:
                runs[repeat].append((counts, seconds))
        for request_id in list(engine.scheduler.requests):
            engine.abort_request(request_id)
        engine.step()
    return [(one[0][0], statistics.median(seconds for _, seconds in one)) for one in zip(*runs, strict=True)]


def _add(engine: EngineCore, prompt: list[int], output_tokens: int) -> int:
    return engine.add_request(prompt, SamplingParams(output_tokens, ignore_eos=True))


def fit(measured: Measured) -> CostModel:
    """Return the cost model with the smallest sum of squared relative errors.

    The optimum with non-negative weights is the ordinary optimum over those features whose weights are not 0. There are
    6 features, hence 63 sets of them: all are tried.
    """
    counts = np.array([counts for counts, _ in measured], dtype=float)
    seconds = np.array([seconds for _, seconds in measured])
    relative = counts / seconds[:, None]  # a product of 1 is a perfect prediction
    best, best_error = None, np.inf
    for size in range(1, len(FEATURES) + 1):
        for chosen in map(list, itertools.combinations(range(len(FEATURES)), size)):
            weights, *_ = np.linalg.lstsq(
                relative[:, chosen] / (scale := relative[:, chosen].max(0) + 1e-30), 1 + 0 * seconds
            )
            error = float(((relative[:, chosen] / scale @ weights - 1) ** 2).sum())
            if (weights >= 0).all() and error < best_error:
                best, best_error = (
                    dict(zip((FEATURES[one] for one in chosen), (weights / scale).tolist(), strict=True)),
                    error,
                )
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
            places[_add(engine, *requests[place])] = place
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
    ratios = [abs(cost.of(*counts) / seconds - 1) for counts, seconds in live.iterations if counts[0]]
    return Errors(
        statistics.median(ratios),
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
    ratios = [abs(left / right - 1) for left, right in zip(*medians, strict=True)]
    return Errors(
        statistics.median(ratios or [0.0]),
        abs(one.makespan / other.makespan - 1),
        abs(percentile(one.ttft, 99) / percentile(other.ttft, 99) - 1),
    )


def held_out(cost: CostModel, config: EngineConfig, context: int, load: float, count: int) -> tuple[list, list]:
    """Return requests that the fit has not seen, and Poisson arrivals at a share of what a replica can serve."""
    draw = random.Random(f"held out {load}")
    requests = []
    for _ in range(count):
        prompt = [draw.randint(100, 400) for _ in range(draw.randint(8, context * 2 // 5))]
        requests.append((prompt, draw.randint(8, context // 5)))
    capacity = count / simulate(requests, replace(config, prefix_caching=False), seconds=cost).seconds
    gaps = (draw.expovariate(load * capacity) for _ in range(count - 1))
    return requests, list(itertools.accumulate(gaps, initial=0.0))


def fit_machine(path: str | Path, count: int = 300, name: str | None = None) -> CostModel:
    """Measure a model on this machine, print the errors on requests that the fit has not seen, and save the cost model.

    Args:
        path: the file to write.
        count: how many requests the errors are measured with, at each load.
        name: the model, as for `load_model`; the embedded one if omitted.
    """
    Path(path).touch()  # fail now rather than after the measurement
    config = EngineConfig(max_batch_size=16, max_tokens_per_step=256)
    model, tokenizer = load_model(name) if name else load_model()
    context = min(context_length(model) or 2048, 2048)
    engine = Engine(model, tokenizer, recording(config))
    measured = measure(engine, context)
    cost = fit(measured)
    ratios = [abs(cost.of(*counts) / seconds - 1) for counts, seconds in measured]
    print(f"{len(measured)} iterations measured; the fit is off by {statistics.median(ratios):.1%} in the median.")
    errors = {}
    for load in (0.5, 0.8):
        requests, arrivals = held_out(cost, config, context, load, count)
        runs = [run_live(engine, requests, arrivals) for _ in range(2)]
        predicted = prediction_errors(cost, runs[0], config, requests, arrivals)
        apart = spread(*runs)
        print(f"{len(requests)} other requests at {load:.0%} load: off by {predicted};")
        print(f"    two live runs differ by {apart}.")
        errors[f"{load:.0%} load"] = {"prediction": asdict(predicted), "two live runs": asdict(apart)}
    about = {
        "machine": f"{cpuinfo().get('model name', platform.processor() or platform.machine())}, {os.cpu_count()} cores",
        "model": name or "the embedded model",
        "source": "measured",
        "rows": config.max_batch_size,
        "tokens per iteration": config.max_tokens_per_step,
        "errors": errors,
    }
    cost = replace(cost, about=about)
    cost.save(path)
    return cost
