"""Disaggregation: some replicas compute the prompts, and others all further tokens.

The idea is DistServe's (Zhong et al., OSDI 2024). A prefill then delays no decodes of other requests, and each kind of
replica can have settings of its own. In return, the keys and values of each prompt have to move.

In this model, a transfer takes a time in proportion to the prompt, however many others take place. It occupies no
blocks on either side, and begins as soon as the prompt is computed. A sequence that is preempted on a decode replica is
computed again there, its prompt included.

The replicas of each kind are a fleet of their own. No decode affects a prefill. So the first fleet runs as any other,
and the ends of its transfers are the arrivals of the second one.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from ..cluster.routing import Router
from ..engine import BlockManager, EngineConfig, Sequence, UnlimitedMemory
from .cost_model import CostModel
from .fleet import TimedRequest, check_trace
from .fleet_result import FleetResult
from .replica_set import ReplicaSet
from .simulated_replica import FinishedRequest, FleetClock, SimulatedReplica
from .simulator import TOKEN


def simulate_disaggregated(
    requests: Iterable[TimedRequest],
    config: EngineConfig,
    cost: CostModel,
    prefill_replicas: int,
    decode_replicas: int,
    prefill_router: Router,
    decode_router: Router,
    *,
    seconds_per_token: float,
    decode_config: EngineConfig | None = None,
) -> FleetResult:
    """Run a trace on replicas that prefill and replicas that decode.

    Args:
        requests: as for `simulate_fleet`. A request of one output token needs no decode replica.
        config: the settings of the prefill replicas.
        cost: the seconds of an iteration, on either kind of replica.
        prefill_replicas: how many compute the prompt and the first token of each request.
        decode_replicas: how many compute the other tokens.
        prefill_router, decode_router: choose the replica of each request.
        seconds_per_token: how long the keys and values of a token take from one replica to another.
        decode_config: the settings of the decode replicas; `config` if omitted. They cache no prefixes, and take a
            request in while others decode.

    Returns:
        The result of all replicas: first those that prefill, then those that decode.

    Raises:
        ValueError: as for `simulate_fleet`, or `seconds_per_token` is not a number of at least 0.
    """
    if not 0 <= seconds_per_token < inf:
        raise ValueError(f"seconds_per_token must be a number of at least 0, not {seconds_per_token}.")
    decode_config = replace(decode_config or config, prefix_caching=False, mixed_batches=True)
    result = FleetResult()
    transfers = _Transfers(seconds_per_token, result.add)
    make_prefill, make_decode = partial(SimulatedReplica, config, cost), partial(DecodeReplica, decode_config, cost)
    prefills = ReplicaSet(make_prefill, prefill_replicas, prefill_router, transfers.begin)
    decodes = ReplicaSet(make_decode, decode_replicas, decode_router, result.add)

    def check(prompt_tokens: int, output_tokens: int) -> None:
        prefills.check(prompt_tokens, min(1, output_tokens))
        decodes.check(prompt_tokens, output_tokens)

    prompts = transfers.prompts(check_trace(requests, config, check))
    for _ in decodes.run(transfers.arrivals(prefills.run(prompts))):
        pass
    prefills.report(result)
    decodes.report(result)
    return result


class _Transfers:
    """What is between the two kinds of replicas: keys and values that move, and the lengths of outputs.

    Args:
        seconds_per_token: how long the keys and values of a token take.
        on_finish: called with each request that has all of its tokens once its prompt is computed.
    """

    def __init__(self, seconds_per_token: float, on_finish: Callable[[FinishedRequest], None]):
        self._seconds_per_token, self._on_finish = seconds_per_token, on_finish
        self._output_tokens: dict[int, int] = {}  # of each request, by number, until its prompt is computed
        self._moving: list[tuple[float, int, Sequence]] = []  # a heap: when which sequence arrives

    def prompts(self, requests: Iterable[tuple[float, Sequence]]) -> Iterator[tuple[float, Sequence]]:
        """Yield the arrivals of requests for one token each."""
        for arrival, sequence in requests:
            self._output_tokens[sequence.request_id], sequence.request.max_tokens = sequence.max_tokens, 1
            yield arrival, sequence

    def begin(self, finished: FinishedRequest) -> None:
        """Begin to move the keys and values of a prompt that is computed."""
        number, prompt_tokens = finished.request_id, finished.prompt_tokens
        max_tokens = self._output_tokens.pop(number)
        if max_tokens == 1:
            self._on_finish(finished)
            return
        sequence = Sequence(number, [TOKEN] * prompt_tokens, max_tokens, arrival=finished.arrival)
        sequence.token_ids.append(TOKEN)
        sequence.token_times.append(finished.first_token)
        sequence.computed = prompt_tokens
        heapq.heappush(self._moving, (finished.first_token + self._seconds_per_token * prompt_tokens, number, sequence))

    def arrivals(self, times: Iterable[float]) -> Iterator[tuple[float, Sequence]]:
        """Yield when which sequence arrives, given times up to which all prompts are computed."""
        for time in times:
            while self._moving and self._moving[0][0] <= time:  # no prompt that is still to be computed arrives by then
                arrival, _, sequence = heapq.heappop(self._moving)
                yield arrival, sequence


class DecodeReplica(SimulatedReplica):
    """A replica that uses the keys and values with which a sequence arrives: those of all tokens but the newest."""

    def __init__(self, config: EngineConfig, cost: CostModel, clock: FleetClock | None = None):
        super().__init__(config, cost, clock)
        unlimited = config.num_blocks is None
        self.scheduler.memory = (
            _UnlimitedMemory() if unlimited else _BlockManager(config.num_blocks, config.block_size, False)
        )


class _UnlimitedMemory(UnlimitedMemory):
    """Keeps a waiting sequence's `computed`: how many tokens have keys and values that arrived with it."""

    def cached_tokens(self, sequence: Sequence) -> int:
        return sequence.computed


class _BlockManager(BlockManager):
    """Takes those tokens in once there are blocks for them."""

    def cached_tokens(self, sequence: Sequence) -> int:
        return sequence.computed

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        if sequence in self.tables:
            return super().allocate(sequence, tokens)
        received = sequence.computed
        if not super().allocate(sequence, received + tokens):
            return False
        sequence.computed = received
        return True
