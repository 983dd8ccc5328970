"""What happens at each address of the server. All functions share what `make_app` keeps in the application's state.

Each one is `async`: FastAPI would run any other function on a thread, and so use dozens of them under load.
"""

import uuid
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from . import adapters
from .chat import ChatPrompt
from .formats import ChatFormatter, CompletionFormatter
from .http_errors import APIError
from .protocol import ChatRequest, CompletionRequest, Pace
from .responses import EVENT_STREAM, OutputResponse, event_response, whole_response
from .text_offsets import EchoedPrompt

PAGE = Path(__file__).parent / "page"


def add_addresses(app: FastAPI) -> None:
    """Add all addresses to the application."""
    # OpenAI's
    app.post("/v1/completions")(completions)
    app.post("/v1/chat/completions")(chat_completions)
    app.get("/v1/models")(models)
    app.get("/v1/models/{name:path}")(model)
    # vLLM's
    if app.state.adapter_folder is not None:
        adapters.add_addresses(app)
    # for operation
    app.get("/health")(health)
    app.get("/metrics")(prometheus_metrics)
    # for people
    app.get("/")(page)
    app.get("/events")(live_events)
    app.post("/pace")(set_pace)


async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    return await generate(request, body, CompletionFormatter(*_about(request, body, "cmpl")), body.prompts)


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Continue a chat with the assistant's next message."""
    state = request.app.state
    prompt = ChatPrompt(body.messages, state.engine.tokenizer, state.engine_client.prompt_tokenizer.check_length)
    return await generate(request, body, ChatFormatter(*_about(request, body, "chatcmpl")), [prompt])


def _about(request: Request, body: CompletionRequest | ChatRequest, kind: str) -> tuple:
    """Return the arguments of a formatter, with a new id for the response."""
    state = request.app.state
    name = body.model or state.model_name
    return f"{kind}-{uuid.uuid4().hex}", name, state.engine.tokenizer, body.num_logprobs


async def generate(
    request: Request, body: CompletionRequest | ChatRequest, formatter: CompletionFormatter, prompts: list
) -> Response:
    """Hand the prompts to the engine, and respond with its outputs. A client that disconnects cancels its request."""
    state, connection = request.app.state, request.state.connection
    adapter = find_adapter(request, body.model)
    seconds = state.deadline if body.deadline is None else body.deadline
    with connection.cancel_if_lost():
        try:
            params = body.params
            submit = state.engine_client.submit
            stream, token_ids = await submit(formatter.id, prompts, params, body.priority, seconds, adapter)
        except ValueError as error:
            raise APIError(400, str(error)) from error
        prompt_tokens = sum(map(len, token_ids))
        state.metrics.prompt_tokens.inc(prompt_tokens)
        if getattr(body, "echo", False):
            pairs = zip(prompts, token_ids, strict=True)
            echoes = [EchoedPrompt(prompt, ids, state.engine.tokenizer) for prompt, ids in pairs]
            formatter.echoes = [echo for echo in echoes for _ in range(params.n)]
        if not body.stream:
            return await whole_response(stream, formatter, prompt_tokens)
        return await event_response(stream, formatter, prompt_tokens, body.include_usage, connection.send_at_once)


async def models(request: Request) -> dict[str, Any]:
    """List the model that this server runs, and its adapters, which have it as their `parent`."""
    state = request.app.state
    names = [state.model_name, *adapters.loaded_adapters(state.engine)]
    return {"object": "list", "data": [_model_card(request, name) for name in names]}


async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe the model or the adapter with this name."""
    find_adapter(request, name)
    return _model_card(request, name)


def _model_card(request: Request, name: str) -> dict[str, Any]:
    state = request.app.state
    card = {"id": name, "object": "model", "created": state.started, "owned_by": "this-server"}
    return card if name == state.model_name else card | {"parent": state.model_name}


def find_adapter(request: Request, name: str | None) -> str | None:
    """Return the adapter that a request names as its model; None for the model itself.

    Raises:
        APIError: there is no such model.
    """
    own = request.app.state.model_name
    if name in (None, own):
        return None
    if name not in (adapter_of := adapters.loaded_adapters(request.app.state.engine)):
        known = " and ".join(map(ascii, [own, *list(adapter_of)[:10]]))
        raise APIError(404, f"There is no model {name!a}; this server runs {known}.", "model", "model_not_found")
    return name


async def health(request: Request) -> dict[str, str]:
    """Say whether the server takes requests."""
    if (problem := request.app.state.engine_client.problem) is not None:
        raise APIError(503, problem)
    return {"status": "ok"}


async def prometheus_metrics(request: Request) -> Response:
    """Report the server's metrics to Prometheus."""
    return Response(request.app.state.metrics.page(), media_type=CONTENT_TYPE_LATEST)


async def page() -> FileResponse:
    """Return the page that draws what the engine does."""
    return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "frame-ancestors 'none'"})


async def live_events(request: Request) -> Response:
    """Follow the engine: a stream of events with every iteration and the state of the queue."""
    live_view = request.app.state.live_view
    return OutputResponse(live_view.listen(), live_view.events(), EVENT_STREAM)


async def set_pace(body: Pace, request: Request) -> Pace:
    """Set the least time per iteration, to watch the engine in slow motion."""
    request.app.state.engine_client.pace = body.seconds
    return body
