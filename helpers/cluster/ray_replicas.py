"""Replicas as Ray actors: Ray starts the processes, on this machine or on others, and notices when one has ended.

An actor is a remote object: each method call is a message. Only the first call goes through Ray. Requests and reports
have a connection of their own (connection.py). There is one message per report, so the cost per token falls as the
batch grows. Ray Serve's streaming responses would take one message per token of each request. The choice of a replica,
resuming, and backpressure are the course's own code and need no Ray.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray

from ..engine import EngineConfig, EngineCore
from ..server.worker_thread import WorkerThread
from .connection import ReplicaAddress, ReplicaConnection, serve_replica
from .replica import Replica, ReplicaInfo

ATTEMPTS = 4  # to start Ray; each takes up to half a minute
OBJECT_STORE = 80 * 2**20  # bytes, about Ray's minimum: reports are small and do not use it
ROOT = Path(__file__).parents[2]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaSettings:
    """What a replica runs.

    Attributes:
        model: a folder or a Hub id; None for the embedded model.
        dtype: the torch dtype of the weights.
        weights: "int8" or "int4" for quantized weights, else None.
        config: the engine's settings.
        num_cpus: the cores that Ray reserves for the replica, and the threads that its model computes on.
        num_gpus: the GPUs that Ray reserves for the replica.
        adapters: the folders of the adapters to load, by name.
    """

    model: str | None
    dtype: Any
    weights: str | None
    config: EngineConfig
    num_cpus: int = 1
    num_gpus: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)

    def load_engine(self) -> EngineCore:
        """Load the model in the replica's process.

        Raises:
            ValueError: the settings or the model are refused.
        """
        import torch

        from ..model_engine import Engine
        from ..models import load_model

        torch.set_num_threads(self.num_cpus)
        engine = Engine(*load_model(self.model, dtype=self.dtype, weights=self.weights), self.config)
        for name, folder in self.adapters.items():
            engine.load_adapter(name, folder)
        return engine


class ReplicaActor:
    """A replica in a process of its own. Ray calls the methods on the process's event loop."""

    def __init__(self, settings: ReplicaSettings):
        self._replica, self._refusal = None, None
        worker = WorkerThread()
        try:
            self._replica = Replica(worker.submit(settings.load_engine).result(), worker)
        except ValueError as error:  # raised by `start`: from here, only the text of a traceback would arrive
            self._refusal = error

    async def start(self) -> tuple[ReplicaInfo, ReplicaAddress]:
        if self._refusal is not None:
            raise self._refusal
        self._replica.start()
        info = replace(self._replica.info, node_id=ray.get_runtime_context().get_node_id())
        return info, await serve_replica(self._replica, ray.util.get_node_ip_address())


class RayReplica(ReplicaConnection):
    """How the front end calls a replica, and ends it. No other replica ever gets its name."""

    def __init__(self, name: str, actor: Any, info: ReplicaInfo, address: ReplicaAddress):
        super().__init__(address)
        self.name, self.info, self._actor = name, info, actor

    def kill(self) -> None:
        """End the replica's process at once, even one that hangs."""
        self.close()
        with contextlib.suppress(Exception):  # it has ended, or Ray has
            ray.kill(self._actor)
        if self.info.node == os.uname().nodename:  # a stopped process answers nothing, not even Ray
            with contextlib.suppress(OSError):
                os.kill(self.info.pid, signal.SIGKILL)


class RayNotStarted(Exception):
    """Ray did not start, or its cluster cannot be reached."""


class RayReplicas:
    """Starts replicas, and Ray itself unless a cluster's address is given.

    Args:
        settings: what every replica runs.
        num_replicas: the most replicas that there may be.
        address: of a Ray cluster to join; None starts Ray on this machine, reachable from it alone.

    Raises:
        RayNotStarted: Ray did not start in several attempts, or the cluster cannot be reached.
    """

    def __init__(self, settings: ReplicaSettings, num_replicas: int, address: str | None = None):
        self._settings, self._numbers = settings, itertools.count()
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # A replica gets the priority of the front end where Ray starts here. By default, it would have a far lower one.
        os.environ[ray._private.ray_constants.RAY_WORKER_NICENESS] = "0"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        needed = num_replicas * settings.num_cpus
        cores = max(os.cpu_count() or 1, needed)
        own = {} if address else {
            "num_cpus": min(cores, needed + settings.num_cpus),  # one more for a restart, if the machine has it
            "num_gpus": num_replicas * settings.num_gpus,
            "object_store_memory": OBJECT_STORE,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }  # fmt: skip
        options = {"log_to_driver": False, "logging_level": "error"} | own
        if address:
            _init_ray(partial(ray.init, address, **options), attempts=1)
        else:
            _init_ray(partial(_start_ray, **options), ATTEMPTS)
        self._actor_cls = ray.remote(ReplicaActor)

    async def start_replica(self) -> RayReplica:
        """Start a replica, as soon as a node of Ray has cores for it, and return it once its model is loaded.

        Raises:
            ValueError: the settings or the model are refused.
        """
        name = f"replica-{next(self._numbers)}"
        # The front end replaces a lost replica, under a new name, so Ray must not restart it.
        options = {"num_cpus": self._settings.num_cpus, "num_gpus": self._settings.num_gpus}
        options |= {"max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor = self._actor_cls.options(**options).remote(self._settings)
        try:
            return RayReplica(name, actor, *await actor.start.remote())
        except BaseException as error:  # also a cancellation: the replica is no longer needed
            with contextlib.suppress(Exception):
                ray.kill(actor)
            if isinstance(error, ray.exceptions.RayTaskError):
                raise error.cause from error
            raise

    async def start_replicas(self, number: int) -> list[RayReplica]:
        """Start several replicas at once."""
        return await asyncio.gather(*(self.start_replica() for _ in range(number)))

    def shutdown(self) -> None:
        """End all replicas, and Ray if it was started here."""
        ray.shutdown()


def _init_ray(init: Callable[[], object], attempts: int) -> None:
    """Start Ray or join a cluster.

    The agents of Ray's node are Python processes. They must start within 15 seconds, which no setting of Ray changes.
    On a busy machine, they may take longer. After a failed attempt, all processes that this one has started meanwhile
    are killed, so no other thread may start any.

    Raises:
        RayNotStarted: all attempts failed.
    """
    older = psutil.Process().children(recursive=True)
    for attempts_left in reversed(range(attempts)):
        try:
            init()
            return
        except Exception as error:  # of many types
            # The rest of Ray's processes would go on and delay the next attempt.
            for process in set(psutil.Process().children(recursive=True)) - set(older):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if not attempts_left:
                raise RayNotStarted(f"Ray is not available: {error}") from error
            logger.warning("Ray did not start, and is started again: %s", error)


def _start_ray(**options) -> None:
    """Start Ray on this machine, reachable from it alone.

    Ray replaces the address 127.0.0.1 by one that other machines reach, unless it may not form clusters; its variable
    for that is named after the systems where this is the default. It starts without its autoscaler and its log monitor:
    two fewer processes compete for the 15 seconds.
    """
    os.environ[ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for Ray's processes
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # for this one
    module = ray._private.parameter
    complete = module.RayParams
    module.RayParams = partial(complete, no_monitor=True, include_log_monitor=False)  # `ray.init` has no such options
    try:
        # Without "local", Ray would join a cluster that it finds in the environment or on this machine.
        ray.init("local", **options)
    finally:
        module.RayParams = complete
