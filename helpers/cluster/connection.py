"""The connection between the front end and a replica: requests go one way, reports the other.

Ray starts replicas and could carry these messages, too. But a call through Ray takes more processor time, in both
processes, and calls may arrive out of order. The figures are in benchmarks/results/serving.md.

The front end asks for each report once it has delivered the one before. A front end that is slow thus gets several
iterations in one report, and at most one report waits to be read.

Unpickling a message can run any code. So either side reads messages only after the other one has proved that it knows
the replica's secret, which came through Ray. After the first such proof, the replica accepts no further connection.
"""

import asyncio
import contextlib
import hmac
import pickle
import secrets
import struct
from dataclasses import dataclass, field
from typing import Any

from .replica import Replica, ReplicaLost, Report

LENGTH = struct.Struct("!Q")  # before each message, its number of bytes
LIMIT = 2**20  # bytes that are read ahead
SIZE = 32  # bytes of a secret, a nonce and a proof
PROOF_SECONDS = 10.0  # in which a connection has to prove that it knows the secret
FRONT_END, REPLICA = b"front end", b"replica"  # with one role for both sides, a proof could be sent back as one's own


@dataclass(frozen=True)
class ReplicaAddress:
    """Where a front end can connect to a replica, once."""

    host: str
    port: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SIZE), repr=False)


async def serve_replica(replica: Replica, host: str) -> ReplicaAddress:
    """Listen at one of this machine's addresses, and call a replica's methods for the front end that connects."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A cancellation is suppressed too: Python 3.11 would log it as an error.
        ends = OSError, asyncio.IncompleteReadError, asyncio.CancelledError
        with contextlib.suppress(*ends), contextlib.closing(writer):
            async with asyncio.timeout(PROOF_SECONDS):
                await _authenticate(reader, writer, address.secret, REPLICA, FRONT_END)
            server.close()
            while True:
                method, arguments, options = await _receive(reader)
                if method == "next_report":
                    arguments = [lambda report: writer.write(_message(report))]
                getattr(replica, method)(*arguments, **options)

    server = await asyncio.start_server(serve, host, 0, limit=LIMIT)
    address = ReplicaAddress(*server.sockets[0].getsockname()[:2])
    return address


def _message(content: Any) -> bytes:
    pickled = pickle.dumps(content)
    return LENGTH.pack(len(pickled)) + pickled


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


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


class ReplicaConnection:
    """The front end's end: it calls the replica's methods, which arrive in order. To a lost replica, they do nothing.

    The first call of `report` connects, on the event loop that makes it. Calls before that wait for the connection.
    """

    def __init__(self, address: ReplicaAddress):
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] | None = []  # the calls that wait; None once there is a connection

    def add(self, *request, **options) -> None:
        self._call("add", *request, **options)

    def abort(self, engine_id: str) -> None:
        self._call("abort", engine_id)

    def set_pace(self, seconds: float) -> None:
        self._call("set_pace", seconds)

    async def report(self) -> Report:
        """Return the next report. Raises ReplicaLost if the replica has ended."""
        try:
            self._call("next_report")
            if self._unsent is not None:
                await self._connect()
            return await _receive(self._reader)
        except asyncio.IncompleteReadError as error:
            raise ReplicaLost("its connection has ended") from error
        except OSError as error:
            raise ReplicaLost(f"its connection has ended: {error}") from error

    def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()

    def _call(self, method: str, *arguments, **options) -> None:
        message = _message((method, arguments, options))
        if self._unsent is None:
            self._writer.write(message)
        else:
            self._unsent.append(message)

    async def _connect(self) -> None:
        address = self._address
        self._reader, self._writer = await asyncio.open_connection(address.host, address.port, limit=LIMIT)
        await _authenticate(self._reader, self._writer, address.secret, FRONT_END, REPLICA)
        self._writer.writelines(self._unsent)
        self._unsent = None
