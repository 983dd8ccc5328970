"""The routing contest: a student's `route()` chooses replicas, and its scores are counts of tokens and of iterations.

The replicas are simulators in lock-step behind the course's dispatcher, so a score depends on nothing but the choices.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from ..cluster.lockstep import LockstepReplicas
from ..cluster.routing import LeastOutstandingTokens, PrefixAware, Replica, RoundRobin, Router
from ..engine import EngineConfig, SamplingParams
from ..metrics import percentile
from ..simulator import Simulator
from .comparing import kind
from .exercise import Wrong

REPLICAS, PREFIXES, PREFIX, REQUESTS, OUTPUT = 4, 8, 256, 120, 8
SIGNATURE = "route(length, replicas)"
WORKLOADS = {"even": 0.0, "popular": 0.8}  # the share of the requests that have the first prefix in any case


@dataclass(frozen=True)
class KnownReplica:
    """What a router knows of a replica when a request arrives.

    Attributes:
        cached: how many tokens of the request's prompt the replica has cached.
        outstanding: how many tokens its unfinished requests may still compute.
    """

    cached: int
    outstanding: int


@dataclass(frozen=True)
class Score:
    """The counts of a run: prompt tokens computed by all replicas, and the p95 of TTFT in iterations."""

    prompt_tokens: int
    late: float


class _Asking:
    """A router that asks a function."""

    def __init__(self, route: Callable):
        self.route = route

    def choose(self, prompt_token_ids, replicas: list[Replica]) -> int:
        known = [KnownReplica(one.cached_tokens(prompt_token_ids), one.outstanding_tokens) for one in replicas]
        return choose(self.route, len(prompt_token_ids), known)


def choose(route: Callable, length: int, replicas: list[KnownReplica]) -> int:
    """Return the index that a function returns for a request.

    Raises:
        Wrong: it is not the index of a replica.
    """
    chosen = route(length, list(replicas))
    if isinstance(chosen, bool) or not hasattr(chosen, "__index__"):
        raise Wrong(f"should return the index of a replica, an int, but returned {kind(chosen)}.")
    if not 0 <= chosen < len(replicas):
        raise Wrong(f"should return an index from 0 to {len(replicas) - 1}, but returned {chosen}.")
    return int(chosen)


@lru_cache(8)
def prompts(workload: str, seed: int = 0) -> tuple[list[int], ...]:
    """Return prompts that begin with one of eight prefixes."""
    draw = Random(f"{workload} {seed}")

    def text(tokens: int) -> list[int]:
        return [draw.randrange(10**6) for _ in range(tokens)]

    prefixes = [text(PREFIX) for _ in range(PREFIXES)]
    chosen = [0 if draw.random() < WORKLOADS[workload] else draw.randrange(PREFIXES) for _ in range(REQUESTS)]
    return tuple(prefixes[one] + text(draw.randint(8, 48)) for one in chosen)


def score(router: Router, workload: str, seed: int = 0) -> Score:
    """Run a workload, two requests of which arrive before every iteration."""
    config = EngineConfig(max_batch_size=8, max_tokens_per_step=320, num_blocks=600, block_size=16)
    replicas = LockstepReplicas([Simulator(config) for _ in range(REPLICAS)], router)
    waiting, first, step = list(enumerate(prompts(workload, seed))), defaultdict(int), 0
    while waiting or replicas.has_unfinished_requests():
        for number, prompt in waiting[:2]:
            replicas.add_request(prompt, SamplingParams(max_tokens=OUTPUT), number)
        del waiting[:2]
        for output in replicas.step():
            first.setdefault(output.request_id, 1 + step - output.request_id // 2)
        step += 1
    return Score(sum(replicas.prompt_tokens), percentile(list(first.values()), 95))


def score_route(route: Callable, workload: str, seed: int = 0) -> Score:
    """Run a workload with a student's function.

    Raises:
        Wrong: the function returns something that is not the index of a replica.
    """
    return score(_Asking(route), workload, seed)


@lru_cache(8)
def baselines(workload: str, seed: int = 0) -> dict[str, Score]:
    """Return the counts of the lesson's policies."""
    policies = {
        "round robin": RoundRobin(),
        "least outstanding tokens": LeastOutstandingTokens(),
        "cache alone": PrefixAware(weight=0),
    }
    return {name: score(policy, workload, seed) for name, policy in policies.items()}
