"""The front end's application: the single server's with replicas for its engine, and what shows and restarts them."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.core import GaugeMetricFamily, Metric

from ..server.app import make_app
from ..server.strict import Strict
from .fleet_description import FleetDescription
from .lifecycle import DRAINING, READY, STARTING, Member
from .replica_client import ReplicaClient

GAUGES = {
    "running": "Sequences that hold a row, by replica.",
    "waiting": "Sequences that wait for a row, by replica.",
    "blocks_used": "Blocks in the block table of a sequence, by replica.",
    "blocks_cached": "Blocks kept for prompts with the same prefix, by replica.",
    "outstanding_tokens": "Tokens that unfinished requests may still compute, by replica.",
}


class Restart(Strict):
    """`POST /replicas/restart`: an empty JSON object, which a browser sends for no other site without asking."""


def make_cluster_app(engine: FleetDescription, connect, **options) -> FastAPI:
    """Make the HTTP application for replicas.

    Args:
        engine: the replicas as one engine.
        connect: makes a `ReplicaClient`, see `make_app`.
        options: as for `make_app`.

    Returns:
        The application; `app.state.engine_client` is its `ReplicaClient`.
    """
    app = make_app(engine, connect=connect, add_addresses=add_addresses, **options)
    app.state.metrics.registry.register(ReplicaMetrics(app.state.engine_client))
    return app


def add_addresses(app: FastAPI) -> None:
    """Add the addresses that show and restart the replicas."""
    app.get("/replicas")(replicas)
    app.post("/replicas/restart", status_code=202)(restart)


async def replicas(request: Request) -> list[dict[str, Any]]:
    """List the replicas, with those that start and those that finish their last requests."""
    client: ReplicaClient = request.app.state.engine_client
    return [described(client, member) for member in client.pool.members]


async def restart(body: Restart, request: Request) -> dict[str, list[str]]:
    """Replace all replicas, one after another. No request fails."""
    return {"replaced": request.app.state.engine_client.pool.restart()}


def described(client: ReplicaClient, member: Member) -> dict[str, Any]:
    """Describe a replica: where it runs and what it does. While it starts, all but its state is None."""
    described = dict.fromkeys(("name", "state", "pid", "node", "node_id", "rows", "blocks", *GAUGES))
    described |= {"name": member.name, "state": member.state}
    if (name := member.name) not in client.replicas:
        return described
    info, now = member.handle.info, client.snapshots[name]
    return described | {
        "pid": info.pid,
        "node": info.node,
        "node_id": info.node_id,
        "rows": info.config.max_batch_size,
        "running": now.num_running,
        "waiting": now.num_waiting,
        "blocks": info.num_blocks,
        "blocks_used": now.blocks_used,
        "blocks_cached": now.blocks_cached,
        "outstanding_tokens": client.dispatcher.replicas[name].outstanding_tokens,
    }


class ReplicaMetrics:
    """Metrics of each replica, for a Prometheus registry. The sums are the metrics of the single server."""

    def __init__(self, client: ReplicaClient):
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as a registry asks for them."""
        pool = self._client.pool
        replicas = [described(self._client, member) for member in pool.members if member.name in self._client.replicas]
        for key, help_text in GAUGES.items():
            gauge = GaugeMetricFamily(f"replica_{key}", help_text, labels=["replica"])
            for replica in replicas:
                gauge.add_metric([replica["name"]], replica[key])
            yield gauge
        yield GaugeMetricFamily("replicas", "Replicas that take requests.", value=pool.count(READY))
        yield GaugeMetricFamily("replicas_starting", "Replicas that load their model.", value=pool.count(STARTING))
        yield GaugeMetricFamily(
            "replicas_draining", "Replicas that take no more requests and finish theirs.", value=pool.count(DRAINING)
        )
        yield GaugeMetricFamily("replicas_lost", "Replicas lost since the start.", value=self._client.num_lost)
        yield GaugeMetricFamily(
            "requests_resumed", "How often a request moved to another replica.", value=self._client.num_resumed
        )
