"""The capstone: six milestones of an engine, each judged by what its runs cost beside the course's engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from ..engine import Chunk, EngineConfig, Plan, SamplingParams, Sequence
from ..model_engine import Engine
from ..models import load_model
from ..tiny_model.corpus import unseen_prompts
from .calling import answer
from .engine_calls import drive
from .engine_run import EOS, MEASURES, VOCABULARY, CourseEngine, KeyedModel, Run, Workload, run_engine
from .examining import examine
from .exercise import JudgedExercise, Passed, Wrong

SIGNATURE = "MyEngine(model, max_rows, max_tokens_per_step)"
NO_LIMIT = 10**6


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
MILESTONES = {
    one.name: one
    for one in [
        Milestone("engine_cached", "each token is computed once, and outputs end where they should", EXACT),
        Milestone("engine_static", "rows share passes, and a finished row costs nothing", EXACT, {"policy": "static"}),
        Milestone(
            "engine_continuous",
            "a free row goes to the next request at once",
            {"forward passes": (1.05, 1), "computed tokens": (1.0, 0)},
            {"mixed_batches": False},
        ),
        Milestone(
            "engine_chunked",
            "long prompts are computed in chunks, and no decode waits for them",
            {"stalls": (1.0, 0), "forward passes": (1.15, 2), "computed tokens": (1.0, 0)},
        ),
        Milestone(
            "engine_paged",
            "blocks are taken when they are needed, and given back when none is free",
            {"tokens generated again": (0, 3), "forward passes": (1.15, 2), "computed tokens": (1.35, 8)},
        ),
        Milestone(
            "engine_prefixes",
            "equal prefixes are computed once, and cached blocks are lost only when memory is needed",
            {"prompt tokens": (1.15, 8), "tokens generated again": (0, 3), "forward passes": (1.15, 2)},
            {"prefix_caching": True},
        ),
    ]
}

# --- workloads --------------------------------------------------------------------------------------------------------


class _Draw:
    """Draws requests with prompts of given lengths, whose outputs have given lengths."""

    def __init__(self, random: Random, model: KeyedModel):
        self.random, self.model = random, model
        self.ids = [token for token in range(VOCABULARY) if token != EOS]

    def tokens(self, count: int) -> list[int]:
        return [self.random.choice(self.ids) for _ in range(count)]

    def request(self, arrival: int, length: int, most: int, ends: int = 0, before=(), after=()) -> tuple:
        """Return a request whose output has `ends` tokens, if that is not 0; if it is less than `most`, EOS ends it."""
        for _ in range(2000):
            prompt = [*before, *self.tokens(length), *after]
            if not ends or len(self.model.alone(prompt, most)) == ends:
                break
        return arrival, prompt, most

    def some(self, count: int, length: int, most: int, last: int = 0) -> list[tuple]:
        """Return requests up to a length, with up to so many tokens, that arrive up to a time."""
        draw = self.random.randint
        arrivals = sorted(draw(0, last) for _ in range(count))
        return [self.request(arrival, draw(1, length), draw(1, most)) for arrival in arrivals]


def _blocks(request: tuple, size: int = 4) -> int:
    """Return the blocks that a request needs at most."""
    return -(-(len(request[1]) + request[2]) // size)


def _roomy(name: str, requests: list, rows: int, budget: int = NO_LIMIT) -> Workload:
    """Return a workload with memory for the longest request in each row."""
    return Workload(name, requests, rows, budget, rows * max(map(_blocks, requests)))


def _cached(draw: _Draw) -> Iterator[Workload]:
    first = draw.request(0, 5, 6, 6)
    yield _roomy(
        "one row, unequal prompts",
        [first, draw.request(0, 1, 5), draw.request(0, 17, 20, 3), draw.request(0, 8, 10, 1), draw.request(0, 4, 1, 1),
         (0, first[1], 3), draw.request(0, 2, 4, 4, before=[9, EOS, 0], after=[EOS]), draw.request(0, 4, 9, 9)],
        1,
    )  # fmt: skip
    yield _roomy("one row, requests that arrive", draw.some(7, 20, 14, 60), 1)


def _static(draw: _Draw) -> Iterator[Workload]:
    twin = draw.request(0, 3, 4, 4)
    yield _roomy(
        "4 rows, all requests at once",
        [draw.request(0, 12, 9, 9), draw.request(0, 1, 6), draw.request(0, 5, 14, 2), draw.request(0, 3, 1, 1), twin,
         (0, twin[1], 2), draw.request(0, 20, 7, 7), (0, twin[1], 4), *(draw.request(0, n, 8, 1) for n in (2, 9)),
         draw.request(0, 3, 5, 5, after=[EOS, 0])],
        4,
    )  # fmt: skip
    yield _roomy("all requests at once", draw.some(13, 24, 16), draw.random.randint(3, 5))


def _continuous(draw: _Draw) -> Iterator[Workload]:
    twin = draw.request(2, 6, 5, 5)
    yield _roomy(
        "3 rows, requests that arrive during the run, and after a pause",
        [draw.request(0, 9, 22, 22), draw.request(0, 3, 2, 2), draw.request(0, 5, 9, 4), twin, (2, twin[1], 8),
         draw.request(3, 2, 1, 1), draw.request(3, 15, 6, 1), draw.request(4, 4, 9, 9), draw.request(9, 7, 3, 3),
         draw.request(400, 4, 3, 3), draw.request(401, 11, 6, 6)],
        3,
    )  # fmt: skip
    sizes = ((2, 1), (4, 1), (9, 6), (3, 1), (5, 2), (1, 1), *[(7, 6)] * 9)
    yield _roomy("3 rows, short outputs", [draw.request(0, length, most, most) for length, most in sizes], 3)
    yield _roomy("requests that arrive", draw.some(16, 20, 16, 40), draw.random.randint(3, 5))


def _chunked(draw: _Draw) -> Iterator[Workload]:
    yield _roomy(
        "4 rows, 8 tokens per step, long prompts that arrive beside decodes",
        [draw.request(0, 3, 26, 26), draw.request(0, 6, 18, 18), draw.request(3, 37, 5, 5), draw.request(5, 29, 1, 1),
         draw.request(6, 16, 4, 4), draw.request(30, 2, 3, 3)],
        4, 8,
    )  # fmt: skip
    yield _roomy("two long prompts, 16 tokens per step", [draw.request(0, n, 2, 2) for n in (48, 40)], 2, 16)
    yield _roomy("3 rows, 3 tokens per step", [draw.request(0, n, 8, 8) for n in (2, 11, 1, 7)], 3, 3)
    rows = draw.random.randint(3, 5)
    yield _roomy("prompts longer than a step", draw.some(12, 40, 14, 40), rows, rows + draw.random.randint(4, 9))


def _paged(draw: _Draw) -> Iterator[Workload]:
    three = [draw.request(0, 24, 40, 40) for _ in range(3)]
    yield Workload("three long requests, memory for fewer than two", three, 3, 40, 22)
    long = draw.request(0, 11, 40, 26)
    few = [long, *(draw.request(0, n, 30, ends) for n, ends in ((5, 9), (8, 14), (3, 6))), draw.request(6, 20, 12, 3)]
    least = (11 + 26 - 1) // 4  # its last token is not computed
    yield Workload("memory for barely one request, 4 rows", few, 4, 16, least)
    same = [
        draw.request(arrival, 8, 30, ends) for arrival, ends in ((0, 12), (0, 16), (1, 12), (1, 9), (2, 20), (2, 5))
    ]
    yield Workload("memory for half of the rows, limits that outputs do not reach", same, 4, 16, 13)
    drawn = [
        draw.request(a, draw.random.randint(2, 24), 32) for a in sorted(draw.random.randint(0, 40) for _ in range(14))
    ]
    yield Workload(
        "requests that arrive, little memory", drawn, 5, 20, max(map(_blocks, drawn)) + draw.random.randint(2, 8)
    )


def _prefixes(draw: _Draw) -> Iterator[Workload]:
    system, other, question = draw.tokens(16), draw.tokens(8), draw.tokens(8)
    short = draw.request(62, 2, 8, 8, before=system[:8])
    asked = [
        draw.request(0, 5, 6, 6, before=system), draw.request(3, 3, 12, 12, before=system),
        draw.request(4, 0, 6, 0, before=[*system, *question]), draw.request(9, 0, 9, 0, before=[*system, *question]),
        draw.request(9, 0, 7, 0, before=[*other, *question]), draw.request(12, 2, 8, 8, before=[*other, *question]),
        draw.request(60, 6, 4, 4, before=system), draw.request(61, 0, 5, 0, before=system),
        short, (63, short[1], 8), draw.request(66, 1, 8, 8, before=short[1]),
    ]  # fmt: skip
    yield _roomy("4 rows, prompts that begin alike", asked, 4, 32)
    pair = [draw.request(0, 3, 2, 2, before=system), draw.request(1, 2, 20, 20, before=system)]
    yield Workload("a prefix in use while memory is short", [*pair, draw.request(6, 44, 2, 2)], 3, 64, 16)
    systems = [draw.tokens(4 * draw.random.randint(3, 6)) for _ in range(4)]
    arrivals = sorted(draw.random.randint(0, 120) for _ in range(24))
    many = [
        draw.request(a, draw.random.randint(0, 7), draw.random.randint(1, 10), before=draw.random.choice(systems))
        for a in arrivals
    ]
    yield Workload("four system prompts, little memory", many, 4, 32, 3 * max(map(_blocks, many)))


WORKLOADS: dict[str, Callable[[_Draw], Iterator[Workload]]] = dict(
    zip(MILESTONES, (_cached, _static, _continuous, _chunked, _paged, _prefixes), strict=True)
)


def cases(milestone: str, seed: int = 0) -> Iterator[tuple[Workload, KeyedModel]]:
    """Yield the workloads of a milestone, each with its model. Their kinds are fixed; all tokens depend on the seed."""
    model = KeyedModel(f"{milestone} {seed}")
    for workload in WORKLOADS[milestone](_Draw(Random(f"{milestone} {seed}"), model)):
        yield workload, model
    yield real_case(milestone, seed)


class RealModel(KeyedModel):
    """The course's model on blocks, with the stand-in's keys beside it, which say what was wrong."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__("")
        settings = {"num_blocks": num_blocks, "block_size": block_size, "prefix_caching": False, "kernels": False}
        self._engine = Engine(config=EngineConfig(execution="ragged", linear_backend="pytorch", **settings))
        (self.eos_id,) = self._engine.model_info.eos_token_ids

    def alone(self, prompt: list[int], most: int) -> list[int]:
        return self._engine.generate([prompt], SamplingParams(most))[0].token_ids

    def next_tokens(self, rows: list, keys: list[int]) -> list[int]:
        plan = Plan()
        for row in rows:
            sequence = Sequence(row.request_id, [0] * row.start + row.token_ids, 1, computed=row.start)
            plan.chunks.append(Chunk(sequence, len(row.token_ids), row.block_table))
        return self._engine.runner.forward(plan).argmax(dim=-1).tolist()


