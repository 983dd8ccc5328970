"""A request's outputs as an HTTP response: one JSON body, or a stream of server-sent events.

A body with log-probabilities or prompts may have megabytes. It is formatted on another thread, so that no long call
keeps the event loop from running.

The headers of a stream, too, wait for the first token, so an error before it has a status of its own. An error after
it is the stream's last event.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from ..server.output_delta import OutputDelta
from .formats import DONE, CompletionFormatter, server_sent_event, usage
from .http_errors import CLIENT_CLOSED_REQUEST, APIError, to_api_error
from .response_stream import ResponseStream

EVENT_STREAM = "text/event-stream"


async def respond(
    request: Request,
    stream: ResponseStream,
    formatter: CompletionFormatter,
    prompt_tokens: int,
    as_events: bool,
    include_usage: bool,
) -> Response:
    """Respond with a stream's outputs. If the client disconnects, its request is cancelled.

    Args:
        request: the HTTP request, which notices when its client disconnects.
        stream: the outputs; this function closes it.
        formatter: makes the response's bodies.
        prompt_tokens: for the response's token counts.
        as_events: whether to respond with events instead of one JSON body.
        include_usage: whether the events end with the token counts.
    """
    with ExitStack() as cleanup:
        cleanup.enter_context(stream)
        if not as_events:
            stream.read_at_end = True
            outputs = await while_connected(request, collect_outputs(stream))
            completion_tokens = sum(output.num_tokens for output in outputs)
            body = partial(formatter.response, outputs, usage(prompt_tokens, completion_tokens))
            if all(output.new_logprobs is None and not formatter.brings_prompt(output) for output in outputs):
                return Response(body(), media_type="application/json")
            cleanup.pop_all()  # the response closes the stream
            return OutputResponse(stream, made_in_thread(body), "application/json")
        first = await while_connected(request, anext(stream))
        cleanup.pop_all()
    return OutputResponse(stream, events(first, stream, formatter, prompt_tokens, include_usage), EVENT_STREAM)


async def collect_outputs(stream: ResponseStream) -> list[OutputDelta]:
    """Return the whole output of each choice once all sequences have finished."""
    parts: defaultdict[int, list[OutputDelta]] = defaultdict(list)
    async for choice, output in stream:
        parts[choice].append(output)
    return [OutputDelta.join(parts[choice]) for choice in sorted(parts)]


async def made_in_thread(body: Callable[[], str]) -> AsyncIterator[str]:
    """Yield a body that takes a while to make."""
    making = asyncio.to_thread(body)
    del body  # with the outputs in it: a slow client needs only the text
    yield await making


async def events(
    first: tuple[int, OutputDelta],
    stream: ResponseStream,
    formatter: CompletionFormatter,
    prompt_tokens: int,
    include_usage: bool,
) -> AsyncIterator[str]:
    """Yield an event for each output. An error becomes the last event."""
    completion_tokens = len(first[1].new_token_ids)

    async def event(choice: int, output: OutputDelta) -> str:
        is_slow = formatter.brings_prompt(output)
        return server_sent_event(
            await asyncio.to_thread(formatter.chunk, choice, output) if is_slow else formatter.chunk(choice, output)
        )

    try:
        yield await event(*first)
        async for choice, output in stream:
            yield await event(choice, output)
            completion_tokens += len(output.new_token_ids)
    except Exception as error:
        yield server_sent_event(to_api_error(error).detail)
        return
    if include_usage:
        yield server_sent_event(formatter.usage_chunk(usage(prompt_tokens, completion_tokens)))
    yield DONE


class OutputResponse(StreamingResponse):
    """A response in parts, which closes the stream of outputs however the response ends."""

    def __init__(self, stream: AbstractContextManager, parts: AsyncIterator[str], media_type: str):
        super().__init__(parts, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self.stream = stream

    async def __call__(self, scope, receive, send) -> None:
        with self.stream:
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, work: Coroutine) -> Any:
    """Return the result of some work, which is cancelled as soon as the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise APIError(CLIENT_CLOSED_REQUEST, "The client closed the connection.")
    finally:
        working.cancel()
        leaving.cancel()
