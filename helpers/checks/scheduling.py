"""The codelab: a student's `schedule()` decides before every iteration which requests join, and is scored on the cost.

The course's engine runs the requests on the embedded model, as lesson 3's loop would: prefills and decodes take turns,
each a forward pass of its own. Latency is counted in forward passes, which are the same on every machine.
"""

import math
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, partial

from .. import metrics, workloads
from ..engine import EngineConfig, Plan, SamplingParams, Sequence
from ..model_engine import Engine
from ..request import Request
from ..trace import Trace
from .attempt import Attempt
from .differences import Wrong, in_notebook, kind
from .student_scheduler import StudentScheduler

ROWS = 8
SIGNATURE = "schedule(waiting, running, free_rows)"


@dataclass(frozen=True)
class ServerRequest:
    """What a scheduler knows of a request. The length of its output is not known.

    Attributes:
        request_id: its name.
        prompt_tokens: how many tokens its prefill computes.
        max_tokens: at most so many tokens will be generated, fewer if EOS comes.
        arrived: the forward pass before which it arrived.
        generated: how many tokens it has so far; 0 while it waits.
    """

    request_id: Hashable
    prompt_tokens: int
    max_tokens: int
    arrived: int = 0
    generated: int = 0


# --- a schedule drives the engine ---------------------------------------------------------------------------------


class _ScheduledBy(StudentScheduler):
    """A scheduler that asks a schedule which requests join, before every iteration that may be a prefill.

    Args:
        schedule: what a student wrote, or a baseline.
        view: returns what the schedule sees of a sequence.
    """

    def __init__(self, schedule: Callable, view: Callable[[Sequence], ServerRequest], *args):
        super().__init__(*args)
        self._attempt, self._view = Attempt(schedule, SIGNATURE), view

    def _admit(self, plan: Plan) -> None:
        waiting, running = list(self.waiting), [self._view(sequence) for sequence in self.running]
        if not waiting and not running:
            return
        views = [self._view(sequence) for sequence in waiting]
        for joining in decide(self._attempt, views, running, self.max_rows - len(running)):
            sequence = waiting[views.index(joining)]
            self.add_chunk(plan, sequence, sequence.num_uncomputed_tokens)


def run_schedule(schedule: Callable, requests: Seq[Request], arrivals: Seq[int], rows: int = ROWS) -> Trace:
    """Run the requests as a schedule decides; the trace's clock counts forward passes.

    Args:
        schedule: what a student wrote, or a baseline.
        requests: with request ids, in the order in which they arrive.
        arrivals: for each request, the forward pass before which it arrives.
        rows: how many requests can run at once.

    Returns:
        The trace, in which requests are numbered from 0.

    Raises:
        Wrong: the schedule fails, or its decision is impossible.
    """

    def view(sequence: Sequence) -> ServerRequest:
        number = sequence.request_id
        limits = sequence.prompt_tokens, sequence.max_tokens
        return ServerRequest(requests[number].request_id, *limits, arrivals[number], sequence.generated)

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
    # Every step is one forward pass, or a pass's time without requests: a step's number is its time.
    trace = Trace(rows)
    trace.passes = [replace(iteration, start=iteration.step, seconds=1) for iteration in engine.trace.passes]
    return trace


def decide(attempt: Attempt, waiting: list, running: list, free_rows: int) -> list[ServerRequest]:
    """Return which requests join, as the schedule decides. It gets copies of the lists and may change them.

    Raises:
        Wrong: more requests than rows, a request that does not wait, or none although no request runs.
    """
    given = f"{len(waiting)} waiting, {len(running)} running, {free_rows} free rows"
    joining = attempt(list(waiting), list(running), free_rows, given=given, pure=False)
    if not isinstance(joining, list | tuple):
        raise Wrong(
            f"should return a list of waiting requests, an empty one if nobody joins; it returned {kind(joining)} "
            f"({given})."
        )
    for place, request in enumerate(joining):
        if not isinstance(request, ServerRequest):
            raise Wrong(f"should return waiting requests as they are, and returned {kind(request)} ({given}).")
        if any(request.request_id == other.request_id for other in running):
            raise Wrong(f"lets request {request.request_id} join, which is running already ({given}).")
        if request not in waiting:
            raise Wrong(f"lets request {request.request_id} join, which is not waiting ({given}).")
        if request in joining[:place]:
            raise Wrong(f"lets request {request.request_id} join twice ({given}): a request has one row.")
    if len(joining) > free_rows:
        raise Wrong(
            f"lets {len(joining)} requests join ({given}): every running request holds a row, and there is memory for "
            f"no more."
        )
    if waiting and not running and not joining:
        raise Wrong(f"lets nobody join although nobody runs ({given}): this server would stand still for ever.")
    return list(joining)


# --- the score ----------------------------------------------------------------------------------------------------


def static(waiting: list, running: list, free_rows: int) -> list:
    """Static batching as a schedule: nobody joins until the whole batch is done."""
    return [] if running else waiting[:free_rows]


