"""A server that gets several times its capacity, from clients of which many misbehave, and that is killed twice.

    make soak                                    10,000 requests at four times capacity: several minutes
    python -m tests.tools.soak --requests 1000   fewer

Of a hundred clients, 60 are well-behaved. Thirty leave at a random moment, five never read their response, and five
send their request too slowly. Twice, the server's process is killed and started again; a well-behaved client then sends
its request again.

The report says what must be nothing: well-behaved requests that were neither answered nor refused (lost), responses
that differ from what the model generates for the request alone (wrong), and what is left of any request at the end. The
exit status is 1 if a promise is broken. The report also has the latency of well-behaved clients. Everything stays on
this machine: one process for the server, one for the clients, and this one.
"""

import argparse
import dataclasses
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from helpers import SamplingParams
from helpers.metrics import percentile
from helpers.server import launch
from tests.support.serving import embedded_engine

ROWS, MAX_QUEUE, CLIENT_TIMEOUT = 8, 24, 2.0
PROMPTS = (
    "Once upon a time",
    "There was once a poor miller called Jonas, and",
    "Question: What does the clever owl eat?\nAnswer:",
    "The quick brown fox",
    "Once upon a time there was a fox who lived in a den under the old oak and",
    "On a snowy night",
)
LIMITS = (1, 2, 5, 11, 24, 50)  # max_tokens
MISBEHAVIOR = {  # the fraction of the clients that do it
    "leave": 0.3,
    "never read": 0.05,
    "send slowly": 0.05,
}
GAUGES = ("rows_used", "queue_length", "sequences_unfinished", "blocks_used")


@dataclasses.dataclass
class Figures:
    """What the soak measured; times in seconds, rates in requests per second."""

    requests: int
    seconds: float  # until the last response
    capacity: float  # what the engine alone can finish, of well-behaved requests
    offered: float
    completed: int
    refused: int
    left: int
    unread: int
    cut_off: int  # slow senders, by the server
    retried: int  # well-behaved requests that were sent again because the server had been killed
    restarts: int
    lost: list[str]
    wrong: list[str]
    left_over: dict[str, float]  # of the server's gauges that are not 0
    descriptors_before: int
    descriptors_after: int
    p50: float  # the latency of well-behaved clients
    p99: float

    def broken(self) -> list[str]:
        """Return which promises were broken."""
        holds = {
            "no request is lost": not self.lost,
            "no response is wrong": not self.wrong,
            "nothing is left over": not self.left_over,
            "descriptors are closed": self.descriptors_after <= self.descriptors_before + 2,
        }
        return [promise for promise, is_kept in holds.items() if not is_kept]


class RestartingServer:
    """A server in its own process, at one address, that can be killed and started again."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._start()

    def _start(self) -> None:
        options = {"port": self.port, "rows": ROWS, "max-queue": MAX_QUEUE, "client-timeout": CLIENT_TIMEOUT}
        self._launching = launch(*[f"--{name}={value}" for name, value in options.items()])
        self.process = psutil.Process(self._launching.__enter__().process.pid)
        self.descriptors = self.process.num_fds()  # of a server that has no client yet

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.end()
        self._start()

    def end(self) -> None:
        self._launching.__exit__(None, None, None)

    def left_over(self) -> dict[str, float]:
        """Return the gauges that count requests and are not 0."""
        page = httpx.get(self.url + "/metrics").text
        values = {name: float(re.search(rf"^engine_{name} (\S+)$", page, re.MULTILINE)[1]) for name in GAUGES}
        return {name: value for name, value in values.items() if value}

    def settled(self, descriptors: int, patience: float = 30) -> tuple[dict[str, float], int]:
        """Return what is left over, and the descriptors in use, once both are as before or patience has ended."""
        end = time.monotonic() + patience
        while True:
            left_over, now = self.left_over(), self.process.num_fds()
            if (not left_over and now <= descriptors) or time.monotonic() > end:
                return left_over, now
            time.sleep(0.1)


@contextmanager
def clients(plan: dict):
    """Start the clients in a process that loads no model."""
    command = [sys.executable, "-m", "tests.tools.soak_clients"]
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        try:
            print(json.dumps(plan), file=process.stdin, flush=True)
            yield process
        finally:
            process.kill()


def run(requests: int, times_capacity: float, seed: int = 0, restarts: int = 2) -> Figures:
    """Serve all clients, with restarts."""
    engine = embedded_engine(max_batch_size=ROWS)
    pool = [(prompt, limit) for prompt in PROMPTS for limit in LIMITS]
    prompts, params = [prompt for prompt, _ in pool], [SamplingParams(limit) for _, limit in pool]
    outputs = engine.generate(prompts, params)
    start = time.perf_counter()
    engine.generate(prompts, params)
    capacity = len(pool) / (time.perf_counter() - start)

    server = RestartingServer()
    try:
        plan = {
            "url": server.url,
            "pool": [[*one, o.text, len(o.token_ids)] for one, o in zip(pool, outputs, strict=True)],
            "seed": seed,
            "client_timeout": CLIENT_TIMEOUT,
            "requests": requests,
            "rate": times_capacity * capacity,
            "misbehavior": MISBEHAVIOR,
        }
        sent = _send(server, plan, restarts)
        left_over, descriptors_after = server.settled(server.descriptors)
        return _figures(sent, capacity=capacity, restarts=restarts, left_over=left_over,
            descriptors_before=server.descriptors, descriptors_after=descriptors_after)  # fmt: skip
    finally:
        server.end()


def _send(server: RestartingServer, plan: dict, restarts: int) -> dict:
    """Send a plan's requests, and restart the server at equal distances; return what became of the requests."""
    kills = [plan["requests"] * (number + 1) // (restarts + 1) for number in range(restarts)]
    with clients(plan | {"marks": kills}) as process:
        for _ in kills:
            assert process.stdout.readline() == "mark\n"
            server.kill_and_restart()
            print("continue", file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())


def _figures(sent: dict, **measured) -> Figures:
    results = sent["results"]
    ends = Counter(result["end"] for result in results)
    expected = {"completed", "refused", "left", "unread", "cut off"}
    others = [result["end"] for result in results if result["end"] not in expected]
    lost = [end for end in others if end.startswith("lost")]
    # Of the well-behaved requests that were completed by the server that they were first sent to.
    completed = [one for one in results if one["kind"] == "behave" and one["end"] == "completed"]
    latencies = [one["seconds"] for one in completed if one["attempts"] == 1]
    return Figures(
        requests=len(results),
        seconds=sent["seconds"],
        offered=len(results) / sent["sent"],
        completed=ends["completed"],
        refused=ends["refused"],
        left=ends["left"],
        unread=ends["unread"],
        cut_off=ends["cut off"],
        retried=sum(result["attempts"] > 1 for result in results),
        lost=lost,
        wrong=[end for end in others if not end.startswith("lost")],
        p50=percentile(latencies, 50),
        p99=percentile(latencies, 99),
        **measured,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.tools.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--times-capacity", type=float, default=4.0)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = run(options.requests, options.times_capacity, options.seed, options.restarts)
    for name, value in dataclasses.asdict(figures).items():
        print(f"{name:18}", f"{value:.3f}" if isinstance(value, float) else value)
    broken = figures.broken()
    print(*[f"BROKEN: {promise}" for promise in broken] or ["Every promise was kept."], sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
