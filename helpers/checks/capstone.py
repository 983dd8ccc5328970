"""The capstone: six milestones of an engine, each judged by what its runs cost beside the course's engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..models import load_model
from .engine_calls import drive
from .engine_faults import too_expensive
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
        limits: the most that a run may cost: for each measure, a factor of what the course's engine needs, and an
            addition to it.
        settings: of the course's engine whose costs are the limit.
    """

    name: str
    idea: str
    limits: dict[str, tuple[float, int]]
    settings: dict = field(default_factory=dict)


EXACT = {"forward passes": (1.0, 0), "computed tokens": (1.0, 0)}
MILESTONES = {one.name: one for one in [
    Milestone("engine_cached", "each token is computed once, and outputs end where they should", EXACT),
    Milestone("engine_static", "rows share passes, and a finished row costs nothing", EXACT, {"policy": "static"}),
    Milestone("engine_continuous", "a free row goes to the next request at once",
              EXACT | {"forward passes": (1.05, 1)}, {"mixed_batches": False}),
    Milestone("engine_chunked", "long prompts are computed in chunks, and no decode waits for them",
              {"stalls": (1.0, 0), "forward passes": (1.15, 2), "computed tokens": (1.0, 0)}),
    Milestone("engine_paged", "blocks are taken when they are needed, and given back when none is free",
              {"tokens generated again": (0, 3), "forward passes": (1.15, 2), "computed tokens": (1.35, 8)}),
    Milestone("engine_prefixes",
              "equal prefixes are computed once, and cached blocks are lost only when memory is needed",
              {"prompt tokens": (1.15, 8), "tokens generated again": (0, 3), "forward passes": (1.15, 2)},
              {"prefix_caching": True}),
]}  # fmt: skip


def judge(milestone: Milestone) -> Callable[[Callable, int], Passed]:
    """Return the judge of a milestone: exactness first, then what the run costs."""

    def judged(function: Callable, seed: int) -> Passed:
        mine, course = dict.fromkeys(MEASURES, 0), dict.fromkeys(MEASURES, 0)
        for workload, model in cases(milestone.name, seed):
            run = Run(workload, model)
            try:
                function(run.shape, workload.rows, workload.budget, observe=drive, serve=run.serve)
                if not run.error and not all(one.finished for one in run.requests.values()):
                    run.error = "ends before all requests have finished"
            except Wrong as wrong:  # after the model has refused a pass, the engine stops with that error
                run.error = run.error or str(wrong)
            run.error = run.error or _too_expensive(milestone, run)
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


def _too_expensive(milestone: Milestone, run: Run) -> str:
    allowed = course_run(milestone, run.workload, run.model, **milestone.settings).measures
    for name, (factor, more) in milestone.limits.items():
        most = int(factor * allowed[name]) + more
        if run.measures[name] > most:
            what = f"{run.measures[name]:,} {name}, where {most:,} are enough" if name != "stalls" else ""
            return too_expensive(milestone.name, name, run, what)
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
    return [tokenizer.decode(one.text, skip_special_tokens=True) for one in run.requests.values()]
