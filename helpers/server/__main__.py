"""Serve a model to OpenAI's clients.

    python -m helpers.server                                    the embedded model on http://127.0.0.1:8000
    python -m helpers.server --model path/to/folder --rows 16   any causal language model
    python -m helpers.server --policy static                    the same server with static batching, to compare

The page at / shows what the engine does; /metrics has its figures. Ctrl-C finishes the accepted requests and stops.
"""

import argparse
import asyncio
import contextlib
import copy
import gc
import ipaddress
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if "OMP_WAIT_POLICY" not in os.environ:
    # PyTorch's threads spin between two loops before they sleep, by default for 3 ms. While the cores are free, 0.1 ms
    # is as fast. Beside a busy process, an iteration of 11 ms took 40 ms with 0.1 ms, and up to 390 ms with more.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # read when torch is imported
try:
    import torch
    import uvicorn
    from fastapi import FastAPI

    from ..engine import POLICIES, EngineConfig
    from ..model_engine import Engine
    from ..models import load_model
    from ..models.quantization import FORMATS
    from .app import make_app
    from .connections import ConnectionLimits
    from .engine_client import EngineClient
    from .engine_thread import EngineThread
    from .worker_thread import WorkerThread
except KeyboardInterrupt:  # these imports take seconds
    sys.exit(130)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRACE_LENGTH = 1000  # iterations that the engine remembers
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


def main(arguments: list[str] | None = None) -> None:
    """Run the server until it is told to stop."""
    run(_options(arguments), _make_app)


def run(options: argparse.Namespace, make: Callable[[argparse.Namespace], FastAPI]) -> None:
    """Run an application until it is told to stop.

    Args:
        options: see `make_parser` and `parse`.
        make: makes the application, or raises a ValueError that says what is wrong with the options.
    """
    if not _is_loopback(options.host) and options.api_key is None:
        warnings.warn(
            f"Anyone who can reach {options.host} can use this server: set an --api-key.",
            stacklevel=1,
        )
    address = options.host, options.port
    with _bound_socket(*address, options.program) as listening:  # first, since loading a model takes a while
        _serve(options, listening, make)


def _make_app(options: argparse.Namespace) -> FastAPI:
    print("Loading the model.", file=sys.stderr, flush=True)
    worker = WorkerThread("engine")
    engine = worker.submit(lambda: _load_engine(options)).result()
    return make_app(engine, connect=partial(EngineThread, worker=worker), **app_options(options))


def _load_engine(options: argparse.Namespace) -> Engine:
    config = engine_config(options)  # first, since loading a model takes a while
    model, tokenizer = load_model(options.model, dtype=DTYPES[options.dtype], weights=options.weights)
    engine = Engine(model, tokenizer, config)
    _warn_if_memory_is_small(engine)
    return engine


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the settings of an engine."""
    return EngineConfig(
        max_batch_size=options.rows,
        max_tokens_per_step=options.tokens_per_step,
        policy=options.policy,
        num_blocks=options.blocks,
        block_size=options.block_size,
        trace_length=TRACE_LENGTH,
        speculative=options.speculative,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_model=options.draft_model,
    )


def app_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `make_app`."""
    return {
        "model_name": options.served_model_name or _name_of(options.model or os.environ.get("COURSE_MODEL")),
        "max_queue": options.max_queue,
        "deadline": options.deadline,
        "api_key": options.api_key,
        "pace": options.pace,
        "allowed_hosts": _allowed_hosts(options.host, options.allowed_host),
        "allowed_origins": options.allowed_origin,
    }


def _serve(
    options: argparse.Namespace, listening: socket.socket, make: Callable[[argparse.Namespace], FastAPI]
) -> None:
    try:
        limits = ConnectionLimits(options.max_connections, options.client_timeout).within_descriptors()
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
        **limits.uvicorn_settings(),
    )
    gc.freeze()  # the model is never garbage: each full collection would search all of it and delay every request
    with contextlib.suppress(KeyboardInterrupt):
        Server(config, app.state.engine_client, options.grace).run([listening])
    if app.state.engine_client.crashed:
        sys.exit(f"{options.program}: the engine has stopped because of the error above.")


