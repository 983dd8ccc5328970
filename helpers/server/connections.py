"""Connections: how long the server waits for a client, and how many connections it holds.

The server waits for a client in three situations: until the head of a request is complete, until its body is, and until
the client reads what was sent to it. Each may take `client_timeout` seconds; while a client reads, however slowly, the
last one begins anew. A connection whose client takes longer is closed, which also cancels its request.

Once three quarters of all places are taken, a new connection replaces the one whose client has kept the server waiting
for longest, as nginx reuses idle connections. Clients that send slowly or do not read can therefore not keep others
out, as they could with uvicorn's own limit, `limit_concurrency`. But a well-behaved client never loses its connection
to a new one: the server closes none that it works for, none that has sent its request within `SENDING` seconds, and
none whose client never pauses for `READING` seconds before it reads on. The last quarter of the places is for new
connections while all others are safe; if none is left, a new connection is refused with status 503.
"""

import asyncio
import math
import selectors
import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .http_errors import TRY_AGAIN, APIError, as_response

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None

SENDING = 0.1  # seconds without a complete request after which a connection may have to make room
READING = 3.0  # the same for a client that reads nothing: a busy one may pause
LINGER = 1.0  # seconds in which a refused client may send its request, which is ignored, and read the refusal
MAX_CHUNKS = 2**14  # of a body: reading one takes as long as a kilobyte, even if it has a byte
NUM_OTHER_DESCRIPTORS = 64  # for what is not a connection: libraries, logs, the event loop


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a server's connections.

    Args:
        max_connections: how many connections may be open.
        client_timeout: seconds that the server waits for a request's head, for its body, and for a client to read.
        send_buffer: bytes that the operating system may hold for a client. By default it takes megabytes for each, and
            a client seems to have read them.

    Raises:
        ValueError: a limit is not positive.
    """

    max_connections: int = 2048
    client_timeout: float = 30.0
    send_buffer: int = 2**14

    def __post_init__(self):
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {self.max_connections}.")
        if not 0 < self.client_timeout < math.inf:
            raise ValueError(f"client_timeout must be a positive number of seconds, not {self.client_timeout}.")

    @property
    def backlog(self) -> int:
        """How many connections may wait to be accepted."""
        return max(1, self.max_connections // 2)

    def within_descriptors(self) -> "ConnectionLimits":
        """Return limits for which the process may have enough file descriptors, and allow it to have as many.

        The event loop accepts up to `backlog` connections before it can close the first one that is too many.
        """
        if resource is None:
            return self
        allowed, most = (
            math.inf if limit == resource.RLIM_INFINITY else limit
            for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        needed = self.max_connections + self.backlog + NUM_OTHER_DESCRIPTORS
        if allowed < needed and allowed < most:
            allowed = int(min(needed, most))
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, resource.RLIM_INFINITY if most == math.inf else most))
        if allowed >= needed:
            return self
        return replace(self, max_connections=max(1, (allowed - NUM_OTHER_DESCRIPTORS) * 2 // 3))  # a third: the backlog

    def uvicorn_settings(self) -> dict[str, Any]:
        """Return the settings of `uvicorn.Config` that apply these limits."""
        protocol = partial(GuardedConnection, limits=self)
        return {"http": protocol, "ws": "none", "backlog": self.backlog}


class OneWriteConnection(h11.Connection):
    """HTTP's state machine, which sends a short response in one write.

    Each write is a system call, which is a good part of what a refusal costs. The head of a response waits for the
    first part of its body if the response states its length. Then the body is complete, or a file. The head of a stream
    is sent at once.

    The parts of a stream change no state, so they bypass the state machine.
    """

    def __init__(self):
        super().__init__(h11.SERVER)
        self._head, self._is_chunked, self._num_chunks = b"", False, 0

    def next_event(self) -> Any:
        """Return the next event, and refuse a body of more than `MAX_CHUNKS` chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_chunks += 1
            if self._num_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"more than {MAX_CHUNKS} chunks")
        return event

    def send(self, event: h11.Event) -> bytes | None:
        """Return the bytes to write for an event; none for a head that waits."""
        if self._is_chunked and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        data = super().send(event)
        self._is_chunked = isinstance(event, h11.Response) and b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
        if isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers):
            self._head, data = data, b""
        elif self._head and data is not None:
            self._head, data = b"", self._head + data
        return data


