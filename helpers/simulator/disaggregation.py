"""Disaggregation: some replicas compute the prompts, and others all further tokens.

The idea is DistServe's (Zhong et al., OSDI 2024). A prefill then delays no decodes of other requests, and each kind of
replica can have settings of its own. In return, the keys and values of each prompt have to move.

In this model, a transfer takes a time in proportion to the prompt, however many others take place. It occupies no
blocks on either side, and begins as soon as the prompt is computed. A sequence that is preempted on a decode replica is
computed again there, its prompt included.
"""

import heapq
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import inf

from ..engine import BlockManager, EngineConfig, Sequence, UnlimitedMemory
from .cost_model import CostModel
from .fleet import TimedRequest, check_trace
from .fleet_result import FleetResult
from .replica import FinishedRequest, FleetClock, SimulatedReplica
from .replica_set import ReplicaSet, RoutingPolicy
from .simulator import TOKEN


def simulate_disaggregated(
    requests: Iterable[TimedRequest],
    config: EngineConfig,
    cost: CostModel,
    prefill_replicas: int,
    decode_replicas: int,
    prefill_router: RoutingPolicy,
    decode_router: RoutingPolicy,
    *,
    seconds_per_token: float,
    decode_config: EngineConfig | None = None,
    skip: bool = True,
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
        skip: as for `SimulatedReplica`.

    Returns:
        The result of all replicas: first those that prefill, then those that decode.

    Raises:
        ValueError: as for `simulate_fleet`, or `seconds_per_token` is not a number of at least 0.
    """
    if not 0 <= seconds_per_token < inf:
        raise ValueError(f"seconds_per_token must be a number of at least 0, not {seconds_per_token}.")
    decode_config = replace(decode_config or config, prefix_caching=False, mixed_batches=True)
    result, lengths = FleetResult(), {}  # of the outputs, by number, until their prompts are computed
    transfers: list[tuple[float, int, Sequence]] = []  # a heap: when which sequence arrives

    def begin_transfer(finished: FinishedRequest) -> None:
        number, prompt_tokens = finished.request_id, finished.prompt_tokens
        output_tokens = lengths.pop(number)
        if output_tokens == 1:
            result.add(finished)
            return
        sequence = Sequence(number, [TOKEN] * prompt_tokens, output_tokens, arrival=finished.arrival)
        sequence.token_ids.append(TOKEN)
        sequence.token_times.append(finished.first_token)
        heapq.heappush(transfers, (finished.first_token + seconds_per_token * prompt_tokens, number, sequence))

    def end_transfers(time: float) -> None:
        while transfers and transfers[0][0] <= time:
            now, _, sequence = heapq.heappop(transfers)
            decodes.advance(now)
            decodes.add(sequence)

    def check(prompt_tokens: int, output_tokens: int) -> None:
        prefills.check(prompt_tokens, min(1, output_tokens))
        decodes.check(prompt_tokens, output_tokens)

    make_prefill_replica = partial(SimulatedReplica, config, cost, skip=skip)
    make_decode_replica = partial(DecodeReplica, decode_config, cost, skip=skip)
    prefills = ReplicaSet(make_prefill_replica, prefill_replicas, prefill_router, begin_transfer)
    decodes = ReplicaSet(make_decode_replica, decode_replicas, decode_router, result.add)
    for number, (arrival, token_ids, output_tokens) in enumerate(check_trace(requests, config, check)):
        prefills.advance(arrival)
        end_transfers(arrival)  # no prompt that is still to be computed is ready by then
        lengths[number] = output_tokens
        prefills.add(Sequence(number, token_ids, 1, arrival=arrival))
    prefills.finish()
    end_transfers(inf)
    decodes.finish()
    for replicas in (prefills, decodes):
        replicas.report(result)
    return result


class DecodeReplica(SimulatedReplica):
    """A replica whose sequences arrive with the keys and values of all their tokens but the newest."""

    def __init__(self, config: EngineConfig, cost: CostModel, clock: FleetClock | None = None, skip: bool = True):
        super().__init__(config, cost, clock, skip)
        unlimited = config.num_blocks is None
        self.scheduler.memory = (
            _UnlimitedMemory() if unlimited else _BlockManager(config.num_blocks, config.block_size, False)
        )

    def add_sequence(self, sequence: Sequence, now: float) -> None:
        self.scheduler.memory.received.add(sequence)
        super().add_sequence(sequence, now)

    def _tokens_to_prefill(self, sequence: Sequence) -> int:
        return 0


class _ReceivingMemory:
    """Lets a received sequence count as computed once there is memory for it.

    Attributes:
        received: the sequences that have no memory yet. A preempted one is not among them: it is computed again.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.received: set[Sequence] = set()

    def cached_tokens(self, sequence: Sequence) -> int:
        return sequence.num_shareable_tokens if sequence in self.received else super().cached_tokens(sequence)

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        if sequence not in self.received:
            return super().allocate(sequence, tokens)
        if not super().allocate(sequence, sequence.num_shareable_tokens + tokens):
            return False
        sequence.computed = sequence.num_shareable_tokens
        self.received.remove(sequence)
        return True


class _BlockManager(_ReceivingMemory, BlockManager):
    pass


class _UnlimitedMemory(_ReceivingMemory, UnlimitedMemory):
    pass
