"""A request's outputs as an HTTP response: one JSON body, or a stream of server-sent events.

A body with log-probabilities or prompts may have megabytes. It is formatted on another thread, so that no long call
keeps the event loop from running.

The headers of a stream, too, wait for the first token, so an error before it has a status of its own. An error after
it is the stream's last event.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

from fastapi.responses import Response, StreamingResponse

from ..server.output_delta import OutputDelta
from .formats import DONE, CompletionFormatter, server_sent_event, usage
from .http_errors import ClientLeft, to_api_error
from .response_stream import ResponseStream

EVENT_STREAM = "text/event-stream"


async def whole_response(stream: ResponseStream, formatter: CompletionFormatter, prompt_tokens: int) -> Response:
    """Respond with one JSON body.

    Args:
        stream: the outputs; this function, or the response, closes it.
        formatter: makes the body.
        prompt_tokens: for the body's token counts.
    """
    with ExitStack() as cleanup:
        cleanup.enter_context(stream)
        outputs = await collect_outputs(stream)
        completion_tokens = sum(output.num_tokens for output in outputs)
        body = partial(formatter.response, outputs, usage(prompt_tokens, completion_tokens))
        if all(output.new_logprobs is None and not formatter.brings_prompt(output) for output in outputs):
            return Response(body(), media_type="application/json")
        cleanup.pop_all()
    return OutputResponse(stream, made_in_thread(body), "application/json")


async def event_response(
    stream: ResponseStream,
    formatter: CompletionFormatter,
    prompt_tokens: int,
    include_usage: bool,
    send_at_once: Callable[[Callable[[], str]], bool],
) -> Response:
    """Respond with an event for each output. This returns after the first output.

    Args:
        stream, formatter, prompt_tokens: as for `whole_response`.
        include_usage: whether the events end with the token counts.
        send_at_once: makes and sends a part of the body after its head, or returns False (connections.py).
    """
    with ExitStack() as cleanup:
        cleanup.enter_context(stream)
        first = await anext(stream)
        cleanup.pop_all()
    parts = events(first, stream, formatter, prompt_tokens, include_usage, send_at_once)
    return OutputResponse(stream, parts, EVENT_STREAM)


async def collect_outputs(stream: ResponseStream) -> list[OutputDelta]:
    """Return the whole output of each choice once all sequences have finished."""
    parts: defaultdict[int, list[OutputDelta]] = defaultdict(list)

    def take(choice: int, output: OutputDelta) -> bool:
        parts[choice].append(output)
        return True

    stream.take = take
    async for choice, output in stream:
        parts[choice].append(output)
    outputs = [OutputDelta.join(parts[choice]) for choice in sorted(parts)]
    parts.clear()  # to which the stream still refers
    return outputs


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
    send_at_once: Callable[[Callable[[], str]], bool],
) -> AsyncIterator[str]:
    """Yield an event for each output that is not sent at once. An error becomes the last event."""
    completion_tokens = 0

    async def event(choice: int, output: OutputDelta) -> str:
        nonlocal completion_tokens
        if output.finish_reason is not None:
            completion_tokens += output.num_tokens
        is_slow = formatter.brings_prompt(output)
        return await asyncio.to_thread(formatter.event, choice, output) if is_slow else formatter.event(choice, output)

    def take(choice: int, output: OutputDelta) -> bool:
        return not formatter.brings_prompt(output) and send_at_once(partial(formatter.event, choice, output))

    try:
        part = await event(*first)
        while stream.num_unfinished:
            yield part
            stream.take = take  # from now on, since the response's head has been sent
            part = await event(*await anext(stream))
    except Exception as error:
        yield server_sent_event(json.dumps(to_api_error(error).detail))
        return
    counts = formatter.usage_event(usage(prompt_tokens, completion_tokens)) if include_usage else ""
    yield part + counts + DONE


class OutputResponse(StreamingResponse):
    """A response in parts, which closes the stream of outputs however the response ends.

    Starlette would start another task that waits for the client to leave. Here the connection cancels the response's.
    """

    def __init__(self, stream: AbstractContextManager, parts: AsyncIterator[str], media_type: str):
        super().__init__(parts, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self.stream = stream

    async def __call__(self, scope, receive, send) -> None:
        with self.stream, suppress(ClientLeft), scope["state"]["connection"].cancel_if_lost():
            await self.stream_response(send)
