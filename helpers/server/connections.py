"""Connections: how long the server waits for a client.

The server waits for a client in three situations: until the head of a request is complete, until its body is, and until
the client reads what was sent to it. Each may take `client_timeout` seconds; while a client reads, however slowly, the
last one begins anew. A connection whose client takes longer is closed, which also cancels its request.

The number of connections is bounded by an option of uvicorn: while more are open, every new request gets status 503.
That does not stop clients that send nothing. Beyond twice that number, a new connection is therefore closed at once.

A connection also does what would take longer in the layers of the application: it sends a token as soon as that has
reached the event loop, and it cancels the work for a client that leaves.
"""

import asyncio
import math
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .http_errors import ClientLeft

MAX_AHEAD = 2**16  # bytes of further requests that are read before the response to this one is complete
MAX_CHUNKS = 2**14  # of a body: reading one takes as long as a kilobyte, even if it has a byte


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a server's connections.

    Args:
        max_connections: how many connections may be open; while there are more, new requests get status 503. Beyond
            twice as many, new connections are closed.
        client_timeout: seconds that the server waits for a request's head, for its body, and for a client to read.
        send_buffer: bytes that the operating system may hold for a client. By default it takes megabytes for each, and
            a client seems to have read them.

    Raises:
        ValueError: a limit is not positive.
    """

    max_connections: int = 512
    client_timeout: float = 30.0
    send_buffer: int = 2**14

    def __post_init__(self):
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {self.max_connections}.")
        if not 0 < self.client_timeout < math.inf:
            raise ValueError(f"client_timeout must be a positive number of seconds, not {self.client_timeout}.")

    def uvicorn_settings(self) -> dict[str, Any]:
        """Return the settings of `uvicorn.Config` that apply these limits."""
        protocol = partial(GuardedConnection, limits=self)
        return {"http": protocol, "ws": "none", "limit_concurrency": self.max_connections + 1}


class ChunkLimit(h11.Connection):
    """HTTP's state machine, which refuses a body of more than `MAX_CHUNKS` chunks."""

    def __init__(self):
        super().__init__(h11.SERVER)
        self._num_chunks = 0

    def next_event(self) -> Any:
        """Return the next event of the client."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_chunks += 1
            if self._num_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_CHUNKS} chunks")
        return event


class GuardedConnection(H11Protocol):
    """One connection of uvicorn's server, within limits.

    Attributes:
        awaited: what the server awaits of the client: "head", "body", or how many bytes it has not read; None if the
            client waits for the server.
        since: when that began, on the event loop's clock.
    """

    def __init__(self, *args, limits: ConnectionLimits, **named):
        super().__init__(*args, **named)
        self.conn = ChunkLimit()
        self.app_state = self.app_state | {"connection": weakref.proxy(self)}  # for the `state` of each request
        self.limits, self.awaited, self.since = limits, None, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer)
        transport.set_write_buffer_limits(high=0)  # the application waits until the system has taken what it has sent
        self._check_timeout()
        if len(self.connections) > 2 * self.limits.max_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._on_lost is not None:
            self._on_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update()
        if self._on_lost is not None:
            self._read_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # another response has begun
            self.transport.close()

    @contextmanager
    def cancel_if_lost(self) -> Iterator[None]:
        """Cancel what the current task does in a `with` block as soon as the connection is lost. Blocks do not nest.

        Raises:
            ClientLeft: the connection was lost, before the block or in it.
        """
        if self not in self.connections:
            raise ClientLeft
        task = asyncio.current_task()
        self._on_lost = task.cancel
        self._read_on()
        try:
            yield
        except asyncio.CancelledError:
            if self in self.connections:
                raise
            task.uncancel()
            raise ClientLeft from None
        finally:
            self._on_lost = None

    def _read_on(self) -> None:
        """Read, although no more is expected, to notice when the client leaves; but not much ahead."""
        if len(self.conn.trailing_data[0]) < MAX_AHEAD:
            self.flow.resume_reading()

    def send_at_once(self, make_part: Callable[[], str]) -> bool:
        """Make and send a part of a response's body if the client has read all that came before.

        The head must have been sent. This skips asyncio's tasks and the layers of the application.

        Returns:
            Whether the part was sent; if not, it was not made.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(self.conn.send(h11.Data(data=make_part().encode())))
        return True

    @property
    def num_unread(self) -> int:
        """How many bytes wait for the client to read."""
        return self.transport.get_write_buffer_size()

    def _update(self) -> None:
        their_state = {h11.IDLE: "head", h11.SEND_BODY: "body"}.get(self.conn.their_state)
        awaited = self.num_unread or their_state
        if awaited != self.awaited:
            self.awaited, self.since = awaited, self.loop.time()

    def _check_timeout(self) -> None:
        """Close the connection once the server has waited too long; look again later otherwise."""
        timeout = self.limits.client_timeout
        self._update()
        if self.awaited is not None and self.loop.time() - self.since >= timeout:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(min(1.0, timeout / 10), self._check_timeout)
