"""Reports travel over a connection of their own, from a replica's process to the front end.

Ray starts replicas and hands them requests. A call through Ray for each report would make the engine wait, since both
need the interpreter lock of the replica's process. With one user, the connection saves 2 ms of processor time per token
(benchmarks/README.md). A replica sends its next report once the one before has left. A front end that is slow to read
thus gets several iterations in one report, and nothing queues up.

Reports are pickled, so the front end must connect to its own replicas only: their addresses come through Ray. A replica
sends its reports to the first connection that begins with its secret.
"""

import asyncio
import contextlib
import hmac
import pickle
import secrets
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .replica import ReplicaLost, Report

LENGTH = struct.Struct("!Q")  # before each report, its number of bytes
LIMIT = 2**20  # bytes that are read ahead


@dataclass(frozen=True)
class ReportAddress:
    """Where a replica's reports can be read, once."""

    host: str
    port: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


async def send_reports(next_report: Callable[[], Awaitable[Report]], host: str) -> ReportAddress:
    """Listen at one of this machine's addresses, and send a replica's reports to the front end."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            if not hmac.compare_digest(await reader.readexactly(len(address.secret)), address.secret):
                return
            server.close()
            writer.transport.set_write_buffer_limits(high=0)  # `drain` returns once all bytes have left
            while True:
                report = pickle.dumps(await next_report())
                writer.write(LENGTH.pack(len(report)) + report)
                await writer.drain()

    server = await asyncio.start_server(send, host, 0)
    address = ReportAddress(*server.sockets[0].getsockname()[:2])
    return address


class ReportReader:
    """Reads a replica's reports. The first call of `next` connects, on the event loop that makes it."""

    def __init__(self, address: ReportAddress):
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def next(self) -> Report:
        """Return the next report.

        Raises:
            ReplicaLost: the connection has ended, or there was none.
        """
        try:
            if self._reader is None:
                address = self._address
                self._reader, self._writer = await asyncio.open_connection(address.host, address.port, limit=LIMIT)
                self._writer.write(address.secret)
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLost("its connection has ended") from error

    def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
