"""Replicas for tests, without Ray: engines of this process stand for those of other processes."""

import asyncio
import itertools
import threading
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import httpx

from helpers import EngineConfig, SamplingParams
from helpers.cluster import replica as replica_module
from helpers.cluster.app import make_cluster_app
from helpers.cluster.fleet_description import FleetDescription
from helpers.cluster.replica import Replica, ReplicaLost, Report
from helpers.cluster.replica_client import ReplicaClient
from helpers.cluster.routing import LeastOutstandingTokens
from helpers.simulator import Simulator
from tests.support.gated_thread import wait_until

ENOUGH = 10_000  # permits


class LocalReplica:
    """A replica in this process. `lose` and `hang` do to it what can happen to a process.

    It makes as many iterations as it has permits. The token at each position of a sequence is the position itself.
    """

    def __init__(self, name: str, shut: bool):
        self.name, self.permits = name, threading.Semaphore(0 if shut else ENOUGH)
        config = EngineConfig(max_batch_size=2, num_blocks=40, block_size=2, trace_length=100)
        self.replica = Replica(Simulator(config, self._seconds, context_length=40, next_token=len))
        self.replica.start()
        self.info, self.killed, self._lost = self.replica.info, False, asyncio.Event()
        self.add, self.abort, self.set_pace = self.replica.add, self.replica.abort, self.replica.set_pace

    def _seconds(self, plan) -> float:
        self.permits.acquire()
        return 1.0

    async def report(self) -> Report:
        futures = [asyncio.ensure_future(coroutine) for coroutine in (next_report(self.replica), self._lost.wait())]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.is_set():
                raise ReplicaLost("its process has ended")
            return futures[0].result()
        finally:
            for future in futures:
                future.cancel()

    def lose(self) -> None:
        self._lost.set()

    def hang(self) -> None:
        self.report = lambda: asyncio.sleep(1e6)

    def kill(self) -> None:
        self.killed = True
        self.permits.release(ENOUGH)


async def next_report(replica: Replica) -> Report:
    """Return what is new in a replica of this process."""
    future = asyncio.get_running_loop().create_future()
    replica.next_report(lambda report: future.cancelled() or future.set_result(report))
    return await future


@asynccontextmanager
async def running(
    num_replicas=2, shut=False, max_queue=8, timeout=10.0, restarts=True, all_shut=False, most=None, **options
):
    """Run replicas of two rows each.

    Args:
        num_replicas: how many there are at first, and `most` at any time.
        shut: whether the first ones have no permits; `all_shut`: whether none has any.
        restarts: whether further ones can be started; otherwise each needs a permit of `client.may_start`.
        max_queue, timeout, options: of the `ReplicaClient`.

    Yields:
        The client; `client.started` lists all replicas that were ever ready.
    """
    numbers, started = itertools.count(), []
    may_start = asyncio.Semaphore(ENOUGH if restarts else num_replicas)

    async def start_replica() -> LocalReplica:
        await may_start.acquire()
        started.append(LocalReplica(f"r{next(numbers)}", all_shut or (shut and len(started) < num_replicas)))
        return started[-1]

    replicas = [await start_replica() for _ in range(num_replicas)]
    client = ReplicaClient(
        FleetDescription(replicas[0].info, most or num_replicas),
        max_queue,
        0.0,
        replicas=replicas,
        router=LeastOutstandingTokens(),
        start_replica=start_replica,
        timeout=timeout,
        **options,
    )
    client.started, client.seen, client.may_start = started, [], may_start
    client.observers.append(lambda outputs, snapshot: client.seen.append((outputs, snapshot)))
    with patch.object(replica_module, "HEARTBEAT", 0.02):  # a drained replica ends with its next report
        client.start()
        await wait_until(lambda: len(client.replicas) == num_replicas)
        try:
            yield client
        finally:
            await client.stop()
            for replica in started:
                replica.kill()
                await replica.replica.stop()


def http_client(client: ReplicaClient, **options) -> httpx.AsyncClient:
    """Return a client of the HTTP application of replicas; the options are those of `make_cluster_app`."""
    app = make_cluster_app(client.engine, lambda *_: client, **options)
    connection = SimpleNamespace(cancel_if_lost=nullcontext, send_at_once=lambda make_part: False)

    async def connected(scope, receive, send):
        await app(scope | {"state": {"connection": connection}}, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(connected), base_url="http://front")


def is_empty(client: ReplicaClient) -> bool:
    return not (
        client.num_in_flight or client._streams or client._num_unfinished or client._aborted
        or client.dispatcher.requests
        or any(replica.outstanding_tokens for replica in client.dispatcher.replicas.values())
    )  # fmt: skip


def let(replica: LocalReplica, passes: int) -> None:
    replica.permits.release(passes)


async def submit(client: ReplicaClient, prompt: list[int], max_tokens: int, id: str = "r"):
    stream, _ = await client.submit(id, [prompt], SamplingParams(max_tokens))
    return stream


async def tokens(stream) -> list[int]:
    """Return all tokens of a stream with one choice."""
    with stream:
        return [token_id async for _, output in stream for token_id in output.new_token_ids]