def first_come(waiting: list, running: list, free_rows: int) -> list:
    """Continuous batching, first come, first served."""
    return waiting[:free_rows]


BASELINES = {"static": static, "first come, first served": first_come}


@cache
def _workload(name: str) -> tuple[list[Request], list[int]]:
    """Requests and when they arrive, in forward passes."""
    if name == "race":
        return workloads.race(), [0] * 32
    if name == "mixed":
        return workloads.mixed(24, max_tokens=96), [0] * 24
    return workloads.budgets(32), [2 * number for number in range(32)]


WORKLOADS = {
    "race": "32 requests at once, every eighth of 100 tokens, the others of 10",
    "mixed": "24 requests at once, max_tokens 96 for all, but most texts end by themselves",
    "arriving": "32 requests with unequal budgets, one every two forward passes",
}


@cache
def _baseline(policy: str, workload: str) -> Trace:
    return run_schedule(BASELINES[policy], *_workload(workload))


def measure(trace: Trace, arrivals: Seq[int]) -> dict[str, float]:
    """Forward passes, the share of slot-steps that yielded a token, and the 95th percentile of latency in passes."""
    ends = [one.e2e for one in metrics.request_metrics(trace, dict(enumerate(arrivals)))]
    return {
        "forward_passes": trace.forward_passes,
        "useful_share": trace.output_tokens / trace.slot_steps,
        "p95_latency": metrics.percentile(ends, 95),
    }


def floor(trace: Trace) -> int:
    """Forward passes that no schedule can undercut: the rows are full, or the longest text takes its time."""
    longest = max(map(len, trace.token_times.values()))
    return max(math.ceil(trace.output_tokens / trace.rows), longest)


def score_schedule(schedule: Callable, show: bool = True) -> dict:
    """Run a schedule on three workloads and print what it costs, beside two baselines and the floor.

    Args:
        schedule: `schedule(waiting, running, free_rows)` returns the waiting requests that join now.
        show: print the table and, in a notebook, draw the race's slot timeline.

    Returns:
        For each workload a dict from policy ("static", "first come, first served", "yours") to its forward_passes,
        useful_share and p95_latency (in forward passes), and under "floor" the least number of forward passes.
        Empty if the schedule fails; a message then says why.
    """
    scores, race = {}, {}
    try:
        for workload in WORKLOADS:
            requests, arrivals = _workload(workload)
            mine = run_schedule(schedule, requests, arrivals)
            traces = {policy: _baseline(policy, workload) for policy in BASELINES} | {"yours": mine}
            scores[workload] = {policy: measure(trace, arrivals) for policy, trace in traces.items()}
            scores[workload]["floor"] = floor(mine)
            race = race or traces
    except Wrong as wrong:
        print(f"schedule: {wrong.message}")
        return {}
    if show:
        print(_table(scores))
    if show and in_notebook():
        from IPython.display import display

        from .. import plots

        display(plots.slot_timeline(race))
    return scores


def _table(scores: dict) -> str:
    lines = []
    for workload, score in scores.items():
        lines += [f"{workload}: {WORKLOADS[workload]}, {ROWS} rows"]
        lines += [f"  {'':26s}{'forward passes':>16s}{'useful':>9s}{'p95 latency':>14s}"]
        for policy in (*BASELINES, "yours"):
            one = score[policy]
            lines += [f"  {policy:26s}{one['forward_passes']:16d}{one['useful_share']:9.0%}{one['p95_latency']:14.0f}"]
        lines += [f"  {'floor':26s}{score['floor']:16d}", ""]
    return "\n".join([*lines, "Latency is counted in forward passes, waiting included."])


# --- the check ----------------------------------------------------------------------------------------------------


def schedule(attempt: Attempt) -> None:
    """Decisions on a few small queues, then the race."""
    requests = [ServerRequest(number, 7, 10 + 90 * (number == 2), number) for number in range(8)]
    busy = [replace(request, generated=3) for request in requests[5:]]
    for waiting, running, free_rows in [
        (requests[:5], busy, 2),
        (requests[:5], busy, 0),
        ([], busy, 5),
        (requests[:2], [], 8),
    ]:
        decide(attempt, waiting, running, free_rows)

    mine, slow = run_schedule(attempt.function, *_workload("race")), _baseline("static", "race")
    if mine.forward_passes >= slow.forward_passes:
        raise Wrong(
            f"takes {mine.forward_passes} forward passes for the race, static batching takes {slow.forward_passes}: "
            f"rows stand free while requests wait. A row that is free can be given away before the next pass."
        )
    if mine.forward_passes > slow.forward_passes / 2:
        raise Wrong(
            f"takes {mine.forward_passes} forward passes for the race, more than half of what static batching takes: "
            f"{mine.work['empty']:,} of {mine.slot_steps:,} slot-steps had no request, while requests were waiting."
        )


TASKS = {SIGNATURE: (schedule, "only who waits joins, no row is given twice, and the race is run in far fewer passes")}
