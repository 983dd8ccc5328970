"""Calls and reports arrive completely and in order, and a connection that ends is a lost replica."""

import asyncio
import pickle
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from helpers import SamplingParams
from helpers.cluster import connection
from helpers.cluster.connection import (
    FRONT_END,
    LENGTH,
    REPLICA,
    SIZE,
    ReplicaAddress,
    ReplicaConnection,
    _authenticate,
    serve_replica,
)
from helpers.cluster.replica import ReplicaLost
from tests.support.gated_thread import in_loop, wait_until
from tests.support.local_replicas import LocalReplica

LOCALHOST = "127.0.0.1"


@asynccontextmanager
async def serving():
    """Run a replica that a front end can connect to."""
    replica = LocalReplica("r0", shut=False)
    try:
        replica.address = await serve_replica(replica.replica, LOCALHOST)
        yield replica
    finally:
        replica.kill()
        await replica.replica.stop()


@in_loop
async def test_every_token_arrives_once_and_in_order_and_heartbeats_follow():
    async with serving() as replica:
        front_end, outputs = ReplicaConnection(replica.address), []
        front_end.add("a", [0, 1], SamplingParams(30), 0, {0: []})  # waits for the connection
        front_end.add("aborted", [0, 1], SamplingParams(30), 0, {0: []})
        front_end.abort("aborted")
        while not outputs or outputs[-1].finish_reason is None:
            outputs += (await front_end.report()).outputs
        assert [token_id for output in outputs for token_id in output.new_token_ids] == list(range(2, 32))
        assert (await front_end.report()).snapshot.num_running == 0
        front_end.close()


@in_loop
async def test_only_the_first_connection_that_knows_the_secret_is_served():
    async with serving() as replica:
        stranger = ReplicaConnection(replace(replica.address, secret=bytes(32)))
        with pytest.raises(ReplicaLost, match="its connection has ended: the other side does not know the secret"):
            await stranger.report()
        front_end = ReplicaConnection(replica.address)
        assert (await front_end.report()).outputs == []
        with pytest.raises(ReplicaLost):
            await ReplicaConnection(replica.address).report()
        assert (await front_end.report()).outputs == []
        front_end.close()


@in_loop
async def test_reports_merge_and_do_not_queue_while_the_front_end_asks_for_none():
    async with serving() as replica:
        front_end = ReplicaConnection(replica.address)
        await front_end.report()
        delivered, deliver = [], replica.replica._deliver
        replica.replica._deliver = lambda outputs, snapshot: delivered.extend(outputs) or deliver(outputs, snapshot)
        replica.add("a", [0, 1], SamplingParams(30), 0, {0: []})
        await wait_until(lambda: delivered and delivered[-1].finish_reason)
        assert len((await front_end.report()).outputs) == 30
        front_end.close()


@in_loop
async def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "PROOF_SECONDS", 0.01)
    async with serving() as replica:
        reader, writer = await asyncio.open_connection(replica.address.host, replica.address.port)
        await reader.read()  # until the other side closes the connection
        writer.close()


class Unpickled:
    seen = False

    def __reduce__(self):
        return setattr, (Unpickled, "seen", True)


@pytest.mark.parametrize("echoes", [False, True])
@in_loop
async def test_nothing_is_unpickled_from_a_process_without_the_secret(echoes):
    """A replica's port may be taken by another process. It could send each message back, also as a proof."""

    async def impersonate(reader, writer):
        for _ in range(2):
            received = await reader.readexactly(SIZE)
            writer.write(received if echoes else bytes(SIZE))
        report = pickle.dumps(Unpickled())
        writer.write(LENGTH.pack(len(report)) + report)
        writer.close()

    async with await asyncio.start_server(impersonate, LOCALHOST, 0) as server:
        with pytest.raises(ReplicaLost):
            await ReplicaConnection(ReplicaAddress(LOCALHOST, server.sockets[0].getsockname()[1])).report()
    assert not Unpickled.seen


@pytest.mark.parametrize("sent", [b"", LENGTH.pack(100), LENGTH.pack(100) + b"half"])
@in_loop
async def test_a_connection_that_ends_is_a_lost_replica(sent):
    async def end(reader, writer):
        await _authenticate(reader, writer, address.secret, REPLICA, FRONT_END)
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(end, LOCALHOST, 0) as server:
        address = ReplicaAddress(LOCALHOST, server.sockets[0].getsockname()[1])
        with pytest.raises(ReplicaLost, match="its connection has ended"):
            await ReplicaConnection(address).report()
