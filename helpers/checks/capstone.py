"""The capstone: six milestones of an engine, each judged by what its runs cost beside the course's engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..models import load_model
from .engine_calls import drive
from .engine_models import KeyedModel, RealModel
from .engine_run import MEASURES, CourseEngine, Run, Workload, run_engine
from .engine_workloads import NO_LIMIT, cases, roomy
from .exercise import Passed, Wrong

SIGNATURE = "MyEngine(model, max_rows, max_tokens_per_step)"
ROWS = 4  # of `try_engine`


@dataclass(frozen=True)
class Milestone:
    """A milestone.

    Attributes:
        name: of the task.
        idea: what an engine that passes does.
        limits: the most that a run may cost: for each measure, a factor of what the course's engine needs, an addition
            to it, and what an engine that needs more has missed.
        settings: of the course's engine whose costs are the limit.
    """

    name: str
    idea: str
    limits: dict[str, tuple[float, int, str]]
    settings: dict = field(default_factory=dict)


FIRST = "The pass over a prompt yields the first token already, and each later pass yields one more"
ONCE = "Once the prompt is computed, each pass needs only the newest token: the keys of all others are in the cache"
LEAVE = f"{ONCE}. A request whose output is complete leaves the batch, even if the other rows go on"
SHARE = "Rows share a pass: before one begins, waiting requests get all rows that are free"
FULL = (
    "All that fits into a pass runs in it: as many requests as there are rows, prompts beside decodes, and of each "
    "prompt as much as max_tokens_per_step leaves room for"
)
WHEN_NEEDED = (
    "A block is taken when a token needs it, and not before: a reserved slot is empty for as long as its token does "
    "not exist, and keeps another request waiting. The newest running request is preempted: it has computed the least"
)
AGAIN = "What a preempted request has generated is known, part of its text, and is computed together with the prompt"
MILESTONES = {milestone.name: milestone for milestone in [
    Milestone("engine_cached", "each token is computed once, and outputs end where they should",
              {"forward passes": (1.0, 0, FIRST), "computed tokens": (1.0, 0, ONCE)}),
    Milestone("engine_static", "rows share passes, and a finished row costs nothing", {
        "forward passes": (1.0, 0, SHARE),
        "computed tokens": (1.0, 0, LEAVE),
    }, {"policy": "static"}),
    Milestone("engine_continuous", "a free row goes to the next request at once", {
        "free rows while requests waited": (0, 0, "A free row goes to a waiting request before the next pass, even "
                                                    "if all others are still running"),
        "forward passes": (1.05, 1, SHARE),
        "computed tokens": (1.0, 0, LEAVE),
    }, {"mixed_batches": False}),
    Milestone("engine_chunked", "long prompts are computed in chunks, and no decode waits for them", {
        "stalls": (1.0, 0, "Decodes come first in every pass, and prompts are computed in what is left of "
                           "max_tokens_per_step"),
        "forward passes": (1.15, 2, FULL), "computed tokens": (1.0, 0, LEAVE),
    }),
    Milestone("engine_paged", "blocks are taken when they are needed, and given back when none is free", {
        "tokens generated again": (0, 3, AGAIN), "forward passes": (1.15, 2, WHEN_NEEDED),
        "computed tokens": (1.35, 8, WHEN_NEEDED),
    }),
    Milestone("engine_prefixes",
              "equal prefixes are computed once, and cached blocks are lost only when memory is needed", {
        "prompt tokens": (1.15, 8, "Full blocks that begin alike hold the same keys. A block stays cached after its "
                                   "request has finished, until memory is needed, and what was used longest ago goes "
                                   "first"),
        "tokens generated again": (0, 3, AGAIN), "forward passes": (1.15, 2, FULL),
    }, {"prefix_caching": True}),
]}  # fmt: skip


def judge(milestone: Milestone) -> Callable[[Callable, int], Passed]:
    """Return the judge of a milestone: exactness first, then what the run costs."""

    def judged(function: Callable, seed: int) -> Passed:
        mine, course = dict.fromkeys(MEASURES, 0), dict.fromkeys(MEASURES, 0)
        for workload, model in cases(milestone.name, seed):
            run = Run(workload, model)
            try:
                function(run.shape, workload.rows, workload.budget, observe=drive, serve=run.serve)
                if not run.error and not all(request.finished for request in run.requests.values()):
                    run.error = "ends before all requests have finished"
            except Wrong as wrong:  # after the model has refused a pass, the engine stops with that error
                run.error = run.error or str(wrong)
            run.error = run.error or _excess(milestone, run)
            if run.error:
                memory = f"{workload.num_blocks} blocks of {workload.block_size}"
                given = f"{workload.name}; {len(run.requests)} requests, {memory}"
                raise Wrong(f"{run.error.rstrip('.')} (given: {given}).")
            theirs = course_run(milestone, workload, model).measures
            for name in MEASURES:
                mine[name] += run.measures[name]
                course[name] += theirs[name]
        told = ", ".join(f"{mine[name]:,} {name} (the course's engine: {course[name]:,})" for name in MEASURES)
        return Passed(f"Yours: {told}.", {name: (mine[name], course[name]) for name in MEASURES})

    return judged


def course_run(milestone: Milestone, workload: Workload, model: KeyedModel, **settings) -> Run:
    """Return the run of the course's engine, by default with all that it can do up to a milestone."""
    sharing = milestone.settings.get("prefix_caching", False)
    return run_engine(lambda *limits: CourseEngine(*limits, **{"prefix_caching": sharing, **settings}), workload, model)


def _excess(milestone: Milestone, run: Run) -> str:
    """Say which limit a run exceeds; "" if it keeps all."""
    allowed = course_run(milestone, run.workload, run.model, **milestone.settings).measures
    for name, (factor, more, idea) in milestone.limits.items():
        most = int(factor * allowed[name]) + more
        if run.measures[name] > most:
            return f"costs too much: {run.measures[name]:,} {name}, where {most:,} are enough. {idea}"
    return ""


def try_engine(engine_class: Callable, requests: list[tuple[str, int]]) -> list[str]:
    """Run an engine on the course's model, and return the texts of (prompt, max_new_tokens) requests.

    Raises:
        ValueError: an output is not the one that the request gets alone, or the run did not end; the text says why.
    """
    tokenizer = load_model()[1]
    work = [(0, tokenizer(prompt)["input_ids"], most) for prompt, most in requests]
    workload = roomy("", work, ROWS)
    run = Run(workload, RealModel(workload.num_blocks, workload.block_size))
    drive(engine_class, run.serve, run.shape, ROWS, NO_LIMIT)
    if run.error:
        raise ValueError(f"The engine {run.error}.")
    return [tokenizer.decode(request.text, skip_special_tokens=True) for request in run.requests.values()]
