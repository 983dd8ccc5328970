"""The front end's application: the single server's, with replicas in place of its engine, and two views of them."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.core import GaugeMetricFamily, Metric

from ..server.app import make_app
from .replica_client import ReplicaClient, ReplicatedEngine

GAUGES = {
    "running": "Sequences that hold a row, by replica.",
    "waiting": "Sequences that wait for a row, by replica.",
    "blocks_used": "Blocks in the block table of a sequence, by replica.",
    "blocks_cached": "Blocks kept for prompts with the same prefix, by replica.",
    "outstanding_tokens": "Tokens that unfinished requests may still compute, by replica.",
}


def make_cluster_app(engine: ReplicatedEngine, connect, **options) -> FastAPI:
    """Make the HTTP application for replicas.

    Args:
        engine: the replicas as one engine.
        connect: makes a `ReplicaClient`, see `make_app`.
        options: as for `make_app`.

    Returns:
        The application; `app.state.thread` is its `ReplicaClient`.
    """
    app = make_app(engine, connect=connect, more_addresses={"/replicas": replicas}, **options)
    app.state.metrics.registry.register(ReplicaMetrics(app.state.thread))
    return app


async def replicas(request: Request) -> list[dict[str, Any]]:
    """List the replicas that take requests."""
    client: ReplicaClient = request.app.state.thread
    return [described(client, name) for name in client.replicas]


def described(client: ReplicaClient, name: str) -> dict[str, Any]:
    """Describe a replica: where it runs and what it does."""
    info, now = client.replicas[name].info, client.snapshots[name]
    return {
        "name": name,
        "pid": info.pid,
        "node": info.node,
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
        replicas = [described(self._client, name) for name in self._client.replicas]
        for key, help_text in GAUGES.items():
            gauge = GaugeMetricFamily(f"replica_{key}", help_text, labels=["replica"])
            for replica in replicas:
                gauge.add_metric([replica["name"]], replica[key])
            yield gauge
        yield GaugeMetricFamily("replicas", "Replicas that take requests.", value=len(replicas))
        yield GaugeMetricFamily("replicas_lost", "Replicas lost since the start.", value=self._client.num_lost)
        yield GaugeMetricFamily(
            "requests_resumed", "How often a request moved to another replica.", value=self._client.num_resumed
        )
