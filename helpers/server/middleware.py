"""ASGI middleware around the whole application: what is checked before a request's body is read.

    KeyCheck        the API key
    BodyLimit       the length of the body
    StatusCount     counts the responses, refusals included

A request that is refused here costs the server neither memory nor a parsed body. Starlette's `TrustedHostMiddleware`
checks the name by which a client calls the server.
"""

import hmac

from prometheus_client import Counter

from .http_errors import APIError, as_response

PUBLIC = ("/", "/health")  # and the files of the page: these need no key
PUBLIC_FILES = "/page/"


class KeyCheck:
    """Refuses requests without the key, which public addresses do not need."""

    def __init__(self, app, key: str):
        self.app, self.key = app, key.encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or self._is_allowed(scope):
            await self.app(scope, receive, send)
        else:
            message = "This server requires a key: send Authorization: Bearer KEY."
            await as_response(APIError(401, message, code="invalid_api_key"))(scope, receive, send)

    def _is_allowed(self, scope) -> bool:
        path = scope["path"]
        if path in PUBLIC or path.startswith(PUBLIC_FILES):
            return True
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        return hmac.compare_digest(given, self.key) and scheme.lower() == b"bearer"


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
