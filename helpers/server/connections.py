"""Connections: how long the server waits for a client, and how many connections it holds.

The server waits for a client in three situations: until the head of a request is complete, until its body is, and until
the client reads what was sent to it. Each may take `client_timeout` seconds; while a client reads, however slowly, the
last one begins anew. A connection whose client takes longer is closed, which also cancels its request.

When all places are taken, a new connection gets the place of the one whose client the server has awaited for longest,
as nginx reuses idle connections. Clients that send slowly or do not read can therefore not keep others out, as they
could with uvicorn's own limit, `limit_concurrency`. If the server awaits no client, because it works for all of them,
it refuses the new connection with status 503.
"""

import asyncio
import math
import socket
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .http_errors import APIError, as_response

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None

STALLED = 1.0  # seconds after which a client that does not read may have to make room; others only pause
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

    max_connections: int = 512
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
        """Return limits for which the process has enough file descriptors.

        The event loop accepts up to `backlog` connections before it can close the first one that is too many.
        """
        allowed = math.inf if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed in (math.inf, -1):  # -1: no limit
            return self
        fitting = max(1, (allowed - NUM_OTHER_DESCRIPTORS) * 2 // 3)  # a third for the backlog
        return replace(self, max_connections=min(self.max_connections, fitting))

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
        self._head, self._is_chunked = b"", False

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
    """

    def __init__(self, *args, limits: ConnectionLimits, **named):
        super().__init__(*args, **named)
        self.conn = OneWriteConnection()
        self.limits, self.awaited, self.since = limits, None, 0.0
        self._timer: asyncio.TimerHandle | None = None

    # --- what happens to a connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer)
        transport.set_write_buffer_limits(high=0)  # the application waits until the system has taken what it has sent
        self._watch()
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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
    def may_make_room(self) -> bool:
        """Whether the server awaits the client, and not only because the client pauses in reading."""
        is_pausing = isinstance(self.awaited, int) and self.loop.time() - self.since < STALLED
        return self.awaited is not None and not is_pausing

    def _update(self) -> None:
        their_state = {h11.IDLE: "head", h11.SEND_BODY: "body"}.get(self.conn.their_state)
        awaited = self.num_unread or their_state
        if awaited != self.awaited:
            self.awaited, self.since = awaited, self.loop.time()

    def _watch(self) -> None:
        """Close the connection once the server has waited too long; look again later otherwise."""
        timeout = self.limits.client_timeout
        self._timer = self.loop.call_later(min(1.0, timeout / 10), self._watch)  # first: closing may fail
        self._update()
        if self.awaited is not None and self.loop.time() - self.since >= timeout:
            self.give_up(APIError(408, f"The request was not complete after {timeout:g} s.", code="client_timeout"))

    def _make_room(self) -> None:
        occupied = [one for one in self.connections if one.num_unread or not one.transport.is_closing()]
        if len(occupied) <= self.limits.max_connections:
            return
        awaited = [one for one in occupied if one is not self and one.may_make_room]
        leaving = min(awaited, key=lambda one: one.since, default=self)
        leaving.give_up(
            APIError(
                503,
                f"The server holds {self.limits.max_connections} connections, which is its limit. Try again later.",
                code="too_many_connections",
                headers={"Retry-After": "1"},
            ),
            is_refused=leaving is self,
        )

    def give_up(self, error: APIError, is_refused: bool = False) -> None:
        """Close the connection. A client gets the error if it has begun a request, or if it is refused."""
        has_begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0] != b""
        has_no_response = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if (has_begun or is_refused) and has_no_response and not self.num_unread:
            if self.cycle is not None:  # the application, which waits for the body
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._send_error(error)
            self.transport.close()
        else:
            self.transport.abort()

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
