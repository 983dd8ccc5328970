"""The codelab: a student's `schedule()` decides before every iteration which requests join, and its cost is the score.

The course's engine runs the requests on the embedded model, as lesson 3's loop would: prefills and decodes take turns,
each a forward pass of its own. Latency is counted in forward passes, which are the same on every machine.
"""

import math
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace

from .. import metrics, workloads
from ..engine import EngineConfig, Plan, SamplingParams, Scheduler, Sequence
from ..model_engine import Engine
from ..request import Request
from ..trace import Trace
from .calling import answer
from .comparing import kind, show_in_notebook
from .examining import examine
from .exercise import JudgedExercise, Wrong

ROWS = 8
SIGNATURE = "schedule(waiting, running, free_rows)"
WORKLOADS = {
    "race": "32 requests at once, max_tokens 100 for every eighth, 10 for the others",
    "mixed": "24 requests at once, max_tokens 96 for all, but most outputs end with EOS",
    "arriving": "32 requests with unequal max_tokens, one every two forward passes",
}


@dataclass(frozen=True)
class ServerRequest:
    """What a scheduler knows about a request. The length of its output is not known.

    Attributes:
        request_id: its name.
        prompt_tokens: the number of tokens that its prefill computes.
        max_tokens: the most tokens to generate; EOS may come sooner.
        arrived: the forward pass before which it arrived.
        generated: the number of tokens generated so far; 0 while it waits.
    """

    request_id: Hashable
    prompt_tokens: int
    max_tokens: int
    arrived: int = 0
    generated: int = 0


# --- a schedule drives the engine -----------------------------------------------------------------------------------


class _ScheduledBy(Scheduler):
    """A scheduler that asks a schedule which requests join, before every iteration that may be a prefill."""

    def __init__(self, schedule: Callable, view: Callable[[Sequence], ServerRequest], *args):
        super().__init__(*args)
        self._schedule, self._view = schedule, view

    def _admit(self, plan: Plan) -> None:
        waiting, running = list(self.waiting), [self._view(sequence) for sequence in self.running]
        if not waiting and not running:
            return
        views = [self._view(sequence) for sequence in waiting]
        joining = decide(self._schedule, views, running, self.max_rows - len(running))
        order = [waiting[views.index(view)] for view in joining]
        self.policy = SimpleNamespace(order=lambda waiting, running: order)
        super()._admit(plan)


def run_schedule(schedule: Callable, requests: Seq[Request], arrivals: Seq[int], rows: int = ROWS) -> Trace:
    """Run requests as a schedule decides; the trace's clock counts forward passes.

    Args:
        schedule: a student's function, or a baseline.
        requests: with request ids, in order of arrival.
        arrivals: for each request, the forward pass before which it arrives.
        rows: the most requests that can run at once.

    Returns:
        The trace, in which requests are numbered from 0.

    Raises:
        Wrong: the schedule's decision is impossible.
    """

    def view(sequence: Sequence) -> ServerRequest:
        name, arrived = requests[sequence.request_id].request_id, arrivals[sequence.request_id]
        return ServerRequest(name, sequence.prompt_tokens, sequence.max_tokens, arrived, sequence.generated)

    engine = Engine(
        config=EngineConfig(
            max_batch_size=rows,
            max_tokens_per_step=10**9,  # joining prompts share a prefill, however long they are
            mixed_batches=False,
            chunked_prefill=False,
            execution="padded",
            kernels=False,  # a check compiles nothing
            scheduler_cls=partial(_ScheduledBy, schedule, view),
        )
    )
    params = [SamplingParams(request.max_tokens) for request in requests]
    engine.generate([request.prompt for request in requests], params, list(arrivals))
    # Every step lasts one forward pass, also without requests: a step's number is its time.
    trace = Trace(rows)
    trace.passes = [replace(forward_pass, start=forward_pass.step, seconds=1) for forward_pass in engine.trace.passes]
    return trace


def decide(schedule: Callable, waiting: list, running: list, free_rows: int) -> list[ServerRequest]:
    """Return which requests join, as the schedule decides. It receives copies of the lists, which it may change.

    Raises:
        Wrong: it is not a list of waiting requests, has more requests than free rows, or is empty although none runs.
    """

    def refuse(words: str) -> None:
        case = f"{len(waiting)} waiting, {len(running)} running, {free_rows} free rows"
        raise Wrong(f"{words} (given: {case}).") from None

    try:
        joining = schedule(list(waiting), list(running), free_rows)
    except Wrong as wrong:  # it has raised an error
        refuse(str(wrong).rstrip("."))
    if not isinstance(joining, list | tuple):
        refuse(f"should return a list of waiting requests, empty if none joins, but returned {kind(joining)}")
    for index, request in enumerate(joining):
        if not isinstance(request, ServerRequest):
            refuse(f"should return waiting requests as they are, but returned {kind(request)}")
        if request not in waiting:
            refuse(f"lets request {request.request_id} join, which is not waiting")
        if request in joining[:index]:
            refuse(f"lets request {request.request_id} join twice: a request has one row")
    if len(joining) > free_rows:
        refuse(f"lets {len(joining)} requests join: every running request holds a row, and there is memory for no more")
    if waiting and not running and not joining:
        refuse("lets no request join although none is running: the server would wait forever")
    return list(joining)


