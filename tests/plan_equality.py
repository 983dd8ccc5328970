"""Random workloads for two engines, and everything that each of them plans for one.

A workload is a script by iterations: requests arrive and are aborted before numbered iterations. So both engines see
the same script, however long an iteration takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from hypothesis import strategies as st

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.engine import POLICIES, EngineCore, Scheduler
from helpers.models import eos_token_ids
from helpers.simulator import Simulator

BLOCK_SIZE = 4
PREFIX = [17, 250, 33, 9, 301, 77, 120, 45, 260]  # two blocks and a token
LAST = 15  # the last iteration before which a request arrives


@dataclass(frozen=True)
class Arrival:
    """A request, the iteration before which it arrives, and the iteration before which it is aborted, if it is."""

    iteration: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    ignore_eos: bool = True
    aborted: int | None = None


@dataclass(frozen=True)
class Workload:
    """The settings of an engine, and its requests."""

    settings: dict
    arrivals: tuple[Arrival, ...]


@dataclass
class Run:
    """What an engine planned in each iteration, and its outputs by request."""

    plans: list = field(default_factory=list)
    outputs: dict = field(default_factory=dict)


class OneTooFew:
    """A proposer that guesses that each token is the one before, less 1: it is sometimes right by accident."""

    def propose(self, token_ids, k):
        return [max(0, token_ids[-1] - 1)] * (k - 1)


@st.composite
def workloads(draw, policies=tuple(POLICIES)) -> Workload:
    """Draw settings and requests that an engine with these settings accepts."""
    rows, chunked = draw(st.integers(1, 5)), draw(st.booleans())
    budget = draw(st.integers(rows, 24)) if chunked else draw(st.integers(40, 60))
    token_ids = st.integers(1, 400) | st.integers(1, 3)  # few different ones, too, so that n-grams are found
    arrivals = []
    for _ in range(draw(st.integers(1, 12))):
        shared = PREFIX[: draw(st.sampled_from([0, 0, 8, 9]))]
        own = draw(st.lists(token_ids, min_size=1, max_size=12))
        iteration = draw(st.integers(0, LAST))
        aborted = draw(st.none() | st.none() | st.integers(iteration, iteration + 20))
        arrivals.append(
            Arrival(
                iteration,
                (*shared, *own),
                draw(st.integers(1, 16)),
                draw(st.integers(-2, 2)),
                draw(st.booleans()),
                aborted,
            )
        )
    need = max(-(-(len(one.prompt) + one.max_tokens) // BLOCK_SIZE) for one in arrivals)
    settings = {
        "max_batch_size": rows,
        "max_tokens_per_step": budget,
        "num_blocks": draw(st.integers(need, need + 4)),
        "block_size": BLOCK_SIZE,
        "policy": draw(st.sampled_from(policies)),
        "mixed_batches": draw(st.booleans()),
        "chunked_prefill": chunked,
        "prefix_caching": draw(st.booleans()),
        "speculative": draw(st.sampled_from([None, None, "ngram", OneTooFew()])),
        "num_speculative_tokens": 3,
    }
    return Workload(settings, tuple(sorted(arrivals, key=lambda one: one.iteration)))


def run(make_engine: Callable[[EngineConfig], EngineCore], workload: Workload) -> Run:
    """Run a workload to its end."""
    done = Run()

    class Recording(Scheduler):
        def schedule(self):
            plan = super().schedule()
            chunks = [
                (one.sequence.label, one.start, one.tokens, one.samples_token, tuple(one.draft_token_ids),
                 tuple(one.block_table))
                for one in plan.chunks
            ]  # fmt: skip
            left = [[one.label for one in group] for group in (plan.preempted, plan.released)]
            done.plans.append((chunks, *left, list(plan.block_copies)))
            return plan

    engine = make_engine(EngineConfig(**workload.settings, scheduler_cls=Recording))
    arriving, iteration = list(enumerate(workload.arrivals)), 0
    while arriving or engine.has_unfinished_requests():
        while arriving and arriving[0][1].iteration <= iteration:
            number, one = arriving.pop(0)
            params = SamplingParams(one.max_tokens, ignore_eos=one.ignore_eos)
            engine.add_request(list(one.prompt), params, number, one.priority)
        for number, one in enumerate(workload.arrivals):
            if one.aborted == iteration:
                engine.abort_request(number)
        for output in engine.step():
            done.outputs[output.request_id] = output.token_ids, output.finish_reason
        iteration += 1
        assert iteration < 3000, "a sequence waits forever"
    return done


def run_engine(workload: Workload) -> Run:
    """Run a workload on the embedded model."""
    return run(lambda config: Engine(*load_model(), config), workload)


def run_simulator(workload: Workload, outputs: dict) -> Run:
    """Run a workload on a simulator that generates the tokens of these outputs."""
    following = {}
    for number, (token_ids, _) in outputs.items():
        known = workload.arrivals[number].prompt
        for token_id in token_ids:
            assert following.setdefault(known, token_id) == token_id, "the model is not deterministic"
            known += (token_id,)

    def next_token(token_ids: list[int]) -> int:
        return following[tuple(token_ids)]

    return run(lambda config: Simulator(config, next_token=next_token, eos_token_ids=_eos()), workload)


@cache
def _eos() -> frozenset[int]:
    return frozenset(eos_token_ids(*load_model()))