def real_case(milestone: str, seed: int) -> tuple[Workload, RealModel]:
    """Return a few requests on the course's model, with the limits of a milestone's first workload."""
    place = list(MILESTONES).index(milestone)
    tokenizer, random = load_model()[1], Random(seed)
    prompts = [tokenizer(text)["input_ids"] for text in unseen_prompts(4, random.randrange(10**6))]
    if place == 5:
        prompts = [prompts[0] * 2 + prompt for prompt in prompts]
    requests = [(4 * number * (place > 1), prompt, random.randint(4, 12)) for number, prompt in enumerate(prompts)]
    rows, budget = (1 if place == 0 else 3), (NO_LIMIT if place < 3 else 9)
    blocks = rows * max(map(_blocks, requests)) if place != 4 else 2 + max(map(_blocks, requests))
    return Workload("the course's model", requests, rows, budget, blocks), RealModel(blocks, 4)


# --- the judge --------------------------------------------------------------------------------------------------------


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
            if isinstance(model, RealModel):  # which an engine could run by itself, uncounted
                continue
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
            return _why(milestone.name, name, run, what)
    return ""


def _why(milestone: str, measure: str, run: Run, what: str) -> str:
    """Return the idea that a run which costs too much has missed."""
    work = run.workload
    if measure == "stalls":
        number, at = run.first_stall()
        return (
            f"lets request {number} wait in pass {at}, although it has begun its output and a decode needs one token. "
            "Decodes come first in every pass, and prompts are computed in what is left of max_tokens_per_step"
        )
    if measure == "prompt tokens":
        if not any(one.rows[0][1] for one in run.requests.values()):
            return (
                f"computes every prompt from its first token: {what}. Full blocks that begin alike hold the same keys"
            )
        return (
            f"shares too little: {what}. A block stays cached after its request has finished, until memory is needed, "
            "and what was used longest ago goes first"
        )
    if run.after_end:
        return (
            f"computes rows of requests that have finished: {what}. Their outputs are complete, so they leave the "
            "batch, even if the other rows go on"
        )
    if run.widest == 1 < work.rows:
        return (
            f"runs one request at a time: {what}. Rows share a pass, which takes hardly longer with {work.rows} of them"
        )
    if run.reserved > 1 and milestone == "engine_paged":
        return (
            f"takes blocks before they are needed: {what}. A reserved slot is empty for as long as its token does not "
            "exist, and an output may end long before max_new_tokens"
        )
    if run.restarts and milestone != "engine_paged":
        return (
            f"computes tokens again whose keys are in the cache: {what}. Once the prompt is computed, each pass needs "
            "only the newest token"
        )
    if measure == "tokens generated again":
        return (
            f"generates tokens again after a preemption: {what}. They are known, part of the request's text, and are "
            "computed together with the prompt"
        )
    if any(run.victims):
        return (
            f"preempts requests that have run longest: {what}. The oldest has computed the most, all of which is "
            "computed again; the newest loses the least"
        )
    if milestone == "engine_continuous" and run.joined_late and run.left_free:
        return (
            f"waits until all rows have finished: {what}. A free row can go to a waiting request before the next pass"
        )
    if run.small > 1:
        return (
            f"computes smaller chunks of prompts than fit: {what}. A pass has room for max_tokens_per_step tokens, and "
            "what its decodes leave is for prompts"
        )
    return (
        f"leaves rows free in its passes while requests wait, {run.left_free} in all: {what}. All that fits into a "
        "pass runs in it, prompts beside one another and beside decodes"
    )


