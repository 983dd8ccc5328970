"""Replicas on Ray, as a learner starts them: processes that are killed or stopped, and the streams that go on."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from helpers import SamplingParams
from helpers.server import launch
from tests.support.serving import BackgroundRequest, embedded_engine, wait_until

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
TOKENS = 150
GREEDY = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
SEEDED = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.1, "seed": 5}
PROMPT = "Once upon a time there was a fox"


@pytest.fixture(scope="module")
def cluster():
    """A front with two replicas, each in slow motion, so that there is time to kill one."""
    with launch("--replicas", "2", "--replica-timeout", "4", "--pace", "0.01", module="helpers.cluster") as front:
        yield front
        processes = psutil.Process(front.process.pid).children(recursive=True)
    assert processes and not psutil.wait_procs(processes, timeout=60)[1], "processes are left over"


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The texts of the two requests, each alone."""
    engine = embedded_engine()
    return {name: engine.generate(PROMPT, SamplingParams(**body))[0].text for name, body in BODIES.items()}


BODIES = {"greedy": GREEDY, "seeded": SEEDED}


def replicas(front) -> dict[str, dict]:
    """Return those that take requests, by name."""
    listed = httpx.get(f"{front.url}/replicas").json()
    return {replica["name"]: replica for replica in listed if replica["state"] == "ready"}


def metric(front, name: str) -> float:
    lines = httpx.get(f"{front.url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


class Reader(BackgroundRequest):
    """Reads one stream to its end."""

    def __init__(self, front, name: str):
        super().__init__(front, prompt=PROMPT, stream=True, **BODIES[name])
        self.name = name


class User(threading.Thread):
    """Reads one stream after another, until told to stop."""

    def __init__(self, front, name: str):
        super().__init__(daemon=True)
        self.front, self.name_of_request, self.readers, self.stopped = front, name, [], False
        self.start()

    def run(self) -> None:
        while not self.stopped:
            self.readers.append(Reader(self.front, self.name_of_request))
            self.readers[-1].wait()

    def stop(self) -> None:
        self.stopped = True
        self.join(60)


def assert_complete(readers: list[Reader], expected: dict[str, str]) -> None:
    """Check that each stream ends without an error and has the text of its request alone."""
    assert [reader.text for reader in readers] == [expected[reader.name] for reader in readers]


def wait_for_two(front, other_than: str | None = None) -> None:
    wait_until(lambda: len(found := replicas(front)) == 2 and other_than not in found, "the replica was not replaced")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_a_replica_is_killed_or_hangs(cluster, expected, how):
    wait_for_two(cluster)
    lost, resumed = metric(cluster, "replicas_lost"), metric(cluster, "requests_resumed")
    readers = [Reader(cluster, name) for name in ("greedy", "seeded") * 4]
    wait_until(lambda: all(len(reader.chunks) > 5 for reader in readers), "a stream did not begin")
    running = {name: replica["running"] for name, replica in replicas(cluster).items()}
    assert min(running.values()) > 0
    victim, found = max(running, key=running.get), replicas(cluster)
    os.kill(found[victim]["pid"], how)
    assert_complete(readers, expected)
    wait_for_two(cluster, other_than=victim)
    assert metric(cluster, "replicas_lost") > lost and metric(cluster, "requests_resumed") >= resumed + running[victim]
    assert not psutil.pid_exists(found[victim]["pid"])


def test_a_rolling_restart_replaces_all_replicas_and_fails_no_stream(cluster, expected):
    wait_for_two(cluster)
    old, lost = replicas(cluster), metric(cluster, "replicas_lost")
    users = [User(cluster, name) for name in ("greedy", "seeded")]
    wait_until(lambda: all(len(user.readers) > 1 for user in users), "no stream has ended")
    assert httpx.post(f"{cluster.url}/replicas/restart", json={}).json() == {"replaced": list(old)}
    wait_until(
        lambda: len(found := replicas(cluster)) == 2 and not old.keys() & found.keys(),
        "the restart did not end",
        patience=400,
    )
    for user in users:
        user.stop()
    assert_complete([reader for user in users for reader in user.readers], expected)
    assert metric(cluster, "replicas_lost") == lost
    assert not any(psutil.pid_exists(replica["pid"]) for replica in old.values())


def test_no_process_listens_to_other_machines(cluster):
    """Ray runs the program of each client that reaches it."""
    front = psutil.Process(cluster.process.pid)
    connections = [each for process in (front, *front.children(recursive=True)) for each in process.net_connections()]
    listening = [each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN]
    assert len(listening) > 4 and set(listening) == {"127.0.0.1"}


def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason_and_leaves_no_process():
    command = [sys.executable, "-m", "helpers.cluster", "--port", "0", "--replicas", "1", "--model", "./no-such-folder"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("helpers.cluster: Cannot load './no-such-folder'")


def test_replicas_end_with_a_front_that_is_killed_and_the_next_front_starts_at_once():
    with launch("--replicas", "1", module="helpers.cluster") as front:
        assert replicas(front)
        processes = psutil.Process(front.process.pid).children(recursive=True)
        # Ray's own agents take a minute to end
        processes = [process for process in processes if "Agent" not in process.name()]
        front.process.kill()
    port = front.url.rpartition(":")[2]
    with launch("--replicas", "1", "--port", port, module="helpers.cluster") as front:
        response = httpx.post(f"{front.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 3})
        assert response.json()["usage"]["completion_tokens"] == 3
        assert processes and not psutil.wait_procs(processes, timeout=60)[1]


@pytest.fixture
def nodes(monkeypatch):
    """A Ray cluster of three nodes on this machine; the first one has no core for a replica."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the package is installed on each node of a real cluster
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else Ray replaces 127.0.0.1 by an outer address
    settings = {"node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0} | settings)
    for _ in range(2):
        cluster.add_node(num_cpus=1, **settings)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def test_replicas_run_on_several_nodes_and_streams_survive_the_loss_of_one(nodes, expected):
    options = ("--replicas", "2", "--pace", "0.01", "--ray-address", nodes.address)
    with launch(*options, module="helpers.cluster") as front:
        listed = {replica["node_id"]: name for name, replica in replicas(front).items()}
        assert listed.keys() == {node.node_id for node in nodes.worker_nodes}
        readers = [Reader(front, name) for name in ("greedy", "seeded") * 2]
        wait_until(lambda: all(len(reader.chunks) > 5 for reader in readers), "a stream did not begin")
        assert all(replica["running"] for replica in replicas(front).values())
        victim = next(iter(nodes.worker_nodes))
        nodes.remove_node(victim, allow_graceful=False)
        assert_complete(readers, expected)
        assert listed[victim.node_id] not in replicas(front)
        nodes.add_node(num_cpus=1, node_ip_address="127.0.0.1", include_dashboard=False)
        wait_for_two(front)