# --- the score ------------------------------------------------------------------------------------------------------


def static(waiting: list, running: list, free_rows: int) -> list:
    """Static batching as a schedule: no request joins until the whole batch has finished."""
    return [] if running else waiting[:free_rows]


def first_come(waiting: list, running: list, free_rows: int) -> list:
    """Continuous batching, first come, first served."""
    return waiting[:free_rows]


BASELINES = {"static": static, "first come, first served": first_come}


@cache
def workload(name: str) -> tuple[list[Request], list[int]]:
    """Return a workload's requests, and the forward passes before which they arrive."""
    if name == "race":
        return workloads.race(), [0] * 32
    if name == "mixed":
        return workloads.mixed(24, max_tokens=96), [0] * 24
    return workloads.budgets(32), [2 * number for number in range(32)]


@cache
def baseline(policy: str, name: str) -> Trace:
    """Return the trace of a baseline on a workload."""
    return run_schedule(BASELINES[policy], *workload(name))


def measure(trace: Trace, arrivals: Seq[int]) -> dict[str, float]:
    """Return the forward passes, two shares of the slot-steps, and the 95th percentile of latency in passes.

    The shares: slot-steps that yield a token ("useful_share"), and rows left free while requests wait ("left_free").
    """
    times = trace.token_times
    left_free = 0
    for forward_pass in trace.passes:
        waiting = sum(arrivals[number] <= forward_pass.start < came[0] - 1 for number, came in times.items())
        left_free += min(waiting, sum(row.work == "empty" for row in forward_pass.row_steps))
    latencies = [request.e2e for request in metrics.request_metrics(trace, dict(enumerate(arrivals)))]
    return {
        "forward_passes": trace.forward_passes,
        "useful_share": 1 - trace.wasted_slot_steps / trace.slot_steps,
        "left_free": left_free / trace.slot_steps,
        "p95_latency": metrics.percentile(latencies, 95),
    }


def floor(trace: Trace) -> int:
    """Return a bound on the forward passes of any schedule: all rows always full, or the longest output alone."""
    return max(math.ceil(trace.output_tokens / trace.rows), *map(len, trace.token_times.values()))


def score_schedule(schedule: Callable) -> dict:
    """Run a schedule on three workloads and print its cost beside two baselines and the floor.

    In a notebook, also draw the race's slot timeline.

    Args:
        schedule: `schedule(waiting, running, free_rows)` returns the waiting requests that join now.

    Returns:
        For each workload a dict from policy ("static", "first come, first served", "yours") to what `measure` returns,
        and "floor" for the least number of forward passes. Empty if the schedule fails; a message then says why.
    """
    traces = {}

    def run(function: Callable, seed: int) -> None:
        for name in WORKLOADS:
            traces[name] = {policy: baseline(policy, name) for policy in BASELINES}
            traces[name]["yours"] = run_schedule(function, *workload(name))

    possible = JudgedExercise(SIGNATURE, "all decisions are possible", run)
    verdict = examine(possible, lambda question: answer(question, schedule))
    if not verdict.passed:
        print(f"schedule: {verdict.message}")
        return {}
    scores = {}
    for name, by_policy in traces.items():
        scores[name] = {policy: measure(trace, workload(name)[1]) for policy, trace in by_policy.items()}
        scores[name]["floor"] = floor(by_policy["yours"])
    print(_table(scores))
    show_in_notebook(lambda plots: plots.slot_timeline(traces["race"]))
    return scores


def _table(scores: dict) -> str:
    lines = []
    for name, score in scores.items():
        lines += [f"{name}: {WORKLOADS[name]}, {ROWS} rows"]
        lines += [f"  {'':26s}{'forward passes':>16s}{'useful':>9s}{'left free':>11s}{'p95 latency':>13s}"]
        for policy in (*BASELINES, "yours"):
            measures = score[policy]
            shares = f"{measures['useful_share']:9.0%}{measures['left_free']:11.1%}"
            lines += [f"  {policy:26s}{measures['forward_passes']:16d}{shares}{measures['p95_latency']:13.0f}"]
        lines += [f"  {'floor':26s}{score['floor']:16d}", ""]
    lines += ["Useful: slot-steps that yield a token. Left free: rows without a request while requests wait."]
    return "\n".join([*lines, "Latency is counted in forward passes, waiting included."])
