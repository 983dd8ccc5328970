"""The routing contest: a student's `route()` chooses replicas, and its scores are counts of tokens and of iterations.

The replicas are simulators in lock-step, so a score depends on nothing but the choices.
"""

import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, takewhile
from random import Random

from ..block_hashes import hash_blocks
from ..engine import EngineConfig, SamplingParams
from ..metrics import percentile
from ..simulator import Simulator
from .comparing import kind
from .exercise import Wrong

REPLICAS, PREFIXES, PREFIX, REQUESTS, BLOCK_SIZE = 4, 8, 256, 120, 16
SIGNATURE = "route(length, replicas)"


@dataclass(frozen=True)
class Workload:
    """How requests arrive, and what they ask for.

    Attributes:
        popular: the share of the requests that have the first prefix in any case.
        outputs: the output lengths, in tokens, from which each request draws.
        rate: requests per iteration.
        rows: the rows of a replica.
    """

    popular: float = 0.0
    outputs: tuple[int, ...] = (8,)
    rate: float = 2.0
    rows: int = 8


# In "long", most outstanding tokens belong to outputs. While rows are free, they delay no new request, so a router that
# weighs them gives up cached prefixes for nothing.
WORKLOADS = {
    "even": Workload(),
    "popular": Workload(popular=0.8),
    "long": Workload(outputs=(10, 10, 1000), rate=1.0, rows=32),
}


@dataclass(frozen=True)
class KnownReplica:
    """What a router knows of a replica when a request arrives.

    Attributes:
        cached: how many tokens of the request's prompt the replica has cached.
        outstanding: how many tokens its unfinished requests may still compute.
        waiting: how many of its unfinished requests have no row.
    """

    cached: int
    outstanding: int
    waiting: int


@dataclass(frozen=True)
class Score:
    """The counts of a run: prompt tokens computed by all replicas, and the p95 of TTFT in iterations."""

    prompt_tokens: int
    late: float

    @property
    def words(self) -> str:
        return f"{self.prompt_tokens:,} prompt tokens with a p95 of TTFT of {self.late:.1f}"


class _Replica:
    """A simulator, and the hashes of the blocks that it has cached or is about to compute."""

    def __init__(self, rows: int):
        config = EngineConfig(max_batch_size=rows, max_tokens_per_step=320, num_blocks=1200, block_size=BLOCK_SIZE)
        self.engine, self.hashes = Simulator(config), set()

    def known_for(self, prompt: list[int]) -> KnownReplica:
        """Return what a router knows when a prompt arrives."""
        for digest, registered in self.engine.block_manager.take_cache_events():
            (self.hashes.add if registered else self.hashes.discard)(digest)
        cached = list(takewhile(lambda digest: digest in self.hashes, hash_blocks(prompt[:-1], BLOCK_SIZE)))
        unfinished = self.engine.scheduler.unfinished
        outstanding = sum(one.prompt_tokens + one.max_tokens - one.computed for one in unfinished)
        waiting = max(0, len(unfinished) - self.engine.config.max_batch_size)
        return KnownReplica(BLOCK_SIZE * len(cached), outstanding, waiting)

    def add(self, prompt: list[int], max_tokens: int, number: int) -> None:
        """Send a request to the replica."""
        self.hashes.update(hash_blocks(prompt, BLOCK_SIZE))
        self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens), number)


def choose(route: Callable, length: int, replicas: list[KnownReplica]) -> int:
    """Return the index that a function returns for a request.

    Raises:
        Wrong: it is not the index of a replica.
    """
    chosen = route(length, list(replicas))
    try:
        index = None if isinstance(chosen, bool) else operator.index(chosen)
    except Exception:  # raised by methods of the result
        index = None
    if index is None:
        raise Wrong(f"should return the index of a replica, an int, but returned {kind(chosen)}.")
    if not 0 <= index < len(replicas):
        raise Wrong(f"should return an index from 0 to {len(replicas) - 1}, but returned {index}.")
    return index


@lru_cache(8)
def requests(workload: str, seed: int = 0) -> tuple[tuple[list[int], int], ...]:
    """Return (prompt, output tokens) for each request. Prompts begin with one of eight prefixes."""
    draw = Random(f"{workload} {seed}")

    def text(tokens: int) -> list[int]:
        return [draw.randrange(10**6) for _ in range(tokens)]

    prefixes = [text(PREFIX) for _ in range(PREFIXES)]
    kind_of_load = WORKLOADS[workload]
    chosen = [0 if draw.random() < kind_of_load.popular else draw.randrange(PREFIXES) for _ in range(REQUESTS)]
    prompts = [prefixes[one] + text(draw.randint(8, 48)) for one in chosen]
    return tuple((prompt, draw.choice(kind_of_load.outputs)) for prompt in prompts)


def score_route(route: Callable, workload: str, seed: int = 0) -> Score:
    """Run a workload with a function.

    Raises:
        Wrong: the function returns something that is not the index of a replica.
    """
    replicas, first = [_Replica(WORKLOADS[workload].rows) for _ in range(REPLICAS)], {}
    arrivals = [int(number / WORKLOADS[workload].rate) for number in range(REQUESTS)]
    to_come = deque(enumerate(requests(workload, seed)))
    for step in count():
        while to_come and arrivals[to_come[0][0]] == step:
            number, (prompt, max_tokens) = to_come.popleft()
            known = [replica.known_for(prompt) for replica in replicas]
            replicas[choose(route, len(prompt), known)].add(prompt, max_tokens, number)
        for output in [output for replica in replicas for output in replica.engine.step()]:
            first.setdefault(output.request_id, 1 + step - arrivals[output.request_id])
        if len(first) == REQUESTS:
            computed = sum(replica.engine.trace.prompt_tokens for replica in replicas)
            return Score(computed, percentile(list(first.values()), 95))


def in_turn() -> Callable:
    """Return a function that takes the replicas in turn."""
    turns = count()
    return lambda length, replicas: next(turns) % len(replicas)


def least_loaded(length: int, replicas: list[KnownReplica]) -> int:
    """Choose the replica with the fewest outstanding tokens."""
    return min(range(len(replicas)), key=lambda index: replicas[index].outstanding)


def most_cached(length: int, replicas: list[KnownReplica]) -> int:
    """Choose the replica with the most cached tokens of the prompt, the least loaded of equal ones."""
    return max(range(len(replicas)), key=lambda index: (replicas[index].cached, -replicas[index].outstanding))


@lru_cache(8)
def baselines(workload: str, seed: int = 0) -> dict[str, Score]:
    """Return the scores of three policies."""
    policies = {"round robin": in_turn(), "least outstanding tokens": least_loaded, "cache alone": most_cached}
    return {name: score_route(route, workload, seed) for name, route in policies.items()}


def standing(score: Score, workload: str, seed: int = 0) -> str:
    """Return where a score stands, in words."""
    known = ", ".join(f"{name} {one.words}" for name, one in baselines(workload, seed).items())
    return f"on {workload!r}, {score.words} ({known})"
