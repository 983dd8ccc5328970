"""The outputs of one HTTP request on their way from the engine to its client.

An HTTP request with several prompts becomes several requests in the engine, one per prompt. Their sequences are the
response's *choices*, numbered prompt by prompt. The names of all of them start with the id of the response.
"""

import asyncio
import time
from collections.abc import Callable, Hashable

from ..engine import RequestOutput
from .errors import DeadlinePassed, EngineFailed


def engine_request_ids(response_id: str, num_prompts: int, n: int) -> list[str]:
    """Name the engine's requests for a response's prompts: by the response's id and, behind `/`, their first choice."""
    return [f"{response_id}/{place * n}" if place else response_id for place in range(num_prompts)]


def choice_name(label: Hashable) -> str:
    """Return the name of a choice for people, from its label in the trace: `ID` for choice 0, `ID/1` for choice 1."""
    engine_id, index = label if isinstance(label, tuple) else (label, 0)
    response_id, _, first = engine_id.partition("/")
    choice = int(first or 0) + index
    return f"{response_id}/{choice}" if choice else response_id


class ResponseStream:
    """An asynchronous iterator over `(choice, output)`: the outputs of one HTTP request as they come.

    Use it in a `with` statement: a client that leaves the block early cancels its request.

    Args:
        engine_ids: the ids of its requests in the engine.
        n: sequences per prompt.
        accepted: when the request was accepted, on `time.perf_counter`'s clock.
        deadline: seconds from then on that the request may take; None for no limit.
        cancel: called with this stream if the block is left early.

    Attributes:
        num_unfinished: how many of its sequences have not finished, as far as the client has read.

    Raises:
        DeadlinePassed, EngineFailed, ShuttingDown: from the iterator, as soon as one of them applies.
    """

    def __init__(
        self,
        engine_ids: list[str],
        n: int,
        accepted: float,
        deadline: float | None,
        cancel: Callable[["ResponseStream"], None],
    ):
        self.engine_ids, self.num_unfinished, self.accepted = engine_ids, len(engine_ids) * n, accepted
        self._first_choice = {engine_id: place * n for place, engine_id in enumerate(engine_ids)}
        self._deadline, self._cancel = deadline, cancel
        self._items: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def __enter__(self) -> "ResponseStream":
        return self

    def __exit__(self, *_) -> None:
        if self.num_unfinished:
            self._cancel(self)

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self.num_unfinished:
            raise StopAsyncIteration
        left = None if self._deadline is None else self.accepted + self._deadline - time.perf_counter()
        try:
            if left is not None and left <= 0:
                raise TimeoutError
            async with asyncio.timeout(left):  # unlike wait_for, it never loses a cancellation
                item = await self._items.get()
        except TimeoutError:
            raise DeadlinePassed(f"The request took longer than its deadline of {self._deadline:g} s.") from None
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is not None:
            self.num_unfinished -= 1
        if item.finish_reason == "error":
            raise EngineFailed(item.error)
        return self._first_choice[item.request_id] + item.index, item

    def put(self, item: RequestOutput | Exception) -> None:
        """Hand the stream its next output, or the error that ends it."""
        self._items.put_nowait(item)
