"""Serve a model to OpenAI's clients.

    python -m helpers.server                                    the embedded model on http://127.0.0.1:8000
    python -m helpers.server --model path/to/folder --rows 16   any causal language model
    python -m helpers.server --policy static                    the same server with static batching, to compare

The page at / shows what the engine does; /metrics has its figures. Ctrl-C finishes what was accepted and ends.
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import os
import signal
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


class Server(uvicorn.Server):
    """Says where it listens, and ends by finishing what was accepted."""

    def __init__(self, config: uvicorn.Config, thread, grace: float):
        super().__init__(config)
        self.thread, self.grace = thread, grace

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        print(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets=None) -> None:
        draining = asyncio.create_task(self.thread.drain(self.grace))
        await super().shutdown(sockets)  # takes no more connections and waits for those that are there
        await draining


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if not _is_loopback(options.host) and options.api_key is None:
        warnings.warn(f"Whoever reaches {options.host} can use this server: give it an --api-key.", stacklevel=1)
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
        options.host,
        options.port,
        log_level="info" if options.log else "warning",
        timeout_graceful_shutdown=int(options.grace) + 10,  # for clients that do not read what they get
        lifespan="on",
    )
    gc.freeze()  # a model is no garbage: to look for some in it again and again stops everybody for a while
    with contextlib.suppress(KeyboardInterrupt):
        Server(config, app.state.thread, options.grace).run()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m helpers.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="a folder in the Hugging Face format or a Hub id; the embedded model if left out")
    add("--name", help="what clients call the model")
    add("--dtype", choices=DTYPES, default="float32")
    add("--host", default="127.0.0.1", help="an address of this machine; only this machine itself if left out")
    add("--port", type=int, default=8000, help="0 for a free one")
    add("--rows", type=int, default=8, help="sequences that run at once (default: 8)")
    add("--tokens-per-step", type=int, default=512, help="tokens that an iteration reads at most (default: 512)")
    add("--policy", choices=POLICIES, default="fcfs", help="who gets a row next (default: fcfs)")
    add("--max-queue", type=int, default=64, help="answers that may wait for a row, more get status 429 (default: 64)")
    add("--blocks", type=int, help="blocks of the KV cache; as many as all rows need, up to 1 GiB, if left out")
    add("--block-size", type=int, default=16, help="tokens in a block (default: 16)")
    add("--api-key", default=os.environ.get("COURSE_API_KEY"), help="what clients show; also from COURSE_API_KEY")
    add("--deadline", type=float, help="seconds that a request may take, unless it says how many itself")
    add("--grace", type=float, default=30, help="seconds to finish what was accepted, at the end (default: 30)")
    add("--pace", type=float, default=0, help="slow motion: seconds that an iteration takes at least")
    add("--log", action="store_true", help="a line for every request, on stderr")
    add("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("deadline", "grace", "pace"):
        if getattr(options, name) is not None and not 0 <= getattr(options, name) < float("inf"):
            parser.error(f"--{name} is a number of seconds, not {getattr(options, name)}")
    return options


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
