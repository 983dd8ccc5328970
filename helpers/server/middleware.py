"""ASGI middleware around the whole application: what is checked before a request's body is read.

    AllowedHosts    the name by which the client calls this server
    RequireKey      the API key
    RefuseIfFull    whether the server can take a request to generate
    BodyLimit       the length of the body
    StatusCount     counts the responses, refusals included

The checks come in this order, and each needs less of the request than the next. A request that is refused here costs
the server neither memory nor a parsed body.
"""

import hmac
from collections.abc import Callable, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from prometheus_client import Counter

from .errors import EngineFailed, Refused
from .http_errors import APIError, as_response, to_api_error

GENERATING = ("/v1/completions", "/v1/chat/completions")
PUBLIC = ("/", "/health", "/docs", "/openapi.json")  # and the files of the page: these need no key
PUBLIC_FILES = "/page/"


class AllowedHosts:
    """Refuses a request for another host.

    This is the defence against DNS rebinding: a hostile web page makes its own name resolve to this machine's address,
    and the browser then lets it read what a server on this machine responds. But the browser still sends the page's
    name as `Host`.

    Args:
        app: the application.
        hosts: the names and addresses that clients may use, without ports.
    """

    def __init__(self, app, hosts: Iterable[str]):
        self.app, self.hosts = app, {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and (name := _host_name(host := _header(scope, b"host"))) not in self.hosts:
            name = name or host.decode("latin-1")
            message = f"This server is not called {name!a}: to allow that name, start it with --allowed-host."
            await as_response(APIError(403, message, code="unknown_host"))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class RequireKey:
    """Refuses a request without the key, except for public addresses."""

    def __init__(self, app, key: str):
        self.app, self.key = app, key.encode()

    async def __call__(self, scope, receive, send) -> None:
        path = scope.get("path", "")
        is_public = path in PUBLIC or path.startswith(PUBLIC_FILES)
        if scope["type"] == "http" and not is_public and not self._has_key(scope):
            message = "This server requires a key: send Authorization: Bearer KEY."
            await as_response(APIError(401, message, code="invalid_api_key"))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _has_key(self, scope) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        return hmac.compare_digest(key, self.key) and scheme.lower() == b"bearer"


class RefuseIfFull:
    """Refuses a request to generate, before its body is read, while the server has no room for another sequence.

    Overload makes refusals the most frequent responses, so they should cost little: a body is not parsed in vain.

    Args:
        app: the application.
        refuse: raises why no request can be taken now, if that is so.
    """

    def __init__(self, app, refuse: Callable[[], None]):
        self.app, self.refuse = app, refuse

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GENERATING:
            try:
                self.refuse()
            except (Refused, EngineFailed) as error:
                return await as_response(to_api_error(error))(scope, receive, send)
        await self.app(scope, receive, send)


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
