"""Routing: which replica gets a request. Each policy is a method `choose`, which can read three facts about a replica.

    RoundRobin              in turn; reads none of them
    LeastOutstandingTokens  the replica with the fewest tokens left to compute
    PrefixAware             cached tokens of the prompt count for a replica, outstanding tokens against it
    FreeRowsFirst           any of these, among the replicas that have a free row

The front end, the simulator's command line and the playground use each of the first three behind `FreeRowsFirst`.

Replicas become unequal once they cache prefixes: a prompt costs least where its beginning is cached. A router that
considers only the cache sends all requests with a popular prefix to one replica. Considering the load prevents that.
"""

import itertools
from collections.abc import Sequence as Seq
from functools import partial
from types import SimpleNamespace
from typing import Protocol


class RoutableReplica(Protocol):
    """What a router reads of a replica; `ReplicaState` is one.

    Attributes:
        outstanding_tokens: how many tokens its unfinished requests may still compute.
        free_rows: its rows minus its unfinished outputs, each of which takes one; below 0 if some of them wait.
    """

    outstanding_tokens: int
    free_rows: int

    def cached_tokens(self, prompt_token_ids: Seq[int]) -> int:
        """Return how many tokens of a prompt, from the first, the replica need not compute."""


def with_salt(replicas: Seq[RoutableReplica], salt: bytes) -> Seq[RoutableReplica]:
    """Return what a router reads of replicas now, for a request whose blocks have this salt, such as an adapter's.

    With a salt, the method `cached_tokens` of the replicas must take it as an argument of this name.
    """
    return [
        SimpleNamespace(
            outstanding_tokens=replica.outstanding_tokens,
            free_rows=replica.free_rows,
            cached_tokens=partial(replica.cached_tokens, salt=salt),
        )
        if salt
        else replica
        for replica in replicas
    ]


class Router(Protocol):
    """A routing policy."""

    def choose(self, prompt_token_ids: Seq[int], replicas: Seq[RoutableReplica]) -> int:
        """Return the index of the replica that gets a request.

        Args:
            prompt_token_ids: the request's prompt, at least one token.
            replicas: the replicas that can take it, at least one.
        """


class RoundRobin:
    """Sends requests to the replicas in turn."""

    def __init__(self):
        self._turns = itertools.count()

    def choose(self, prompt_token_ids: Seq[int], replicas: Seq[RoutableReplica]) -> int:
        return next(self._turns) % len(replicas)


class LeastOutstandingTokens:
    """Sends a request to the replica with the fewest outstanding tokens; of equal replicas, to the first."""

    def choose(self, prompt_token_ids: Seq[int], replicas: Seq[RoutableReplica]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].outstanding_tokens)


class PrefixAware:
    """Sends a request to the replica with the highest score: the cached share of the prompt minus `weight` times load.

    The load of a replica is its outstanding tokens per token of the prompt. So another replica gets the request as soon
    as it has fewer outstanding tokens than the one with the cached prefix, by more than the cached tokens / `weight`.
    """

    weight = 0.25  # 0 considers the cache alone; with a large weight, the cache decides only between equal loads

    def choose(self, prompt_token_ids: Seq[int], replicas: Seq[RoutableReplica]) -> int:
        length = len(prompt_token_ids)

        def score(index: int) -> tuple[float, int]:
            replica = replicas[index]
            share, load = replica.cached_tokens(prompt_token_ids) / length, replica.outstanding_tokens / length
            return share - self.weight * load, -replica.outstanding_tokens

        return max(range(len(replicas)), key=score)


class FreeRowsFirst:
    """Lets another policy choose among the replicas that have a free row, as long as there are any.

    Outstanding tokens alone do not say where a request has to wait. A replica whose rows all hold the ends of short
    outputs has few, and one with a single long output has more and rows to spare.

    Args:
        router: the other policy.
    """

    def __init__(self, router: Router):
        self.router = router

    def choose(self, prompt_token_ids: Seq[int], replicas: Seq[RoutableReplica]) -> int:
        free = [index for index, replica in enumerate(replicas) if replica.free_rows > 0] or range(len(replicas))
        return free[self.router.choose(prompt_token_ids, [replicas[index] for index in free])]


ROUTERS = {
    "round_robin": RoundRobin,
    "least_outstanding_tokens": LeastOutstandingTokens,
    "prefix_aware": PrefixAware,
}
