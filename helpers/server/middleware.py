"""ASGI middleware around the whole application: what is checked before a request's body is read.

    unknown_host    the name by which the client calls this server
    missing_key     the API key
    no_room         whether the server can take a request to generate
    BodyLimit       the length of the body
    StatusCount     counts the responses, refusals included

The checks come in this order, and each needs less of the request than the next. A request that is refused here costs
the server neither memory nor a parsed body.
"""

import hmac
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import Counter

from .http_errors import APIError, EngineFailed, Refused, as_response, to_api_error

Check = Callable[[dict[str, Any]], APIError | None]  # returns why a request is refused, given its ASGI scope
GENERATING = ("/v1/completions", "/v1/chat/completions")
PUBLIC = ("/", "/health")  # and the files of the page: these need no key
PUBLIC_FILES = "/page/"


class Refuse:
    """Refuses the requests that do not pass a check."""

    def __init__(self, app, check: Check):
        self.app, self.check = app, check

    async def __call__(self, scope, receive, send) -> None:
        error = self.check(scope) if scope["type"] == "http" else None
        await (self.app if error is None else as_response(error))(scope, receive, send)


def unknown_host(hosts: Iterable[str]) -> Check:
    """Return the check of the host that a request names: one of these names and addresses, without ports.

    This is the defence against DNS rebinding: a hostile web page makes its own name resolve to this machine's address,
    and the browser then lets it read what a server on this machine responds. But the browser still sends the page's
    name as `Host`.
    """
    known = {host.lower().strip("[]") for host in hosts}

    def check(scope) -> APIError | None:
        host = _header(scope, b"host")
        if (name := _host_name(host)) in known:
            return None
        name = name or host.decode("latin-1")
        message = f"This server is not called {name!a}: to allow that name, start it with --allowed-host."
        return APIError(403, message, code="unknown_host")

    return check


def missing_key(key: str) -> Check:
    """Return the check of the key, which public addresses do not need."""

    def check(scope) -> APIError | None:
        path = scope.get("path", "")
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        if path in PUBLIC or path.startswith(PUBLIC_FILES):
            return None
        if hmac.compare_digest(given, key.encode()) and scheme.lower() == b"bearer":
            return None
        return APIError(401, "This server requires a key: send Authorization: Bearer KEY.", code="invalid_api_key")

    return check


def no_room(refuse: Callable[[], None]) -> Check:
    """Return the check of requests to generate; `refuse` raises why none can be taken now, if that is so.

    Overload makes refusals the most frequent responses, so they should cost little: a body is not parsed in vain.
    """

    def check(scope) -> APIError | None:
        if scope["method"] == "POST" and scope["path"] in GENERATING:
            try:
                refuse()
            except (Refused, EngineFailed) as error:
                return to_api_error(error)
        return None

    return check


class BodyLimit:
    """Refuses a request whose body is longer than `limit` bytes: at once if it says so, otherwise at the limit."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send) -> None:
        too_long = APIError(413, f"The body is too long: send at most {self.limit} bytes.")
        length = 0

        async def limited_receive():
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self.limit:
                raise too_long
            return message

        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif int(_header(scope, b"content-length") or 0) > self.limit:  # the protocol has checked that it is a number
            await as_response(too_long)(scope, receive, send)
        else:
            await self.app(scope, limited_receive, send)


class StatusCount:
    """Counts the responses to requests under `/v1/`, by status."""

    def __init__(self, app, requests: Counter):
        self.app, self.requests = app, requests

    async def __call__(self, scope, receive, send) -> None:
        async def counting_send(message):
            if message["type"] == "http.response.start" and scope["path"].startswith("/v1/"):
                self.requests.labels(message["status"]).inc()
            await send(message)

        try:
            await self.app(scope, receive, counting_send if scope["type"] == "http" else send)
        except Exception:  # the framework responds to an unexpected error outside of all middleware
            self.requests.labels(500).inc()
            raise


def _header(scope, name: bytes) -> bytes:
    """Return the value of a request's header, as it was sent; empty if there is none."""
    return dict(scope["headers"]).get(name, b"")


@lru_cache(maxsize=64)
def _host_name(host: bytes) -> str | None:
    """Return the name or address in a `Host` header, without the port; None if there is none."""
    try:
        return urlsplit(b"//" + host).hostname.decode("latin-1")
    except (ValueError, AttributeError):  # no address, such as "[": or no name at all
        return None
