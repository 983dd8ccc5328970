"""The HTTP application: which address does what."""

import mimetypes
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, HTMLResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST

from ..engine import EngineCore, StructuredOutputs
from .chat import ChatPrompt
from .engine_client import EngineClient
from .engine_thread import EngineThread
from .formats import ChatFormatter, CompletionFormatter
from .http_errors import HANDLED, APIError, error_response
from .live_view import LiveView
from .metrics import ServerMetrics
from .middleware import AllowedHosts, BodyLimit, RefuseIfFull, RequireKey, StatusCount
from .protocol import ChatRequest, CompletionRequest, ErrorBody, Pace, TokenizeRequest
from .reference import PAGE_HEADERS, reference_page, version
from .responses import EVENT_STREAM, EventStream, respond, while_connected
from .text_offsets import EchoedPrompt
from .tool_calls import ToolCallFormatter

PAGE = Path(__file__).parent / "page"


def make_app(
    engine: EngineCore,
    model_name: str = "tiny-model",
    max_queue: int = 64,
    deadline: float | None = None,
    api_key: str | None = None,
    pace: float = 0.0,
    max_body: int = 2**20,
    allowed_hosts: Iterable[str] | None = None,
    allowed_origins: Iterable[str] = (),
    connect: Callable[[EngineCore, int, float], EngineClient] | None = None,
    add_addresses: Callable[[FastAPI], None] | None = None,
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
        allowed_hosts: the names and addresses, without ports, by which clients may call the server; None for any.
        allowed_origins: the origins, such as "https://example.org", whose web pages may use the server; "*" for any.
        connect: makes the client of an engine that runs elsewhere, from `engine`, `max_queue` and `pace`; an
            `EngineThread` if omitted.
        add_addresses: adds further addresses to the application.

    Returns:
        The application; `app.state.engine_client` is its `EngineClient`, and `app.state.metrics` its metrics.

    Raises:
        ValueError: a negative max_queue.
    """
    engine_client = (connect or EngineThread)(engine, max_queue, pace)
    metrics, live_view = ServerMetrics(engine_client), LiveView(engine_client)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_):
        engine_client.start()
        yield
        await engine_client.stop()

    # Every handler is `async`: FastAPI would run any other function on a thread, and so use dozens of them under load.
    app = FastAPI(title="Continuous batching", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine_client, app.state.metrics = engine_client, metrics
    # The last one that is added sees a request first. A browser asks for leave (CORS) without the key.
    app.add_middleware(BodyLimit, limit=max_body)
    app.add_middleware(RefuseIfFull, refuse=engine_client.refuse_if_unable)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key)
    if allowed_origins := list(allowed_origins):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    if allowed_hosts is not None:
        app.add_middleware(AllowedHosts, hosts=allowed_hosts)
    app.add_middleware(StatusCount, requests=metrics.requests)
    for error_class in HANDLED:
        app.add_exception_handler(error_class, error_response)
    mimetypes.add_type("text/javascript", ".js")  # on some Windows machines the type is another, which browsers refuse
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    # --- OpenAI's addresses -------------------------------------------------------------------------------------

    generating = {"responses": documented(400, 401, 404, 413, 429, 500, 503, 504, stream=True)}

    @app.post("/v1/completions", **generating)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        formatter = CompletionFormatter(f"cmpl-{uuid.uuid4().hex}", model_name, engine.tokenizer, body.num_logprobs)
        return await generate(request, body, formatter, body.prompts)

    @app.post("/v1/chat/completions", **generating)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Continue a chat with the assistant's next message."""
        about = f"chatcmpl-{uuid.uuid4().hex}", model_name, engine.tokenizer, body.num_logprobs
        try:
            use = body.tool_use(engine.tokenizer)
            structured = use and use.structured_outputs
        except ValueError as error:
            raise APIError(400, str(error), "tools") from error
        formatter = ChatFormatter(*about) if use is None else ToolCallFormatter(*about, use=use)
        tools = body.tools if use else None
        prompt = ChatPrompt(body.messages, engine.tokenizer, engine.validator.check_length, tools)
        return await generate(request, body, formatter, [prompt], structured)

    async def generate(
        request: Request,
        body,
        formatter: CompletionFormatter,
        prompts: list,
        structured: StructuredOutputs | None = None,
    ) -> Response:
        check_model(body)
        seconds = deadline if body.deadline is None else body.deadline
        try:
            params = replace(body.params, structured_outputs=structured) if structured else body.params
            submitting = engine_client.submit(formatter.id, prompts, params, body.priority, seconds)
            stream, token_ids = await while_connected(request, submitting)
        except ValueError as error:
            raise APIError(400, str(error)) from error
        prompt_tokens = sum(map(len, token_ids))
        metrics.prompt_tokens.inc(prompt_tokens)
        if getattr(body, "echo", False):
            pairs = zip(prompts, token_ids, strict=True)
            echoes = [EchoedPrompt(prompt, ids, engine.tokenizer) for prompt, ids in pairs]
            formatter.echoes = [echo for echo in echoes for _ in range(params.n)]
        return await respond(request, stream, formatter, prompt_tokens, bool(body.stream), body.include_usage)

    def check_model(body) -> None:
        if body.model is not None:
            model_card(body.model)

    def model_card(name: str) -> dict[str, Any]:
        if name != model_name:
            raise APIError(
                404, f"There is no model {name!a}; this server runs {model_name!a}.", "model", "model_not_found"
            )
        return {"id": model_name, "object": "model", "created": started, "owned_by": "this-server"}

    @app.get("/v1/models", responses=documented(401))
    async def models() -> dict[str, Any]:
        """List the one model that this server runs."""
        return {"object": "list", "data": [model_card(model_name)]}

    @app.get("/v1/models/{name:path}", responses=documented(401, 404))
    async def model(name: str) -> dict[str, Any]:
        """Describe the model with this name."""
        return model_card(name)

    # --- vLLM's addresses ---------------------------------------------------------------------------------------

    @app.post("/tokenize", responses=documented(400, 401, 404, 413))
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Return the tokens of a prompt or a chat."""
        check_model(body)
        tokenizer, validator = engine.tokenizer, engine.validator
        prompt = body.prompt or ChatPrompt(body.messages, tokenizer, validator.check_length)
        try:
            tokens = await while_connected(request, engine_client.prompt_tokenizer.tokenize(prompt))
        except ValueError as error:
            raise APIError(400, str(error)) from error
        spelled = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        context = validator.model.context_length
        return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": spelled}

    @app.get("/version", responses=documented(401))
    async def server_version() -> dict[str, str]:
        """Return the version of this server."""
        return {"version": version()}

    # --- operation ----------------------------------------------------------------------------------------------

    @app.get("/health", responses=documented(503))
    async def health() -> dict[str, str]:
        """Say whether the server takes requests."""
        if (problem := engine_client.problem) is not None:
            raise APIError(503, problem)
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses=documented(401))
    async def prometheus_metrics() -> Response:
        """Report the server's metrics to Prometheus."""
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    # --- the live view ------------------------------------------------------------------------------------------

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "frame-ancestors 'none'"})

    @app.get("/events", responses=documented(401, 503, stream=True))
    async def live_events(request: Request) -> Response:
        """Follow the engine: a stream of events with every iteration and the state of the queue."""
        if request.method == "HEAD":
            return Response(media_type=EVENT_STREAM)  # the stream would never end
        listener = live_view.listen()
        return EventStream(listener, listener.events)

    @app.post("/pace", responses=documented(400, 401, 413))
    async def set_pace(body: Pace) -> Pace:
        """Set the least time per iteration, to watch the engine in slow motion."""
        engine_client.pace = body.seconds
        return body

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()), headers=PAGE_HEADERS)

    if add_addresses is not None:
        add_addresses(app)
    for operation in (operation for path in app.openapi()["paths"].values() for operation in path.values()):
        operation["responses"].pop("422", None)  # FastAPI's status for what is 400 here
    for route in app.routes:
        if isinstance(route, APIRoute) and "GET" in route.methods:
            route.methods.add("HEAD")  # the server leaves out the body; added here, since OpenAPI need not describe it
    return app


def documented(*statuses: int, stream: bool = False) -> dict[int, dict[str, Any]]:
    """Describe an address's responses for the OpenAPI page: errors with these statuses, and whether it streams."""
    errors = {status: {"model": ErrorBody, "description": "An error."} for status in statuses}
    content = {"application/json": {"schema": {"type": "object"}}, EVENT_STREAM: {}}
    success = {200: {"description": "The response, complete or as a stream of events.", "content": content}}
    return errors | (success if stream else {})
