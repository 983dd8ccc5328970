"""The HTTP application: the engine's client, what is checked before a request's body is read, and the addresses."""

import mimetypes
import time
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.staticfiles import StaticFiles

from ..engine import EngineCore
from . import addresses
from .engine_client import EngineClient
from .engine_thread import EngineThread
from .http_errors import HANDLED, error_response
from .live_view import LiveView
from .middleware import BodyLimit, KeyCheck, StatusCount
from .server_metrics import ServerMetrics


def make_app(
    engine: EngineCore,
    model_name: str = "tiny-model",
    max_queue: int = 64,
    deadline: float | None = None,
    api_key: str | None = None,
    pace: float = 0.0,
    max_body: int = 2**20,
    allowed_hosts: Iterable[str] | None = None,
    adapter_folder: str | None = None,
    connect: Callable[[EngineCore, int, float], EngineClient] | None = None,
    add_addresses: Callable[[FastAPI], None] | None = None,
) -> FastAPI:
    """Make the HTTP application for an engine, which it uses alone from then on.

    Args:
        engine: runs the requests. Give it a `trace_length`, or its trace grows without end.
        model_name, max_queue, deadline, api_key, pace: as on the command line (`ServerOptions`).
        max_body: the most bytes in a request's body.
        allowed_hosts: the names and addresses, without ports, by which clients may call the server; None for any.
        adapter_folder: the folder below which clients may load adapters while the server runs; None for nowhere.
        connect: makes the client of an engine that runs elsewhere, from `engine`, `max_queue` and `pace`; an
            `EngineThread` if omitted.
        add_addresses: adds further addresses to the application.

    Returns:
        The application; `app.state.engine_client` is its `EngineClient`, and `app.state.metrics` its metrics. Serve it
        with uvicorn and `ConnectionLimits.uvicorn_settings()`: responses need a `GuardedConnection`.
    """
    engine_client = (connect or EngineThread)(engine, max_queue, pace)

    @asynccontextmanager
    async def lifespan(_):
        engine_client.start()
        yield
        await engine_client.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    state, metrics = app.state, ServerMetrics(engine_client)
    state.engine, state.engine_client, state.metrics = engine, engine_client, metrics
    state.live_view, state.started = LiveView(engine_client), int(time.time())
    state.model_name, state.deadline, state.adapter_folder = model_name, deadline, adapter_folder
    # The last one that is added sees a request first.
    app.add_middleware(BodyLimit, limit=max_body)
    if api_key is not None:
        app.add_middleware(KeyCheck, key=api_key)
    if allowed_hosts is not None:
        # Against DNS rebinding: a hostile web page makes its own name resolve to this machine's address, and the
        # browser then lets it read what a server here responds. But the browser still sends the page's name as `Host`.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(allowed_hosts), www_redirect=False)
    app.add_middleware(StatusCount, requests=metrics.requests)
    for error_class in HANDLED:
        app.add_exception_handler(error_class, error_response)
    mimetypes.add_type("text/javascript", ".js")  # on some Windows machines the type is another, which browsers refuse
    app.mount("/page", StaticFiles(directory=addresses.PAGE), name="page")
    addresses.add_addresses(app)
    if add_addresses is not None:
        add_addresses(app)
    return app
