"""Errors of requests that are refused or end early, and their HTTP responses in OpenAI's format.

400 a request that can never run    401 no key         404 no such model       405 a method that an address lacks
413 a long body                     429 queue full     500 engine failed       503 shutting down, or too many listeners
504 deadline passed
"""

import json

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as FrameworkError

from .protocol import describe_errors

TRY_AGAIN = {"Retry-After": "1"}  # seconds
ERROR_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Refused(Exception):
    """The server cannot take the request now; the client may try again in a second."""

    status, code = 503, ""


class QueueFull(Refused):
    """As many sequences are in flight as the server accepts."""

    status, code = 429, "queue_full"


class ShuttingDown(Refused):
    """The server takes no more requests, or had no time left to finish this one."""

    code = "shutting_down"


class TooManyListeners(Refused):
    """As many pages follow the server's events as it allows."""

    code = "too_many_listeners"


class DeadlinePassed(Exception):
    """The request took longer than its deadline allows."""


class EngineFailed(Exception):
    """An iteration that included this request failed, or the engine has stopped."""


# What `error_response` handles. Starlette re-raises, and so logs, an error that only the entry `Exception` matches.
HANDLED = (Exception, FrameworkError, RequestValidationError, Refused, DeadlinePassed, EngineFailed)


class APIError(HTTPException):
    """An error in OpenAI's format, with its status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, headers=None):
        default = "server_error" if status >= 500 else "invalid_request_error"
        error_type = ERROR_TYPES.get(status, default)
        super().__init__(
            status, {"error": {"message": message, "type": error_type, "param": param, "code": code}}, headers
        )


class ClientLeft(APIError):
    """The client has closed the connection, so it never sees this error."""

    def __init__(self):
        super().__init__(499, "The client closed the connection.")  # nginx's status for it


def to_api_error(error: Exception) -> APIError:
    """Return an error as the client gets it."""
    match error:
        case APIError():
            return error
        case Refused():
            return APIError(error.status, str(error), code=error.code, headers=TRY_AGAIN)
        case DeadlinePassed():
            # OpenAI's client would retry twice, and so triple the load of requests that are too late.
            return APIError(504, str(error), code="deadline_passed", headers={"x-should-retry": "false"})
        case EngineFailed():
            return APIError(500, str(error), code="engine_failed")
        case RequestValidationError():
            return APIError(400, *describe_errors(error.errors()))
        case FrameworkError(status_code=404):
            return APIError(404, "Not found: send requests to /v1/completions or /v1/chat/completions.")
        case FrameworkError(status_code=405):
            headers = error.headers or {"Allow": "GET"}  # an error of static files has none
            return APIError(405, f"Method not allowed: send {headers['Allow']} to this address.", headers=headers)
        case FrameworkError():
            return APIError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            return APIError(500, f"{type(error).__name__}: {error}")


# `async`, because FastAPI runs other handlers on threads: many refusals at once would start dozens of them.
async def error_response(_: Request, error: Exception) -> Response:
    """Handle an error that a request raised."""
    return as_response(to_api_error(error))


def as_response(error: APIError) -> Response:
    """Return the response for an error."""
    # json.dumps escapes what UTF-8 cannot encode, such as half of a surrogate pair in the name of a parameter.
    return Response(json.dumps(error.detail), error.status_code, error.headers, "application/json")
