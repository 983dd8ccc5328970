"""ASGI middleware around the whole application: a limit for request bodies, and the count of responses by status."""

from prometheus_client import Counter

from .http_errors import APIError


class BodyLimit:
    """Refuses a request whose body is longer than `limit` bytes, without reading all of it."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send) -> None:
        length = 0

        async def limited_receive():
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self.limit:
                raise APIError(413, f"The body is too long: send at most {self.limit} bytes.")
            return message

        await self.app(scope, limited_receive if scope["type"] == "http" else receive, send)


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