# --- for a notebook ---------------------------------------------------------------------------------------------------


def score_engine(engine_class: Callable) -> dict[str, dict[str, tuple[int, int]]]:
    """Run an engine on the practice workloads of all milestones, and print its costs beside the course's engine.

    Args:
        engine_class: called as `MyEngine(model, max_rows, max_tokens_per_step)`.

    Returns:
        For each milestone that passes, a dict from a measure to the engine's own value and the course's.
    """
    scores = {}
    print(f"{'yours / the course':20}" + "".join(f"{name:>24}" for name in MEASURES))
    for milestone in MILESTONES.values():
        exercise = JudgedExercise(SIGNATURE, milestone.idea, judge(milestone), milestone.name)
        verdict = examine(exercise, lambda question: answer(question, engine_class))
        if verdict.passed:
            scores[milestone.name] = verdict.score
            values = "".join(f"{f'{mine:,} / {course:,}':>24}" for mine, course in verdict.score.values())
        print(f"{milestone.name:20}{values if verdict.passed else '  not yet'}")
    return scores


def try_engine(engine_class: Callable, requests: list[tuple[str, int]], max_rows: int = 4) -> list[str]:
    """Run an engine on the course's model, and return the texts of (prompt, max_new_tokens) requests.

    Raises:
        ValueError: an output is not the one that the request gets alone, or the run did not end; the text says why.
    """
    tokenizer = load_model()[1]
    work = [(0, tokenizer(prompt)["input_ids"], most) for prompt, most in requests]
    workload = _roomy("", work, max_rows)
    run = Run(workload, RealModel(workload.num_blocks, workload.block_size))
    drive(engine_class, run.serve, run.shape, max_rows, NO_LIMIT)
    if run.error:
        raise ValueError(f"The engine {run.error}.")
    return [tokenizer.decode(one.text, skip_special_tokens=True) for one in run.requests.values()]
