"""The options of a server's command line, and the settings of the engine and of the application that they describe."""

import argparse
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..engine import POLICIES, EngineConfig
from ..models.quantization import FORMATS
from .connections import ConnectionLimits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRACE_LENGTH = 1000  # iterations that the engine remembers


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
    _add_engine_options(parser.add_argument_group("model and engine").add_argument)
    _add_access_options(parser.add_argument_group("access").add_argument, port)
    _add_operation_options(parser.add_argument_group("operation").add_argument)
    return parser


def _add_engine_options(add: Callable) -> None:
    default = EngineConfig()
    add("--model", help="a folder in the Hugging Face format, a GGUF file or a Hub id (default: the embedded model)")
    add("--served-model-name", "--name", help="what clients call the model (default: the name of its folder or file)")
    add("--dtype", choices=DTYPES, default="float32", help="the type of the weights (default: %(default)s)")
    add("--weights", choices=FORMATS, help="store linear layers as integers of 8 or 4 bits (default: off)")
    rows, tokens, size = default.max_batch_size, default.max_tokens_per_step, default.block_size
    add("--rows", type=int, default=rows, help="sequences that run at once (default: %(default)s)")
    add("--tokens-per-step", type=int, default=tokens, help="most tokens of an iteration (default: %(default)s)")
    add("--policy", choices=POLICIES, default=default.policy, help="the order of admission (default: %(default)s)")
    add("--blocks", type=int, help="blocks of the KV cache (default: as many as all rows need, up to 1 GiB)")
    add("--block-size", type=int, default=size, help="tokens per block (default: %(default)s)")
    guessed = "guess tokens ahead, from the request's own text or with a draft model; no token changes (default: off)"
    add("--speculative", choices=("ngram", "draft"), help=guessed)
    most = default.num_speculative_tokens
    add("--num-speculative-tokens", type=int, default=most, help="the most tokens to guess (default: %(default)s)")
    add("--draft-model", help="a folder or Hub id of a smaller model with the same tokenizer, for --speculative draft")


def _add_access_options(add: Callable, port: int) -> None:
    add("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s, for this machine only)")
    add("--port", type=int, default=port, help="the port to listen on, 0 for a free one (default: %(default)s)")
    key = "the key that clients must send (default: the environment's COURSE_API_KEY, or none)"
    add("--api-key", default=os.environ.get("COURSE_API_KEY") or None, help=key)
    host = "a name by which clients may call this server, * for any (default: this machine's own; may be repeated)"
    add("--allowed-host", action="append", metavar="NAME", help=host)
    origin = "such as https://example.org: its web pages may use this server; * for any (may be repeated)"
    add("--allowed-origin", action="append", default=[], metavar="ORIGIN", help=origin)


def _add_operation_options(add: Callable) -> None:
    limits = ConnectionLimits()
    add("--max-queue", type=int, default=64, help="sequences that may wait; more get status 429 (default: %(default)s)")
    add("--deadline", type=float, help="seconds that a request may take if it sets no deadline itself")
    most = "the most open connections (default: %(default)s, or as many as the limit of open files allows)"
    add("--max-connections", type=int, default=limits.max_connections, help=most)
    wait = "seconds to wait for a request's head, its body, and a client that does not read (default: %(default)s)"
    add("--client-timeout", type=float, default=limits.client_timeout, help=wait)
    add("--grace", type=float, default=30, help="seconds to finish accepted requests and stop (default: %(default)s)")
    add("--pace", type=float, default=0, help="slow motion: the least number of seconds per iteration, up to 2")
    add("--log", action="store_true", help="log every request to stderr")
    add("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)


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


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the settings of an engine."""
    names = ("policy", "block_size", "speculative", "num_speculative_tokens", "draft_model")  # the same in both
    settings = {name: getattr(options, name) for name in names}
    limits = {"max_batch_size": options.rows, "max_tokens_per_step": options.tokens_per_step}
    return EngineConfig(**limits, num_blocks=options.blocks, trace_length=TRACE_LENGTH, **settings)


def app_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `make_app`."""
    return {name: getattr(options, name) for name in ("max_queue", "deadline", "api_key", "pace")} | {
        "model_name": options.served_model_name or name_of(options.model or os.environ.get("COURSE_MODEL")),
        "allowed_hosts": allowed_hosts(options.host, options.allowed_host),
        "allowed_origins": options.allowed_origin,
    }


def name_of(model: str | None) -> str:
    """Return what clients call a model unless told otherwise: the name of its folder or file, or its whole Hub id."""
    if not model:
        return "tiny-model"
    return Path(model).resolve().name if Path(model).exists() else model


def allowed_hosts(host: str, others: list[str] | None) -> list[str] | None:
    """Return the names by which clients may call a server that listens on `host`; None for any."""
    if "*" in (others or ()) or (others is None and not is_loopback(host)):
        return None  # the names of a server for other machines are not known here
    return ["localhost", "127.0.0.1", "::1", host, *(others or ())]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
