"""Reports arrive completely, at the front end alone, and a connection that ends is a lost replica."""

import asyncio
import pickle
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from helpers import SamplingParams
from helpers.cluster import report_stream
from helpers.cluster.replica import ReplicaLost
from helpers.cluster.report_stream import (
    FRONT_END,
    LENGTH,
    REPLICA,
    SIZE,
    ReportAddress,
    ReportReader,
    _authenticate,
    send_reports,
)
from tests.gated_thread import in_loop, wait_until
from tests.local_replicas import LocalReplica

LOCALHOST = "127.0.0.1"


@asynccontextmanager
async def sending():
    """Run a replica that sends its reports."""
    one = LocalReplica("r0", shut=False)
    try:
        one.address = await send_reports(one.replica.report, LOCALHOST)
        yield one
    finally:
        one.kill()
        await one.replica.stop()


@in_loop
async def test_every_token_arrives_once_and_in_order_and_heartbeats_follow():
    async with sending() as replica:
        reports, outputs = ReportReader(replica.address), []
        replica.add("a", [0, 1], SamplingParams(30), 0, {0: []})
        while not outputs or outputs[-1].finish_reason is None:
            outputs += (await reports.next()).outputs
        assert [token_id for one in outputs for token_id in one.new_token_ids] == list(range(2, 32))
        assert (await reports.next()).snapshot.num_running == 0
        reports.close()


@in_loop
async def test_only_the_first_connection_that_knows_the_secret_gets_reports():
    async with sending() as replica:
        stranger = ReportReader(replace(replica.address, secret=bytes(32)))
        with pytest.raises(ReplicaLost):
            await stranger.next()
        reports = ReportReader(replica.address)
        assert (await reports.next()).outputs == []
        with pytest.raises(ReplicaLost):
            await ReportReader(replica.address).next()
        assert (await reports.next()).outputs == []
        reports.close()


@in_loop
async def test_reports_merge_and_do_not_queue_while_the_front_end_reads_none():
    async with sending() as replica:
        reports = ReportReader(replica.address)
        await reports.next()
        delivered, deliver = [], replica.replica._deliver
        replica.replica._deliver = lambda outputs, snapshot: delivered.extend(outputs) or deliver(outputs, snapshot)
        replica.add("a", [0, 1], SamplingParams(30), 0, {0: []})
        await wait_until(lambda: delivered and delivered[-1].finish_reason)
        read = []
        while not read or read[-1][-1].finish_reason is None:
            if outputs := (await reports.next()).outputs:
                read.append(outputs)
        assert len(read) <= 2  # the one on its way, and all others in one
        reports.close()


@in_loop
async def test_a_connection_that_proves_the_secret_after_another_one_gets_no_reports():
    async with sending() as replica:
        reader, writer = await asyncio.open_connection(replica.address.host, replica.address.port)
        reports = ReportReader(replica.address)
        await reports.next()
        await _authenticate(reader, writer, replica.address.secret, FRONT_END, REPLICA)
        assert await reader.read() == b""
        writer.close()
        reports.close()


@in_loop
async def test_a_silent_connection_is_closed(monkeypatch):
    monkeypatch.setattr(report_stream, "PROOF_SECONDS", 0.01)
    async with sending() as replica:
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
            await ReportReader(ReportAddress(LOCALHOST, server.sockets[0].getsockname()[1])).next()
    assert not Unpickled.seen


def test_the_end_of_the_event_loop_ends_a_connection_without_an_error(caplog):
    async def connect():
        replica = LocalReplica("r0", shut=False)
        await ReportReader(await send_reports(replica.replica.report, LOCALHOST)).next()
        replica.kill()
        await replica.replica.stop()

    asyncio.run(connect())
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", LENGTH.pack(100), LENGTH.pack(100) + b"half"])
@in_loop
async def test_a_connection_that_ends_is_a_lost_replica(sent):
    async def end(reader, writer):
        await _authenticate(reader, writer, address.secret, REPLICA, FRONT_END)
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(end, LOCALHOST, 0) as server:
        address = ReportAddress(LOCALHOST, server.sockets[0].getsockname()[1])
        with pytest.raises(ReplicaLost, match="its connection has ended"):
            await ReportReader(address).next()
