"""The HTTP application: which address does what."""

import hmac
import mimetypes
import time
import uuid
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from ..engine import EngineCore
from .engine_thread import EngineThread
from .formats import ChatFormatter, CompletionFormatter, server_sent_event
from .http_errors import HANDLED, APIError, error_response
from .live_view import LiveView
from .metrics import ServerMetrics
from .middleware import BodyLimit, StatusCount
from .protocol import ChatRequest, CompletionRequest, ErrorBody, Pace, to_prompt
from .responses import EVENT_STREAM, respond

PAGE = Path(__file__).parent / "page"


def make_app(
    engine: EngineCore,
    model_name: str = "tiny-model",
    max_queue: int = 64,
    deadline: float | None = None,
    api_key: str | None = None,
    pace: float = 0.0,
    max_body: int = 2**20,
) -> FastAPI:
    """Make the HTTP application for an engine, which it uses alone from then on.

    Args:
        engine: runs the requests. Give it a `trace_length`, or its trace grows without end.
        model_name: what clients call the model.
        max_queue: how many sequences may wait for a row; further requests are refused.
        deadline: seconds that a request may take if it sets no deadline itself; None for no limit.
        api_key: the key that clients must send; None for no key.
        pace: the least number of seconds per iteration.
        max_body: the most bytes in a request's body.

    Returns:
        The application; `app.state.thread` is its `EngineThread`.

    Raises:
        ValueError: a negative max_queue.
    """
    thread = EngineThread(engine, max_queue, pace)
    metrics, live_view = ServerMetrics(thread), LiveView(thread)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_):
        thread.start()
        yield
        await thread.stop()

    # Every handler is `async`: FastAPI would run any other function on a thread, and so use dozens of them under load.
    async def check_key(authorization: str = Header("")) -> None:
        scheme, _, key = authorization.encode("latin-1").partition(b" ")  # the bytes as they were sent
        is_bearer = scheme.lower() == b"bearer"
        if api_key is not None and not (hmac.compare_digest(key, api_key.encode()) and is_bearer):
            raise APIError(401, "This server requires a key: send Authorization: Bearer KEY.", code="invalid_api_key")

    app = FastAPI(title="Continuous batching", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.thread = thread
    app.add_middleware(BodyLimit, limit=max_body)
    app.add_middleware(StatusCount, requests=metrics.requests)
    for error_class in HANDLED:
        app.add_exception_handler(error_class, error_response)
    mimetypes.add_type("text/javascript", ".js")  # on some Windows machines the type is another, which browsers refuse
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    guarded = {"dependencies": [Depends(check_key)]}

    # --- OpenAI's addresses -------------------------------------------------------------------------------------

    generating = guarded | {"responses": documented(400, 401, 404, 413, 429, 500, 503, 504, stream=True)}

    @app.post("/v1/completions", **generating)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        formatter = CompletionFormatter(f"cmpl-{uuid.uuid4().hex}", model_name, engine.tokenizer, body.num_logprobs)
        return await generate(request, body, formatter, body.prompts)

    @app.post("/v1/chat/completions", **generating)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a chat with the assistant's next message."""
        formatter = ChatFormatter(f"chatcmpl-{uuid.uuid4().hex}", model_name, engine.tokenizer, body.num_logprobs)
        return await generate(request, body, formatter, [partial(to_prompt, body.messages, engine.tokenizer)])

    async def generate(request: Request, body, formatter: CompletionFormatter, prompts: list) -> Response:
        if body.model is not None:
            model_card(body.model)
        seconds = deadline if body.deadline is None else body.deadline
        try:
            stream, prompt_tokens = await thread.submit(formatter.id, prompts, body.params, body.priority, seconds)
        except ValueError as error:
            raise APIError(400, str(error)) from error
        metrics.prompt_tokens.inc(prompt_tokens)
        return await respond(request, stream, formatter, prompt_tokens, bool(body.stream), body.include_usage)

    def model_card(name: str) -> dict[str, Any]:
        if name != model_name:
            raise APIError(
                404, f"There is no model {name!a}; this server runs {model_name!a}.", "model", "model_not_found"
            )
        return {"id": model_name, "object": "model", "created": started, "owned_by": "this-server"}

    @app.get("/v1/models", responses=documented(401), **guarded)
    async def models() -> dict[str, Any]:
        """List the one model that this server runs."""
        return {"object": "list", "data": [model_card(model_name)]}

    @app.get("/v1/models/{name:path}", responses=documented(401, 404), **guarded)
    async def model(name: str) -> dict[str, Any]:
        """Describe the model with this name."""
        return model_card(name)

    # --- operation ----------------------------------------------------------------------------------------------

    @app.get("/health", responses=documented(503))
    async def health() -> dict[str, str]:
        """Say whether the server takes requests."""
        if thread.draining or not thread.alive:
            raise APIError(503, "The server takes no requests.")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses=documented(401), **guarded)
    async def prometheus_metrics() -> Response:
        """Report the server's metrics to Prometheus."""
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    # --- the live view ------------------------------------------------------------------------------------------

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    @app.get("/events", include_in_schema=False, **guarded)
    async def live_events() -> StreamingResponse:
        events = (server_sent_event(message) async for message in live_view.messages())
        return StreamingResponse(events, media_type=EVENT_STREAM)

    @app.post("/pace", responses=documented(400, 401, 413), **guarded)
    async def set_pace(body: Pace) -> Pace:
        """Set the least time per iteration, to watch the engine in slow motion."""
        thread.pace = body.seconds
        return body

    for operation in (operation for path in app.openapi()["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's status for what is 400 here
    return app


def documented(*statuses: int, stream: bool = False) -> dict[int, dict[str, Any]]:
    """Describe an address's responses for the OpenAPI page: errors with these statuses, and whether it streams."""
    errors = {status: {"model": ErrorBody, "description": "An error."} for status in statuses}
    content = {"application/json": {"schema": {"type": "object"}}, EVENT_STREAM: {"schema": {"type": "string"}}}
    success = {200: {"description": "The response, complete or as a stream of events.", "content": content}}
    return errors | (success if stream else {})
