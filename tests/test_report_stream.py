"""Reports arrive completely, at the front end alone, and a connection that ends is a lost replica."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from helpers import SamplingParams
from helpers.cluster.replica import ReplicaLost
from helpers.cluster.report_stream import LENGTH, ReportAddress, ReportReader, send_reports
from tests.gated_thread import in_loop
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


@pytest.mark.parametrize("sent", [b"", LENGTH.pack(100), LENGTH.pack(100) + b"half"])
@in_loop
async def test_a_connection_that_ends_is_a_lost_replica(sent):
    async def end(reader, writer):
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(end, LOCALHOST, 0) as server:
        with pytest.raises(ReplicaLost, match="its connection has ended"):
            await ReportReader(ReportAddress(LOCALHOST, server.sockets[0].getsockname()[1])).next()
