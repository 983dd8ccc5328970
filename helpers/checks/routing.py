"""The routing contest: a student's `route()` chooses replicas, and its scores are counts of tokens and of iterations.

The replicas are the course's own, simulated and in lock-step, so a score depends on nothing but the choices.
"""

import operator
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from random import Random
from typing import NamedTuple

from ..cluster.lockstep import LockstepReplicas
from ..cluster.routing import RoutableReplica
from ..engine import EngineConfig, SamplingParams
from ..metrics import percentile
from ..simulator import Simulator
from .comparing import kind
from .exercise import Wrong

REPLICAS, PREFIXES, PREFIX, REQUESTS, BLOCK_SIZE = 4, 8, 256, 120, 16
SIGNATURE = "route(length, replicas)"


class Workload(NamedTuple):
    """How requests arrive, and what they ask for."""

    popular: float = 0.0  # the share of the requests that have the first prefix in any case
    outputs: tuple[int, ...] = (8,)  # the output lengths, in tokens, from which each request draws
    rate: float = 2.0  # requests per iteration
    rows: int = 8  # of a replica


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


class Score(NamedTuple):
    """The counts of a run: prompt tokens computed by all replicas, and the p95 of TTFT in iterations."""

    prompt_tokens: int
    late: float

    def __str__(self) -> str:
        return f"{self.prompt_tokens:,} prompt tokens with a p95 of TTFT of {self.late:.1f}"


class _RoutedBy:
    """A router of the course that asks a function."""

    def __init__(self, route: Callable, engines: list[Simulator]):
        self._route, self._engines = route, engines

    def choose(self, prompt: list[int], replicas: Seq[RoutableReplica]) -> int:
        """Return the index that the function returns for a request.

        Raises:
            Wrong: it is not the index of a replica.
        """
        known = []
        for replica, engine in zip(replicas, self._engines, strict=True):
            unfinished = engine.scheduler.unfinished
            outstanding = sum(
                sequence.prompt_tokens + sequence.max_tokens - sequence.computed for sequence in unfinished
            )
            waiting = max(0, len(unfinished) - engine.config.max_batch_size)
            known.append(KnownReplica(replica.cached_tokens(prompt), outstanding, waiting))
        chosen = self._route(len(prompt), known)
        try:
            index = operator.index(chosen)
        except Exception:  # raised by methods of the result
            index = None
        if index is None or isinstance(chosen, bool):
            raise Wrong(f"should return the index of a replica, an int, but returned {kind(chosen)}.")
        if not 0 <= index < len(replicas):
            raise Wrong(f"should return an index from 0 to {len(replicas) - 1}, but returned {index}.")
        return index


@lru_cache(8)
def requests(workload: str, seed: int = 0) -> list[tuple[list[int], int]]:
    """Return (prompt, output tokens) for each request. Prompts begin with one of eight prefixes."""
    draw, (popular, outputs, *_) = Random(f"{workload} {seed}"), WORKLOADS[workload]

    def text(tokens: int) -> list[int]:
        return [draw.randrange(10**6) for _ in range(tokens)]

    prefixes = [text(PREFIX) for _ in range(PREFIXES)]
    chosen = [0 if draw.random() < popular else draw.randrange(PREFIXES) for _ in range(REQUESTS)]
    prompts = [prefixes[index] + text(draw.randint(8, 48)) for index in chosen]
    return [(prompt, draw.choice(outputs)) for prompt in prompts]


def score_route(route: Callable, workload: str, seed: int = 0) -> Score:
    """Run a workload with a function.

    Raises:
        Wrong: the function returns something that is not the index of a replica.
    """
    _, _, rate, rows = WORKLOADS[workload]
    config = EngineConfig(max_batch_size=rows, max_tokens_per_step=320, num_blocks=1200, block_size=BLOCK_SIZE)
    engines = [Simulator(config) for _ in range(REPLICAS)]
    replicas = LockstepReplicas(engines, _RoutedBy(route, engines))
    first, to_come = {}, deque(enumerate(requests(workload, seed)))
    for step in count():
        while to_come and int(to_come[0][0] / rate) == step:
            number, (prompt, max_tokens) = to_come.popleft()
            replicas.add_request(prompt, SamplingParams(max_tokens), number)
        for output in replicas.step():
            first.setdefault(output.request_id, 1 + step - int(output.request_id / rate))
        if len(first) == REQUESTS:
            return Score(sum(replicas.prompt_tokens), percentile(list(first.values()), 95))


@lru_cache(8)
def baselines(workload: str, seed: int = 0) -> dict[str, Score]:
    """Return the scores of three policies."""
    turns, indices = count(), range(REPLICAS)
    policies = {
        "round robin": lambda length, replicas: next(turns) % REPLICAS,
        "least outstanding tokens": lambda length, replicas: min(indices, key=lambda n: replicas[n].outstanding),
        "cache alone": lambda length, replicas: max(
            indices, key=lambda n: (replicas[n].cached, -replicas[n].outstanding)
        ),
    }
    return {name: score_route(route, workload, seed) for name, route in policies.items()}


def standing(score: Score, workload: str, seed: int = 0) -> str:
    """Return where a score stands, in words."""
    known = ", ".join(f"{name} {baseline}" for name, baseline in baselines(workload, seed).items())
    return f"on {workload!r}, {score} ({known})"
