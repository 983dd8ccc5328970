"""The options of a server's command line, and the settings of the engine and of the application that they describe."""

import ipaddress
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..command_line import EngineOptions, fields_of, options_from
from ..engine import EngineConfig
from .connections import ConnectionLimits

TRACE_LENGTH = 1000  # iterations that the engine remembers
MODEL, ACCESS, OPERATION = "Model", "Access", "Operation"

ConnectionOptions = options_from(ConnectionLimits, OPERATION, max_connections=int, client_timeout=float)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions, ConnectionOptions):
    """The options of `python -m helpers.server`.

    Attributes:
        model: a folder in the Hugging Face format, or a Hub id; the embedded model if omitted.
        served_model_name: what clients call the model; the name of its folder if omitted.
        dtype: the type of the weights.
        weights: store linear layers as integers of 8 or 4 bits.
        adapters: LoRA adapters to load, each as NAME=FOLDER; clients choose one by its name in `model`.
        adapter_folder: a folder below which clients may load more adapters while the server runs; none if omitted.
        host: the address to listen on; the default is for this machine only.
        port: the port to listen on, 0 for a free one.
        api_key: the key that clients must send; the environment's COURSE_API_KEY, if any, if omitted.
        allowed_host: names by which clients may call this server, * for any; this machine's own if omitted.
        max_queue: how many sequences may wait; more get status 429.
        deadline: seconds that a request may take if it sets no deadline itself.
        grace: seconds to finish accepted requests and stop.
        pace: slow motion: the least number of seconds per iteration, up to 2.
        log: log every request to stderr.

    Raises:
        ValueError: an option is outside its range.
    """

    program = "helpers.server"
    model: Annotated[str | None, Parameter(group=MODEL)] = None
    served_model_name: Annotated[str | None, Parameter(name=("--served-model-name", "--name"), group=MODEL)] = None
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Parameter(group=MODEL)] = "float32"
    weights: Annotated[Literal["int8", "int4"] | None, Parameter(group=MODEL)] = None
    adapters: Annotated[list[str] | None, Parameter(group=MODEL, consume_multiple=True, negative_iterable=())] = None
    adapter_folder: Annotated[str | None, Parameter(group=MODEL)] = None
    host: Annotated[str, Parameter(group=ACCESS)] = "127.0.0.1"
    port: Annotated[int, Parameter(group=ACCESS)] = 8000
    api_key: Annotated[str | None, Parameter(group=ACCESS)] = field(
        default_factory=lambda: os.environ.get("COURSE_API_KEY") or None
    )
    allowed_host: Annotated[list[str] | None, Parameter(group=ACCESS, negative_iterable=())] = None
    max_queue: Annotated[int, Parameter(group=OPERATION)] = 64
    deadline: Annotated[float | None, Parameter(group=OPERATION)] = None
    grace: Annotated[float, Parameter(group=OPERATION)] = 30.0
    pace: Annotated[float, Parameter(group=OPERATION)] = 0.0
    log: Annotated[bool, Parameter(group=OPERATION, negative=())] = False
    stop_with_stdin: Annotated[bool, Parameter(show=False, negative=())] = False

    def __post_init__(self):
        if self.api_key == "" or self.deadline == 0:
            raise ValueError("an empty --api-key or a --deadline of 0 would refuse every request: leave it out.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be from 0 to 65535, not {self.port}.")
        if not 0 <= self.pace <= 2:
            raise ValueError(f"--pace must be from 0 to 2 seconds, not {self.pace}.")
        if self.max_queue < 0:
            raise ValueError(f"--max-queue must be at least 0, the sequences that may wait, not {self.max_queue}.")
        for name in ("deadline", "grace"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"--{name} must be a number of seconds, not {seconds}.")
        if self.adapter_folder is not None and not Path(self.adapter_folder).is_dir():
            raise ValueError(f"--adapter-folder {self.adapter_folder} is no folder.")
        # What these refuse is refused before a model is loaded.
        _ = self.engine_config, self.connection_limits, self.folder_of_adapters

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        return EngineConfig(**fields_of(EngineOptions, self), weights=self.weights, trace_length=TRACE_LENGTH)

    @property
    def folder_of_adapters(self) -> dict[str, str]:
        """The folders of the adapters to load, by name."""
        folders: dict[str, str] = {}
        for text in self.adapters or ():
            name, equals, folder = text.partition("=")
            if not (name and equals and folder):
                raise ValueError(f"--adapters takes names and folders, as in story=path/to/folder, not {text!r}.")
            if name in folders or name == self.model_name:
                raise ValueError(f"--adapters needs a name of its own for each adapter, and {name!r} is taken.")
            folders[name] = folder
        return folders

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or name_of(self.model or os.environ.get("COURSE_MODEL"))

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits of the server's connections."""
        return ConnectionLimits(**fields_of(ConnectionOptions, self))

    @property
    def app_options(self) -> dict[str, Any]:
        """The options of `make_app`."""
        names = ("model_name", "max_queue", "deadline", "api_key", "pace", "adapter_folder")
        return {name: getattr(self, name) for name in names} | {
            "allowed_hosts": allowed_hosts(self.host, self.allowed_host),
        }


def name_of(model: str | None) -> str:
    """Return what clients call a model unless told otherwise: the name of its folder, or its whole Hub id."""
    if not model:
        return "tiny-model"
    return Path(model).resolve().name if Path(model).exists() else model


def allowed_hosts(host: str, others: list[str] | None) -> list[str] | None:
    """Return the names by which clients may call a server that listens on `host`; None for any."""
    if "*" in (others or ()) or (others is None and not is_loopback(host)):
        return None  # the names of a server for other machines are not known here
    names = ["localhost", "127.0.0.1", "::1", host, *(others or ())]
    return [f"[{name.strip('[]')}]" if ":" in name else name for name in names]  # as URLs spell IPv6 addresses


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
