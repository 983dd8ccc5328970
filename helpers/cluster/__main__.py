"""Serve a model from several replicas, behind one address for OpenAI's clients.

    python -m helpers.cluster --replicas 2               the embedded model on http://127.0.0.1:8100
    python -m helpers.cluster --replicas 1..4            as many as the unfinished requests need
    python -m helpers.cluster --router round_robin       another routing policy, to compare
    python -m helpers.cluster --ray-address auto         replicas on the machines of a running Ray cluster

All options of `python -m helpers.server` apply; rows, budgets and blocks are those of each replica, and --max-queue
is for all of them together. The page at / shows all replicas together, /replicas lists them, and /metrics has the
figures of each. If a replica is lost, its requests continue on another one. POST /replicas/restart replaces all
replicas, one after another.
"""

import asyncio
import importlib.util
import math
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..command_line import make_command, one_value, parse
from ..server.options import ServerOptions
from .autoscaling import QueueLengthAutoscaler
from .routing import ROUTERS

REPLICAS = "Replicas"


def least_and_most(text: str) -> tuple[int, int]:
    """Return the least and the most replicas from "2" or "1..4"."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    least, most = (int(number) for number in (found[1], found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"give a number of at least 1, or a range such as 1..4, not {text!r}.")
    return least, most


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ServerOptions):
    """The options of `python -m helpers.cluster`, in addition to those of the server.

    Attributes:
        port: the port to listen on, 0 for a free one.
        replicas: how many replicas run, or the least and the most, such as 1..4. [default: 2]
        target: with 1..4, the unfinished sequences per replica to aim at; as many as --rows if omitted.
        autoscale_interval: with 1..4, the seconds between two looks.
        replica_cpus: how many CPU cores each replica gets.
        replica_gpus: how many GPUs each replica gets.
        router: the routing policy; while some replicas have a free row, it chooses among these.
        replica_timeout: replace a replica after this many seconds without a report, or in one iteration.
        ray_address: the Ray cluster to join; without it, Ray is started on this machine, for this server only.

    Raises:
        ValueError: an option is outside its range.
    """

    program = "helpers.cluster"
    port: Annotated[int, Parameter(group="Access")] = 8100  # the single server has 8000
    replicas: Annotated[Any, one_value(least_and_most), Parameter(group=REPLICAS, show_default=False)] = (2, 2)
    target: Annotated[float | None, Parameter(group=REPLICAS)] = None
    autoscale_interval: Annotated[float, Parameter(group=REPLICAS)] = 10.0
    replica_cpus: Annotated[int, Parameter(group=REPLICAS)] = 1
    replica_gpus: Annotated[int, Parameter(group=REPLICAS)] = 0
    router: Annotated[Literal[*ROUTERS], Parameter(group=REPLICAS)] = "prefix_aware"
    replica_timeout: Annotated[float, Parameter(group=REPLICAS)] = 10.0
    ray_address: Annotated[str | None, Parameter(group=REPLICAS)] = None

    def __post_init__(self):
        super().__post_init__()
        if self.replica_cpus < 1:
            raise ValueError(f"--replica-cpus must be at least 1, not {self.replica_cpus}.")
        if self.replica_gpus < 0:
            raise ValueError(f"--replica-gpus must be at least 0, not {self.replica_gpus}.")
        if self.adapter_folder is not None:
            raise ValueError("--adapter-folder is for a single server: name the replicas' adapters in --adapters.")
        for name in ("target", "autoscale_interval"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be a number above 0, not {value}.")
        if not 1 <= self.replica_timeout < math.inf:
            raise ValueError(f"--replica-timeout must be at least 1 second, not {self.replica_timeout}.")


command = make_command("helpers.cluster", __doc__, ClusterOptions)


def main(arguments: list[str] | None = None) -> None:
    """Run the front end and its replicas until it is told to stop."""
    options = parse(command, arguments)
    if importlib.util.find_spec("ray") is None:
        sys.exit(
            "helpers.cluster: replicas need Ray, which is not installed: run `pip install "
            "'continuous-batching-course[cluster,server]'`, or in a checkout `make cluster`."
        )
    from ..server.__main__ import run  # only here: these imports take seconds, and need more packages

    started: list = []
    try:
        run(options, partial(_make_app, started))
    finally:
        for replicas in started:
            replicas.shutdown()


def _make_app(started: list, options: ClusterOptions):
    """Start Ray and the replicas, and make the application; `started` gets what must be shut down in the end."""
    import torch

    from .app import make_cluster_app
    from .fleet_description import FleetDescription
    from .ray_replicas import RayNotStarted, RayReplicas, ReplicaSettings
    from .replica_client import ReplicaClient

    settings = ReplicaSettings(
        options.model,
        getattr(torch, options.dtype),
        options.weights,
        options.engine_config,
        options.replica_cpus,
        options.replica_gpus,
        {name: os.path.abspath(folder) for name, folder in options.folder_of_adapters.items()},
    )
    least, most = options.replicas
    print("Starting Ray.", file=sys.stderr, flush=True)
    try:
        source = RayReplicas(settings, most, options.ray_address)
    except RayNotStarted as error:
        sys.exit(f"{options.program}: {error}")
    started.append(source)
    print(f"Starting {least} replicas." if least > 1 else "Starting a replica.", file=sys.stderr, flush=True)
    replicas = asyncio.run(source.start_replicas(least))
    autoscaler = None
    if least < most:
        target = options.target or options.max_batch_size
        autoscaler = QueueLengthAutoscaler(least, most, target, options.autoscale_interval)
    connect = partial(
        ReplicaClient,
        replicas=replicas,
        router=ROUTERS[options.router](),
        start_replica=source.start_replica,
        timeout=options.replica_timeout,
        drain_grace=options.grace,
        autoscaler=autoscaler,
    )
    return make_cluster_app(FleetDescription(replicas[0].info, most), connect, **options.app_options)


if __name__ == "__main__":
    main()
