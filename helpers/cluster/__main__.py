"""Serve a model from several replicas, behind one address for OpenAI's clients.

    python -m helpers.cluster --replicas 2               the embedded model on http://127.0.0.1:8100
    python -m helpers.cluster --replicas 1..4            as many as the unfinished requests need
    python -m helpers.cluster --router round_robin       another routing policy, to compare
    python -m helpers.cluster --ray-address auto         replicas on the machines of a running Ray cluster
    python -m helpers.cluster --engine vllm              replicas that run vLLM

All options of `python -m helpers.server` apply; rows, budgets and blocks are those of each replica, and --max-queue
is for all of them together. The page at / shows all replicas together, /replicas lists them, and /metrics has the
figures of each. If a replica is lost, its requests continue on another one. POST /replicas/restart replaces all
replicas, one after another.
"""

import argparse
import asyncio
import json
import os
import re
import sys
from functools import partial

try:
    import ray  # noqa: F401
except ImportError:
    sys.exit(
        "helpers.cluster: replicas need Ray, which is not installed: run `pip install "
        "'continuous-batching-course[cluster,server]'`, or in a checkout `make cluster`."
    )
except KeyboardInterrupt:
    sys.exit(130)

from fastapi import FastAPI

from ..server.__main__ import run
from ..server.options import DTYPES, app_options, engine_config, make_parser, parse
from . import vllm_replica
from .app import make_cluster_app
from .autoscaling import QueueLengthAutoscaler
from .ray_replicas import RayNotStarted, RayReplica, RayReplicas, ReplicaSettings
from .replica_client import ReplicaClient, ReplicatedEngine
from .routing import ROUTERS

PORT = 8100  # the single server has 8000


def main(arguments: list[str] | None = None) -> None:
    """Run the front end and its replicas until it is told to stop."""
    options = _options(arguments)
    started: list[RayReplicas] = []
    try:
        run(options, partial(_make_app, started))
    finally:
        for replicas in started:
            replicas.shutdown()


def _make_app(started: list[RayReplicas], options: argparse.Namespace) -> FastAPI:
    dtype, config = DTYPES[options.dtype], engine_config(options)
    if options.engine == "vllm" and options.ray_address is None:
        vllm_replica.check_python(options.python or sys.executable)
    settings = ReplicaSettings(
        options.model,
        dtype,
        options.weights,
        config,
        options.replica_cpus,
        options.replica_gpus,
        options.engine_args if options.engine == "vllm" else None,
        options.python,
    )
    least, most = options.replicas
    print("Starting Ray.", file=sys.stderr, flush=True)
    try:
        source = RayReplicas(settings, most, options.ray_address)
    except RayNotStarted as error:
        sys.exit(f"{options.program}: {error}")
    started.append(source)
    print(f"Starting {least} replicas." if least > 1 else "Starting a replica.", file=sys.stderr, flush=True)
    replicas = asyncio.run(source.start_replicas(least, _report_ready))
    autoscaler = None
    if least < most:
        autoscaler = QueueLengthAutoscaler(least, most, options.target or options.rows, options.autoscale_interval)
    connect = partial(
        ReplicaClient,
        replicas=replicas,
        router=ROUTERS[options.router](),
        start_replica=source.start_replica,
        has_room=source.has_room,
        timeout=options.replica_timeout,
        drain_grace=options.grace,
        autoscaler=autoscaler,
    )
    return make_cluster_app(ReplicatedEngine(replicas[0].info, most), connect, **app_options(options))


def _report_ready(replica: RayReplica) -> None:
    print(f"{replica.name} is ready.", file=sys.stderr, flush=True)


def _least_and_most(text: str) -> tuple[int, int]:
    """Return the least and the most replicas from "2" or "1..4"."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    least, most = (int(number) for number in (found[1], found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"give a number of at least 1, or a range such as 1..4, not {text!r}.")
    return least, most


def _json_object(text: str) -> dict:
    """Return the JSON object in a text."""
    try:
        if isinstance(found := json.loads(text), dict):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"give a JSON object, such as '{{\"enforce_eager\": true}}', not {text!r}.")


def _refuse_for_vllm(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit if an option is set that has no counterpart in vLLM."""
    for name in ("weights", "block_size", "speculative", "num_speculative_tokens", "draft_model"):
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for the course's engine: set vLLM's own in --engine-args.")
    if options.policy not in vllm_replica.POLICIES:
        parser.error(
            f"--policy {options.policy} is for the course's engine: vLLM has {', '.join(vllm_replica.POLICIES)}."
        )


def _make_parser() -> argparse.ArgumentParser:
    parser = make_parser("helpers.cluster", __doc__, PORT)
    add = parser.add_argument_group("replicas").add_argument
    number = "how many replicas run, or the least and the most, such as 1..4 (default: 2)"
    add("--replicas", type=_least_and_most, default=(2, 2), metavar="NUMBER", help=number)
    target = "with 1..4: unfinished sequences per replica to aim at (default: as many as --rows)"
    add("--target", type=float, help=target)
    add("--autoscale-interval", type=float, default=10, help="with 1..4: seconds between two looks (default: 10)")
    add("--replica-cpus", type=int, default=1, help="how many CPU cores each replica gets (default: 1)")
    add("--replica-gpus", type=int, default=0, help="how many GPUs each replica gets (default: 0)")
    add("--engine", choices=("course", "vllm"), default="course", help="what the replicas run (default: course)")
    fields = "with vllm: further fields of its EngineArgs"
    add("--engine-args", type=_json_object, default={}, metavar="JSON", help=fields)
    python = "the Python of the replicas (default: this one), such as one that has vLLM"
    add("--python", type=os.path.abspath, metavar="PATH", help=python)
    router = "the routing policy; while some replicas have a free row, it chooses among these (default: prefix_aware)"
    add("--router", choices=ROUTERS, default="prefix_aware", help=router)
    timeout = "replace a replica after this many seconds without a report, or in one iteration (default: 10)"
    add("--replica-timeout", type=float, default=10, help=timeout)
    add("--ray-address", help="the Ray cluster to join (default: start Ray on this machine, for this server only)")
    return parser


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _make_parser()
    options = parse(parser, arguments)
    if options.replica_cpus < 1:
        parser.error(f"--replica-cpus must be at least 1, not {options.replica_cpus}.")
    if options.replica_gpus < 0:
        parser.error(f"--replica-gpus must be at least 0, not {options.replica_gpus}.")
    if options.engine == "vllm":
        _refuse_for_vllm(parser, options)
    elif options.engine_args:
        parser.error("--engine-args are vLLM's: add --engine vllm.")
    for name in ("target", "autoscale_interval"):
        if (value := getattr(options, name)) is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be a number above 0, not {value}.")
    if not 1 <= options.replica_timeout < float("inf"):
        parser.error(f"--replica-timeout must be a number of seconds of at least 1, not {options.replica_timeout}.")
    return options


if __name__ == "__main__":
    main()