class GuardedConnection(H11Protocol):
    """One connection of uvicorn's server, within limits.

    Attributes:
        awaited: what the server awaits of the client: "head", "body", or how many bytes it has not read; None if the
            client waits for the server.
        since: when that began, on the event loop's clock.
        is_refused: whether it only waits for its client to read the refusal.
    """

    def __init__(self, *args, limits: ConnectionLimits, **named):
        super().__init__(*args, **named)
        self.conn = OneWriteConnection()
        self.limits, self.awaited, self.since, self.is_refused = limits, None, 0.0, False
        self._timer: asyncio.TimerHandle | None = None

    # --- what happens to a connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer)
        transport.set_write_buffer_limits(high=0)  # the application waits until the system has taken what it has sent
        self._check_timeout()
        if len(self.connections) > self.limits.max_connections * 3 // 4:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.is_refused:
            super().data_received(data)
            self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    # --- what the server awaits, and for how long -----------------------------------------------------------------

    @property
    def num_unread(self) -> int:
        """How many bytes wait for the client to read."""
        return self.transport.get_write_buffer_size()

    @property
    def seconds_awaited(self) -> float:
        """For how many seconds the server has awaited the client; 0 if the client awaits the server."""
        return 0.0 if self.awaited is None else self.loop.time() - self.since

    @property
    def may_make_room(self) -> bool:
        """Whether the client has kept the server waiting for too long, and not the other way round.

        An event loop that is late may not yet have read what the client has sent, nor written what it could receive.
        """
        patience = READING if self.num_unread else SENDING
        if self.seconds_awaited < min(patience, self.limits.client_timeout / 2):
            return False
        event = selectors.EVENT_WRITE if self.num_unread else selectors.EVENT_READ
        with selectors.DefaultSelector() as selector:
            selector.register(self.transport.get_extra_info("socket"), event)
            return not selector.select(0)

    def _update(self) -> None:
        their_state = {h11.IDLE: "head", h11.SEND_BODY: "body"}.get(self.conn.their_state)
        awaited = self.num_unread or their_state
        if awaited != self.awaited:
            self.awaited, self.since = awaited, self.loop.time()

    def _check_timeout(self) -> None:
        """Close the connection once the server has waited too long; look again later otherwise."""
        timeout = self.limits.client_timeout
        self._timer = self.loop.call_later(min(1.0, timeout / 10), self._check_timeout)  # first: closing may fail
        self._update()
        if self.seconds_awaited >= timeout:
            self.close(APIError(408, f"The request was not complete after {timeout:g} s.", code="client_timeout"))

    def _make_room(self) -> None:
        """Close the connection that was awaited for longest, if it may make room; this one if no place is left."""
        held = (other for other in self.connections if not other.is_refused)
        occupied = [other for other in held if other.num_unread or not other.transport.is_closing()]
        awaited = sorted(occupied, key=lambda other: other.seconds_awaited, reverse=True)
        stalled = next((other for other in awaited if other.seconds_awaited and other.may_make_room), None)
        if stalled is None and len(occupied) <= self.limits.max_connections:
            return
        error = APIError(
            503,
            f"The server holds {len(occupied)} connections of at most {self.limits.max_connections}, and had to close "
            f"this one. Try again later.",
            code="too_many_connections",
            headers=TRY_AGAIN,
        )
        (stalled or self).close(error, is_refused=stalled is None)

    def close(self, error: APIError, is_refused: bool = False) -> None:
        """Close the connection. A client gets the error if it has begun a request, or if it is refused."""
        has_begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0] != b""
        has_no_response = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if (has_begun or is_refused) and has_no_response and not self.num_unread:
            if self.cycle is not None:  # the application, which waits for the body
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._send_error(error)
            if is_refused:
                self._linger()
            else:
                self.transport.close()
        else:
            self.transport.abort()

    def _linger(self) -> None:
        """Close the connection once its client has read the refusal.

        If it was closed at once, a request that is still on its way would make the system discard the refusal.
        """
        if len(self.connections) > self.limits.max_connections + self.limits.backlog // 2:  # not enough descriptors
            self.transport.close()
        else:
            self.is_refused = True
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._send_error(APIError(400, msg))
        self.transport.close()

    def _send_error(self, error: APIError) -> None:
        """Respond with an error; if a response has begun, cut it off instead."""
        state = self.conn.our_state
        if state not in (h11.IDLE, h11.SEND_RESPONSE):
            if state is h11.SEND_BODY:
                self.transport.abort()
            return
        is_head = state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        response, reason = as_response(error), STATUS_PHRASES[error.status_code]
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=response.status_code, headers=headers, reason=reason)
        for event in (head, h11.Data(data=b"" if is_head else response.body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
