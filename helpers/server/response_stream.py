"""The outputs of one HTTP request on their way from the engine to its client.

An HTTP request with several prompts becomes several requests in the engine, one per prompt. Their sequences are the
response's *choices*, numbered prompt by prompt. The names of all of them start with the id of the response.

The engine never waits for a client, so what a slow client has not read waits here: only deltas, so never more than its
response (output_budget.py bounds that of all clients).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable

from ..server.output_delta import OutputDelta
from .http_errors import DeadlinePassed, EngineFailed


def engine_request_ids(response_id: str, num_prompts: int, n: int) -> list[str]:
    """Name the engine's requests for a response's prompts: by the response's id and, behind `/`, their first choice."""
    return [f"{response_id}/{number * n}" if number else response_id for number in range(num_prompts)]


def choice_name(label: Hashable) -> str:
    """Return the name of a choice for people, from its label in the trace: `ID` for choice 0, `ID/1` for choice 1."""
    engine_id, index = label if isinstance(label, tuple) else (label, 0)
    response_id, _, first = engine_id.partition("/")
    choice = int(first or 0) + index
    return f"{response_id}/{choice}" if choice else response_id


class ResponseStream:
    """An asynchronous iterator over `(choice, output)`: the outputs of one HTTP request as they come.

    Use it in a `with` statement: a client that leaves the block early cancels its request. Create it on an event loop.

    Args:
        engine_ids: the ids of its requests in the engine.
        n: sequences per prompt.
        accepted: when the request was accepted, on `time.perf_counter`'s clock.
        deadline: seconds from then on that the request may take, until its last output is read; None for no limit.
        cancel: called with this stream if it ends early.

    Attributes:
        num_unfinished: how many of its sequences have not finished, as far as the client has read.
        on_close: called when the `with` statement ends.
        take: called with `(choice, output)` while the reader waits for an output, unless the sequence has finished;
            returns whether it has dealt with the output. Waking the reader's task for every token would take processor
            time, which the model may need.

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
        self._first_choice = {engine_id: number * n for number, engine_id in enumerate(engine_ids)}
        self._cancel, self._timer = cancel, None
        self.on_close: Callable[[], object] = lambda: None
        self.take: Callable[[int, OutputDelta], bool] = lambda choice, output: False
        self._unread: deque[tuple[int, OutputDelta]] = deque()
        self._error: Exception | None = None
        self._readable, self._is_awaited = asyncio.Event(), False
        if deadline is not None:
            error = DeadlinePassed(f"The request took longer than its deadline of {deadline:g} s.")
            left = accepted + deadline - time.perf_counter()
            # A timer, not a time limit for each read: it also ends a request whose client does not read.
            self._timer = asyncio.get_running_loop().call_later(left, self.fail, error)

    def __enter__(self) -> "ResponseStream":
        return self

    def __exit__(self, *_) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.num_unfinished and self._error is None:
            self._cancel(self)
        self.on_close()

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        if not self.num_unfinished:
            raise StopAsyncIteration
        self._is_awaited = True
        try:
            await self._readable.wait()
        finally:
            self._is_awaited = False
        if self._error is not None:
            raise self._error
        choice, output = self._unread.popleft()
        if not self._unread:
            self._readable.clear()
        if output.finish_reason is not None:
            self.num_unfinished -= 1
        if output.finish_reason == "error":
            raise EngineFailed(output.error)
        return choice, output

    def put(self, output: OutputDelta) -> None:
        """Hand the stream its next output."""
        if self._error is not None:
            return
        choice, may_take = self._first_choice[output.request_id] + output.index, output.finish_reason is None
        try:
            is_taken = may_take and self._is_awaited and not self._unread and self.take(choice, output)
        except Exception as error:  # ends this response, not the deliveries to others
            return self.fail(error)
        if not is_taken:
            self._unread.append((choice, output))
            self._readable.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error: cancel what is unfinished, and drop what is unread."""
        if self.num_unfinished and self._error is None:
            self._error = error
            self._unread.clear()
            self._readable.set()
            self._cancel(self)
