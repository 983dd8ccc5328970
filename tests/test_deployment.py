"""The page on deployment and the manifest for Kubernetes, as far as they can be checked without a cluster."""

import re
import shlex
from pathlib import Path

import yaml

from helpers.cluster.__main__ import command
from helpers.command_line import parse

DOCS = Path(__file__).resolve().parents[1] / "docs"
COMMAND = re.compile(r"python -m helpers\.cluster([^`\n]*)")


def options_of(path: Path) -> list:
    """Return the options of each command in a file, as the command itself reads them."""
    return [parse(command, shlex.split(found[1])) for found in COMMAND.finditer(path.read_text(encoding="utf-8"))]


def test_every_command_on_the_page_has_options_that_exist():
    assert len(options_of(DOCS / "deployment.md")) >= 3


def test_the_manifest_has_a_worker_of_the_right_size_for_each_replica_and_a_service_for_the_front():
    cluster, service = yaml.safe_load_all((DOCS / "kuberay.yaml").read_text(encoding="utf-8"))
    head, (workers,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    (front,), (worker,) = head["template"]["spec"]["containers"], workers["template"]["spec"]["containers"]
    (options,) = options_of(DOCS / "kuberay.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert options.ray_address == "auto" and options.host == "0.0.0.0"
    assert workers["replicas"] == options.replicas[1]
    assert worker["resources"]["limits"]["cpu"] == str(options.replica_cpus)
    assert all("$KUBERAY_GEN_RAY_START_CMD" in "".join(one["args"]) for one in (front, worker))
    assert "COURSE_API_KEY" in [one["name"] for one in front["env"]]
    ports = [one["containerPort"] for one in front["ports"]]
    assert options.port in ports and service["spec"]["ports"][0]["targetPort"] == options.port
    assert service["spec"]["selector"] == {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
