"""Why a request is refused or ends early. The HTTP statuses of these errors are in http_errors.py."""


class Refused(Exception):
    """The server cannot take the request now; the client may retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Refused):
    """As many sequences are in flight as the server accepts."""


class ShuttingDown(Refused):
    """The server takes no more requests, or had no time left to finish this one."""


class TooManyListeners(Refused):
    """As many pages follow the server's events as it allows."""


class DeadlinePassed(Exception):
    """The request took longer than its deadline allows."""


class EngineFailed(Exception):
    """An iteration that included this request failed, or the engine has stopped."""
