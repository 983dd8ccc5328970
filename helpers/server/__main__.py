"""Serve a model to OpenAI's clients.

    python -m helpers.server                                    the embedded model on http://127.0.0.1:8000
    python -m helpers.server --model path/to/folder --rows 16   any causal language model
    python -m helpers.server --policy static                    the same server with static batching, to compare

The page at / shows what the engine does; /metrics has its figures. Ctrl-C finishes what was accepted and ends.
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

import torch
import uvicorn

from ..engine import Engine
from ..engine_config import EngineConfig
from ..models import load_model
from ..scheduler import POLICIES
from .app import make_app

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRACED = 1000  # iterations that the engine remembers
LOGGING = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
LOGGING["handlers"]["access"]["stream"] = "ext://sys.stderr"  # standard output says where the server listens


class Server(uvicorn.Server):
    """Says where it listens, and ends by finishing what was accepted."""

    def __init__(self, config: uvicorn.Config, thread, grace: float):
        super().__init__(config)
        self.thread, self.grace = thread, grace

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        print(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end: also when the engine has, since nothing would come of waiting."""
        return not self.thread.alive or await super().on_tick(counter)

    async def shutdown(self, sockets=None) -> None:
        if self.thread.open:
            print(f"Finishing {self.thread.open} answers; Ctrl-C once more ends at once.", file=sys.stderr, flush=True)
        draining = asyncio.create_task(self.thread.drain(self.grace))
        await super().shutdown(sockets)  # takes no more connections and waits for those that are there
        if not self.force_exit:
            await draining
        else:
            draining.cancel()
            self.thread.give_up()
            await asyncio.sleep(0.1)  # for the last events to go out
            await self.lifespan.shutdown()


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if not _is_loopback(options.host) and options.api_key is None:
        warnings.warn(f"Whoever reaches {options.host} can use this server: give it an --api-key.", stacklevel=1)
    with _bound(options.host, options.port) as listening:  # before a model is loaded in vain
        _serve(options, listening)


def _serve(options: argparse.Namespace, listening: socket.socket) -> None:
    try:
        model, tokenizer = load_model(options.model, dtype=DTYPES[options.dtype])
        config = EngineConfig(
            max_batch_size=options.rows,
            max_tokens_per_step=options.tokens_per_step,
            policy=options.policy,
            num_blocks=options.blocks,
            block_size=options.block_size,
            trace_length=TRACED,
        )
        app = make_app(
            Engine(model, tokenizer, config),
            model_name=options.name or options.model or os.environ.get("COURSE_MODEL") or "tiny-model",
            max_queue=options.max_queue,
            deadline=options.deadline,
            api_key=options.api_key,
            pace=options.pace,
        )
    except ValueError as error:
        sys.exit(f"helpers.server: {error}")
    if options.stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    config = uvicorn.Config(
        app,
        log_level="info" if options.log else "warning",
        log_config=LOGGING,
        timeout_graceful_shutdown=int(options.grace) + 10,  # for clients that do not read what they get
        lifespan="on",
    )
    gc.freeze()  # a model is no garbage: to look for some in it again and again stops everybody for a while
    with contextlib.suppress(KeyboardInterrupt):
        Server(config, app.state.thread, options.grace).run([listening])
    if app.state.thread.died:
        sys.exit("helpers.server: the engine has stopped; what it said is above.")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m helpers.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a folder in the Hugging Face format or a Hub id; the embedded model if left out")
    add("--name", help="what clients call the model")
    add("--dtype", choices=DTYPES, default="float32")
    add("--host", default="127.0.0.1", help="an address of this machine; only this machine itself if left out")
    add("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    add("--rows", type=int, default=8, help="sequences that run at once (default: 8)")
    add("--tokens-per-step", type=int, default=512, help="tokens that an iteration reads at most (default: 512)")
    add("--policy", choices=POLICIES, default="fcfs", help="who gets a row next (default: fcfs)")
    add("--max-queue", type=int, default=64, help="answers that may wait for a row, more get status 429 (default: 64)")
    add("--blocks", type=int, help="blocks of the KV cache; as many as all rows need, up to 1 GiB, if left out")
    add("--block-size", type=int, default=16, help="tokens in a block (default: 16)")
    add(
        "--api-key",
        default=os.environ.get("COURSE_API_KEY") or None,
        help="what clients show; also from COURSE_API_KEY",
    )
    add("--deadline", type=float, help="seconds that a request may take, unless it says how many itself")
    add("--grace", type=float, default=30, help="seconds to finish what was accepted, at the end (default: 30)")
    add("--pace", type=float, default=0, help="slow motion: seconds that an iteration takes at least, up to 2")
    add("--log", action="store_true", help="a line for every request, on stderr")
    add("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.api_key == "" or options.deadline == 0:
        parser.error("an empty --api-key and a --deadline of 0 would refuse everybody: leave them out.")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port is between 0 and 65535, not {options.port}.")
    if not 0 <= options.pace <= 2:
        parser.error(f"--pace is between 0 and 2 seconds, not {options.pace}.")
    for name in ("deadline", "grace"):
        if getattr(options, name) is not None and not 0 <= getattr(options, name) < float("inf"):
            parser.error(f"--{name} is a number of seconds, not {getattr(options, name)}")
    return options


def _bound(host: str, port: int) -> socket.socket:
    """A socket with that address, on which nobody listens yet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        sys.exit(f"helpers.server: {host}:{port} is not to be had ({error}): name another --port, 0 for any free one.")
    return bound


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stop_with_stdin() -> None:
    """Whoever launched this server holds the other end of its standard input, as long as it lives."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