def make_parser(program: str, description: str, port: int) -> argparse.ArgumentParser:
    """Make a parser of a server's options.

    Args:
        program: the module that is run.
        description: for `--help`.
        port: the default port.
    """
    parser = argparse.ArgumentParser(
        f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(program=program)
    add = parser.add_argument
    add("--model", help="a folder in the Hugging Face format, a GGUF file or a Hub id (default: the embedded model)")
    add("--served-model-name", "--name", help="what clients call the model (default: the name of its folder or file)")
    add("--dtype", choices=DTYPES, default="float32", help="the type of the weights (default: float32)")
    add(
        "--weights",
        choices=FORMATS,
        help="store the weights of linear layers as integers of 8 or 4 bits (default: off)",
    )
    add("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1, for this machine only)")
    add("--port", type=int, default=port, help=f"the port to listen on, 0 for a free one (default: {port})")
    add("--rows", type=int, default=8, help="sequences that run at once (default: 8)")
    add("--tokens-per-step", type=int, default=512, help="the most tokens that an iteration computes (default: 512)")
    add("--policy", choices=POLICIES, default="fcfs", help="in which order requests get rows (default: fcfs)")
    add("--max-queue", type=int, default=64, help="the most sequences that wait; more get status 429 (default: 64)")
    add("--blocks", type=int, help="blocks of the KV cache (default: as many as all rows need, up to 1 GiB)")
    add("--block-size", type=int, default=16, help="tokens per block (default: 16)")
    add(
        "--speculative",
        choices=("ngram", "draft"),
        help="guess tokens ahead, from the request's own text or with a draft model; no token changes (default: off)",
    )
    add("--num-speculative-tokens", type=int, default=4, help="the most tokens to guess ahead (default: 4)")
    add(
        "--draft-model", help="a folder or a Hub id of a smaller model with the same tokenizer, for --speculative draft"
    )
    add(
        "--api-key",
        default=os.environ.get("COURSE_API_KEY") or None,
        help="the key that clients must send (default: the environment's COURSE_API_KEY, or none)",
    )
    add(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a name by which clients may call this server, * for any (default: this machine's own names; may be "
        "repeated)",
    )
    add(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin, such as https://example.org, whose web pages may use this server, * for any (may be repeated)",
    )
    add("--deadline", type=float, help="seconds that a request may take if it sets no deadline itself")
    add(
        "--max-connections",
        type=int,
        default=512,
        help="the most open connections (default: 512, or as many as the limit of open files allows)",
    )
    add(
        "--client-timeout",
        type=float,
        default=30,
        help="seconds to wait for a request's head, for its body, and for a client that does not read (default: 30)",
    )
    add("--grace", type=float, default=30, help="seconds in which to finish accepted requests and stop (default: 30)")
    add("--pace", type=float, default=0, help="slow motion: the least number of seconds per iteration, up to 2")
    add("--log", action="store_true", help="log every request to stderr")
    add("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def _options(arguments: list[str] | None) -> argparse.Namespace:
    return parse(make_parser("helpers.server", __doc__, 8000), arguments)


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line; exit with a message if one is outside its range."""
    options = parser.parse_args(arguments)
    if options.api_key == "" or options.deadline == 0:
        parser.error("an empty --api-key or a --deadline of 0 would refuse every request: leave it out.")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, not {options.port}.")
    if not 0 <= options.pace <= 2:
        parser.error(f"--pace must be from 0 to 2 seconds, not {options.pace}.")
    for name in ("deadline", "grace"):
        seconds = getattr(options, name)
        if seconds is not None and not 0 <= seconds < float("inf"):
            parser.error(f"--{name} must be a number of seconds, not {seconds}.")
    return options


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


def _name_of(model: str | None) -> str:
    """Return what clients call a model unless told otherwise: the name of its folder or file, or its whole Hub id."""
    if not model:
        return "tiny-model"
    return Path(model).resolve().name if Path(model).exists() else model


def _allowed_hosts(host: str, others: list[str] | None) -> list[str] | None:
    """Return the names by which clients may call a server that listens on `host`; None for any."""
    if "*" in (others or ()) or (others is None and not _is_loopback(host)):
        return None  # the names of a server for other machines are not known here
    return ["localhost", "127.0.0.1", "::1", host, *(others or ())]


def _warn_if_memory_is_small(engine: Engine) -> None:
    blocks, context = engine.block_manager, engine.validator.model.context_length
    if blocks is None or context is None or blocks.num_blocks >= (needed := blocks.blocks_for(context - 1)):
        return
    warnings.warn(
        f"The KV cache holds {blocks.num_blocks * blocks.block_size} tokens, prompt and output together, and longer "
        f"requests are refused: set --blocks to at least {needed} for the model's whole context of {context} tokens.",
        stacklevel=1,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_with_stdin() -> None:
    """Stop the server when its standard input ends: `launch` holds the other end for as long as its process lives."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
