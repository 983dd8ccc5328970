"""Reports travel over a connection of their own, from a replica's process to the front end.

Ray starts replicas and hands them requests. A call through Ray for each report would make the engine wait, since both
need the interpreter lock of the replica's process. With one user, each token arrives about 0.8 ms earlier through the
connection. The front end acknowledges each report, and a replica sends its next one only then. A
front end that is slow to read thus gets several iterations in one report, and at most one report waits to be read.

Unpickling a report can run any code. So the front end reads one only after the other side has proved that it knows the
replica's secret, which came through Ray. The replica asks for the same proof, and sends its reports to the first
connection that gives it.
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
READ = b"\1"  # acknowledges a report
SIZE = 32  # bytes of a secret, a nonce and a proof
PROOF_SECONDS = 10.0  # in which a connection has to prove that it knows the secret
FRONT_END, REPLICA = b"front end", b"replica"  # with one role for both sides, a proof could be sent back as one's own


@dataclass(frozen=True)
class ReportAddress:
    """Where a replica's reports can be read, once."""

    host: str
    port: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SIZE), repr=False)


async def send_reports(next_report: Callable[[], Awaitable[Report]], host: str) -> ReportAddress:
    """Listen at one of this machine's addresses, and send a replica's reports to the front end."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A cancellation is suppressed too: Python 3.11 would log it as an error.
        ends = OSError, asyncio.IncompleteReadError, asyncio.CancelledError
        with contextlib.suppress(*ends), contextlib.closing(writer):
            async with asyncio.timeout(PROOF_SECONDS):
                await _authenticate(reader, writer, address.secret, REPLICA, FRONT_END)
            if not server.is_serving():  # another connection was first
                return
            server.close()
            while True:
                report = pickle.dumps(await next_report())
                writer.write(LENGTH.pack(len(report)) + report)
                await reader.readexactly(len(READ))

    server = await asyncio.start_server(send, host, 0)
    address = ReportAddress(*server.sockets[0].getsockname()[:2])
    return address


async def _authenticate(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, role: bytes, other_role: bytes
) -> None:
    """Prove to the other side that this side knows the secret, and check its proof.

    Raises:
        ConnectionError: the proof is wrong.
        asyncio.IncompleteReadError: the connection has ended.
    """
    nonce = secrets.token_bytes(SIZE)
    writer.write(nonce)
    writer.write(hmac.digest(secret, role + await reader.readexactly(SIZE), "sha256"))
    if not hmac.compare_digest(await reader.readexactly(SIZE), hmac.digest(secret, other_role + nonce, "sha256")):
        raise ConnectionRefusedError("the other side does not know the secret")


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
                await _authenticate(self._reader, self._writer, address.secret, FRONT_END, REPLICA)
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            report = await self._reader.readexactly(length)
            self._writer.write(READ)
            return pickle.loads(report)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLost("its connection has ended") from error

    def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
