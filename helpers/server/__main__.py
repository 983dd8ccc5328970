"""Serve a model to OpenAI's clients.

    python -m helpers.server                                    the embedded model on http://127.0.0.1:8000
    python -m helpers.server --model path/to/folder --rows 16   any causal language model
    python -m helpers.server --policy static                    the same server with static batching, to compare

The page at / shows what the engine does; /metrics has its figures. Ctrl-C finishes the accepted requests and stops.
"""

import asyncio
import contextlib
import copy
import gc
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial

if "OMP_WAIT_POLICY" not in os.environ:
    # PyTorch's threads spin between two loops before they sleep, by default for 3 ms. While the cores are free, 0.1 ms
    # is as fast. Beside a busy process, an iteration of 11 ms took 40 ms with 0.1 ms, and up to 390 ms with more.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # read when torch is imported
try:
    import torch
    import uvicorn
    from fastapi import FastAPI

    from ..command_line import make_command, parse
    from ..model_engine import Engine
    from ..models import load_model
    from .app import make_app
    from .engine_client import EngineClient
    from .engine_thread import EngineThread
    from .options import ServerOptions, is_loopback
    from .worker_thread import WorkerThread
except KeyboardInterrupt:  # these imports take seconds
    sys.exit(130)

LAST_WORDS = 1.0  # seconds at the end of the grace period for sending the reason to requests that could not finish
LOGGING = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
LOGGING["handlers"]["access"]["stream"] = "ext://sys.stderr"  # standard output has the address of the server only


class Server(uvicorn.Server):
    """Prints its address when it is ready, and finishes the accepted requests before it stops.

    Args:
        config: uvicorn's settings.
        engine_client: accepts the requests.
        grace: seconds to finish accepted requests and to send their responses; at least `LAST_WORDS`.
    """

    def __init__(self, config: uvicorn.Config, engine_client: EngineClient, grace: float):
        super().__init__(config)
        self.engine_client, self.grace = engine_client, max(grace, LAST_WORDS)

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        print(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop: when asked to, or when the engine has stopped and no request can finish."""
        return not self.engine_client.alive or await super().on_tick(counter)

    async def shutdown(self, sockets=None) -> None:
        if number := self.engine_client.num_in_flight:
            print(f"Finishing {number} sequences. Press Ctrl-C again to stop at once.", file=sys.stderr, flush=True)
        draining = asyncio.create_task(self.engine_client.drain(self.grace - LAST_WORDS))
        asyncio.get_running_loop().call_later(self.grace, self.abort_connections)
        await super().shutdown(sockets)  # refuses new connections and waits for the open ones
        if not self.force_exit:
            await draining
        else:
            draining.cancel()
            self.engine_client.fail_pending()
            await asyncio.sleep(0.1)  # for the last events to be sent
            await self.lifespan.shutdown()

    def abort_connections(self) -> None:
        """Close the connections whose clients have not read their responses."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


command = make_command("helpers.server", __doc__, ServerOptions)


def main(arguments: list[str] | None = None) -> None:
    """Run the server until it is told to stop."""
    run(parse(command, arguments), _make_app)


def run(options: ServerOptions, make: Callable[[ServerOptions], FastAPI]) -> None:
    """Run an application until it is told to stop.

    Args:
        options: see `options.py`.
        make: makes the application, or raises a ValueError that says what is wrong with the options.
    """
    if not is_loopback(options.host) and options.api_key is None:
        warnings.warn(f"Anyone who can reach {options.host} can use this server: set an --api-key.", stacklevel=1)
    address = options.host, options.port
    with _bound_socket(*address, options.program) as listening:  # first, since loading a model takes a while
        _serve(options, listening, make)


def _make_app(options: ServerOptions) -> FastAPI:
    print("Loading the model.", file=sys.stderr, flush=True)
    worker = WorkerThread()
    engine = worker.submit(lambda: _load_engine(options)).result()
    return make_app(engine, connect=partial(EngineThread, worker=worker), **options.app_options)


def _load_engine(options: ServerOptions) -> Engine:
    model, tokenizer = load_model(options.model, dtype=getattr(torch, options.dtype), weights=options.weights)
    engine = Engine(model, tokenizer, options.engine_config)
    for name, folder in options.folder_of_adapters.items():
        engine.load_adapter(name, folder)
    return engine


def _serve(options: ServerOptions, listening: socket.socket, make: Callable[[ServerOptions], FastAPI]) -> None:
    try:
        app = make(options)
    except ValueError as error:
        sys.exit(f"{options.program}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    config = uvicorn.Config(
        app,
        log_level="info" if options.log else "warning",
        log_config=LOGGING,
        timeout_graceful_shutdown=int(options.grace) + 10,  # never reached: `shutdown` aborts what takes longer
        lifespan="on",
        **options.connection_limits.uvicorn_settings(),
    )
    gc.freeze()  # the model is never garbage: each full collection would search all of it and delay every request
    with contextlib.suppress(KeyboardInterrupt):
        Server(config, app.state.engine_client, options.grace).run([listening])
    if app.state.engine_client.crashed:
        sys.exit(f"{options.program}: the engine has stopped because of the error above.")


def _bound_socket(host: str, port: int, program: str = "helpers.server") -> socket.socket:
    """Bind a socket to an address on which nothing listens yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)  # asyncio sends without delay only if the protocol is given
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        sys.exit(f"{program}: cannot listen on {host}:{port} ({error}). Choose another --port, or 0 for a free one.")
    return bound


def _stop_with_stdin() -> None:
    """Stop the server when its standard input ends: `launch` holds the other end for as long as its process lives."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
