"""The HTTP front: which address does what, and with which status something goes wrong.

An answer's headers, of a stream too, wait for its first token. So whatever goes wrong before that has a status of its
own, which is what clients look at; what goes wrong later is the stream's last event.

    400 a request that can never run    401 no key    404 no such model    413 too long a body
    429 the queue is full               500 the engine failed    503 shutting down    504 too late
"""

import asyncio
import hmac
import json
import mimetypes
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as AnyHTTPException

from ..engine import Engine
from ..outputs import RequestOutput
from .answers import DONE, ChatFormat, CompletionFormat, event, usage
from .engine_thread import Answers, DeadlinePassed, EngineFailed, EngineThread, QueueFull, Refused, ShuttingDown
from .measures import Measures
from .protocol import ChatRequest, CompletionRequest, ErrorBody, Pace, complaint, to_prompt
from .watch import Watch

PAGE = Path(__file__).parent / "page"
EVENT_STREAM = "text/event-stream"
CLIENT_GONE = 499  # for a client that closed the connection, so nobody reads it; the name is nginx's
KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class Refusal(HTTPException):
    """An error as an answer, in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, headers=None):
        kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        super().__init__(status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers)


def refusal(error: Exception) -> Refusal:
    """What a client is told of what went wrong."""
    match error:
        case Refusal():
            return error
        case QueueFull():
            return Refusal(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
        case ShuttingDown():
            return Refusal(503, str(error), code="shutting_down", headers={"Retry-After": str(error.retry_after)})
        case DeadlinePassed():
            # OpenAI's client would try again by itself, and make those who are too late three times as many.
            return Refusal(504, str(error), code="deadline_passed", headers={"x-should-retry": "false"})
        case EngineFailed():
            return Refusal(500, str(error), code="engine_failed")
        case RequestValidationError():
            return Refusal(400, *complaint(error.errors()))
        case AnyHTTPException(status_code=404):
            return Refusal(404, "There is nothing here: requests go to /v1/completions and /v1/chat/completions.")
        case AnyHTTPException():  # the framework's own: no such address, not with this method, no JSON
            return Refusal(error.status_code, str(error.detail), headers=error.headers)
        case _:
            return Refusal(500, f"{type(error).__name__}: {error}")


def respond(_: Request, error: Exception) -> Response:
    error = refusal(error)
    # json.dumps escapes what is no text, such as half of a surrogate pair in the name of a parameter.
    return Response(json.dumps(error.detail), error.status_code, error.headers, "application/json")


class BodyLimit:
    """Ends a request whose body is longer than `limit` bytes, before all of it has been read."""

    def __init__(self, app, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope, receive, send) -> None:
        length = 0

        async def limited():
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self.limit:
                raise Refusal(413, f"A request's body has {self.limit} bytes at most: send less at once.")
            return message

        await self.app(scope, limited if scope["type"] == "http" else receive, send)


class EventStream(StreamingResponse):
    """Answers as they come. However the stream ends, nobody works on them afterwards."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]):
        super().__init__(events, media_type=EVENT_STREAM, headers={"Cache-Control": "no-cache"})
        self.answers = answers

    async def __call__(self, scope, receive, send) -> None:
        with self.answers:
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, work: Coroutine) -> Any:
    """The result of some work, which is cancelled as soon as the client goes away."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Refusal(CLIENT_GONE, "The client has gone away.")
    finally:
        working.cancel()
        leaving.cancel()


async def whole(answers: Answers, shape: CompletionFormat, prompt_tokens: int) -> str:
    """All answers to a request as JSON, when the last one has ended."""
    last: dict[int, RequestOutput] = {}
    async for choice, output in answers:
        last[choice] = output
    tokens = sum(len(output.token_ids) for output in last.values())
    outputs = [last[choice] for choice in sorted(last)]

    def made() -> str:
        return json.dumps(shape.answer(outputs, usage(prompt_tokens, tokens)))

    return made() if shape.top is None else await asyncio.to_thread(made)  # thousands of log-probabilities take a while


async def events(
    first: tuple[int, RequestOutput],
    answers: Answers,
    shape: CompletionFormat,
    prompt_tokens: int,
    include_usage: bool,
) -> AsyncIterator[str]:
    """A chunk for each token. What goes wrong on the way is the last event."""
    tokens = len(first[1].new_token_ids)
    try:
        yield event(shape.chunk(*first))
        async for choice, output in answers:
            yield event(shape.chunk(choice, output))
            tokens += len(output.new_token_ids)
    except Exception as error:
        yield event(refusal(error).detail)
        return
    if include_usage:
        yield event(shape.last_chunk(usage(prompt_tokens, tokens)))
    yield DONE


def make_app(
    engine: Engine,
    model_name: str = "tiny-model",
    max_queue: int = 64,
    deadline: float | None = None,
    api_key: str | None = None,
    pace: float = 0.0,
    max_body: int = 2**20,
) -> FastAPI:
    """A server for an engine, which is nobody else's from then on.

    Args:
        engine: what runs the requests; with a `trace_length`, or its record grows for ever.
        model_name: what clients call the model.
        max_queue: how many answers may wait for a row; more are refused.
        deadline: seconds that a request may take, unless it says how many itself; None for as many as it takes.
        api_key: what clients have to show; None for nothing.
        pace: seconds that an iteration takes at least.
        max_body: bytes of a request at most.

    Returns:
        The application; `app.state.thread` is its `EngineThread`.

    Raises:
        ValueError: a max_queue below 0.
    """
    thread = EngineThread(engine, max_queue, pace)
    measures, watch = Measures(thread), Watch(thread)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_):
        thread.start()
        yield
        await thread.stop()

    # All of this is `async`: FastAPI would have anything else done by threads, dozens of them under load.
    async def authorised(authorization: str = Header("")) -> None:
        scheme, _, shown = authorization.encode("latin-1").partition(b" ")  # the bytes that came
        bearer = scheme.lower() == b"bearer"
        if api_key is not None and not (hmac.compare_digest(shown, api_key.encode()) and bearer):
            raise Refusal(401, "This server wants a key: send Authorization: Bearer KEY.", code="invalid_api_key")

    app = FastAPI(title="Continuous batching", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.thread = thread
    app.add_middleware(BodyLimit, limit=max_body)
    app.add_middleware(measures.counting_statuses)
    for kind in (Exception, AnyHTTPException, RequestValidationError, Refused, DeadlinePassed, EngineFailed):
        app.add_exception_handler(kind, respond)
    mimetypes.add_type("text/javascript", ".js")  # some Windows machines think otherwise, and browsers then refuse it
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    guarded = {"dependencies": [Depends(authorised)]}

    # --- OpenAI's addresses -------------------------------------------------------------------------------------

    generating = guarded | {"responses": documented(400, 401, 404, 413, 429, 500, 503, 504, stream=True)}

    @app.post("/v1/completions", **generating)
    async def completions(wanted: CompletionRequest, request: Request) -> Response:
        """Continue a prompt, or each of several."""
        shape = CompletionFormat(f"cmpl-{uuid.uuid4().hex}", model_name, engine.tokenizer, wanted.top)
        return await answer(request, wanted, shape, wanted.prompts)

    @app.post("/v1/chat/completions", **generating)
    async def chat_completions(wanted: ChatRequest, request: Request) -> Response:
        """What the assistant says next."""
        shape = ChatFormat(f"chatcmpl-{uuid.uuid4().hex}", model_name, engine.tokenizer, wanted.top)
        return await answer(request, wanted, shape, [partial(to_prompt, wanted.messages, engine.tokenizer)])

    async def answer(request: Request, wanted, shape: CompletionFormat, prompts: list) -> Response:
        if wanted.model is not None:
            known(wanted.model)
        seconds = deadline if wanted.deadline is None else wanted.deadline
        try:
            answers, prompt_tokens = await thread.submit(shape.id, prompts, wanted.params, wanted.priority, seconds)
        except ValueError as error:
            raise Refusal(400, str(error)) from error
        measures.prompt_tokens.inc(prompt_tokens)
        with ExitStack() as leaving:
            leaving.enter_context(answers)
            if not wanted.stream:
                result = await while_connected(request, whole(answers, shape, prompt_tokens))
                return Response(result, media_type="application/json")
            first = await while_connected(request, anext(answers))
            leaving.pop_all()  # from here on, the response sees to it
        return EventStream(answers, events(first, answers, shape, prompt_tokens, wanted.include_usage))

    def known(name: str) -> dict[str, Any]:
        if name != model_name:
            raise Refusal(404, f"There is no model {name!a}; there is {model_name!a}.", "model", "model_not_found")
        return {"id": model_name, "object": "model", "created": started, "owned_by": "this-server"}

    @app.get("/v1/models", responses=documented(401), **guarded)
    async def models() -> dict[str, Any]:
        """The one model that this server runs."""
        return {"object": "list", "data": [known(model_name)]}

    @app.get("/v1/models/{name:path}", responses=documented(401, 404), **guarded)
    async def model(name: str) -> dict[str, Any]:
        """The model of that name, if it is this one."""
        return known(name)

    # --- for those who look after it ----------------------------------------------------------------------------

    @app.get("/health", responses=documented(503))
    async def health() -> dict[str, str]:
        """Whether it takes requests."""
        if thread.draining or not thread.alive:
            raise Refusal(503, "The server takes no requests.")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses=documented(401), **guarded)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(measures.page(), media_type=CONTENT_TYPE_LATEST)

    # --- the window into the engine -----------------------------------------------------------------------------

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    @app.get("/events", include_in_schema=False, **guarded)
    async def watching() -> StreamingResponse:
        """What the engine does, as it happens."""
        return StreamingResponse((event(message) async for message in watch.messages()), media_type=EVENT_STREAM)

    @app.post("/pace", responses=documented(400, 401, 413), **guarded)
    async def set_pace(wanted: Pace) -> Pace:
        """Slow motion, to see what happens."""
        thread.pace = wanted.seconds
        return wanted

    for operation in (operation for path in app.openapi()["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's status for what is 400 here
    return app


def documented(*statuses: int, stream: bool = False) -> dict[int, dict[str, Any]]:
    """What the OpenAPI page says of an address' answers."""
    errors = {status: {"model": ErrorBody, "description": "An error."} for status in statuses}
    content = {"application/json": {"schema": {"type": "object"}}, EVENT_STREAM: {"schema": {"type": "string"}}}
    return errors | (
        {200: {"description": "The answer, at once or as it comes.", "content": content}} if stream else {}
    )
