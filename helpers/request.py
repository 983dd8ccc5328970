"""A request as a user states it: a prompt, a limit on the length of its output, and an id."""

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from numbers import Integral


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and the number of tokens at which its output ends.

    Attributes:
        prompt: the text to continue.
        max_tokens: the most tokens to generate.
        request_id: identifies the request among others. If it is None, `as_requests` assigns a number.
    """

    prompt: str
    max_tokens: int
    request_id: Hashable = None


def as_requests(requests: Iterable[Request | tuple[str, int]], new_ids: Iterable | None = None) -> list[Request]:
    """Validate requests and give each one an id.

    Args:
        requests: `Request`s or `(prompt, max_tokens)` tuples.
        new_ids: ids for the requests without one, in order; ids in use are skipped. By default 0, 1, ...

    Raises:
        ValueError: there are no requests; one has an empty prompt or a max_tokens below 1; or two share an id.
    """
    requests = list(requests)
    taken = {request.request_id for request in requests if isinstance(request, Request)}
    new_ids = (id for id in (itertools.count() if new_ids is None else new_ids) if id not in taken)
    checked = []
    for request in requests:
        if not isinstance(request, Request):
            if not isinstance(request, tuple | list) or len(request) != 2:
                raise ValueError(f"A request is a (prompt, max_tokens) tuple or a Request, not {request!r}.")
            request = Request(*request)
        if not isinstance(request.prompt, str) or not request.prompt:
            raise ValueError(f"The prompt of a request is a text of at least one character, not {request.prompt!r}.")
        if not isinstance(request.max_tokens, Integral) or request.max_tokens < 1:
            raise ValueError(
                f"max_tokens is a whole number of at least 1, not {request.max_tokens!r} (prompt {request.prompt!r})."
            )
        if request.request_id is None:
            request = replace(request, request_id=next(new_ids))
        checked.append(request)
    if not checked:
        raise ValueError("There are no requests: give at least one (prompt, max_tokens).")
    if repeated := repeated_ids([request.request_id for request in checked]):
        raise ValueError(f"Request ids must be unique in a batch; these occur more than once: {repeated}.")
    return checked


def repeated_ids(ids: Iterable[Hashable]) -> list[Hashable]:
    """Return the ids that occur more than once, each once, sorted by their repr."""
    seen: set[Hashable] = set()
    repeated = {id for id in ids if id in seen or seen.add(id)}
    return sorted(repeated, key=repr)
