"""What the layer of replicas costs: `python -m benchmarks.replicas_cost`.

The claim: through the cluster's front end, a request gets its first token at most 15 ms later than from the single
server, and each further token at most 1 ms later (medians). Both servers compute on one core per engine. The single
server and the front end with one replica differ only in the layer. Two replicas share the rows of the single server.
"""

import itertools
import os
import time
from dataclasses import dataclass

import httpx
import psutil

from helpers.load_test import run_load
from helpers.load_test.prompts import token_ids
from helpers.server import launch

from .machine import processor

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32, 64
USERS = {1: 40, 64: 256}  # how many requests they send
ARRANGEMENTS = {
    "single server": ("helpers.server", 1, ()),
    "front, 1 replica": ("helpers.cluster", 1, ("--replicas", "1")),
    "front, 2 replicas": ("helpers.cluster", 2, ("--replicas", "2")),
}


@dataclass
class Cost:
    """One arrangement under one load: milliseconds, and output tokens per second."""

    ttft: float
    itl: float
    tokens_per_second: float

    def __str__(self) -> str:
        return f"TTFT {self.ttft:7.1f} ms   ITL {self.itl:6.2f} ms   {self.tokens_per_second:6.0f} tokens/s"


def measure(url: str, users: int, num_requests: int) -> Cost:
    """Return the medians of a closed loop."""
    prompts = token_ids([PROMPT_TOKENS] * (num_requests + users))
    result = run_load(
        url,
        list(zip(prompts, itertools.repeat(OUTPUT_TOKENS))),
        users=users,
        warm_up=users,
        body={"ignore_eos": True},
    )
    ttft, itl = (1000 * result.percentile(name, 50) for name in ("ttft", "itl"))
    return Cost(ttft, itl, result.output_throughput)


def memory(url: str) -> list[int]:
    """Return the MiB of each replica that no other process shares."""
    replicas = httpx.get(f"{url}/replicas").json()
    return [psutil.Process(one["pid"]).memory_full_info().uss >> 20 for one in replicas]


def main() -> None:
    print(processor())
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, (module, engines, options) in ARRANGEMENTS.items():
        began = time.perf_counter()
        with launch("--rows", str(ROWS // engines), "--max-queue", str(ROWS), *options, module=module) as server:
            print(f"{name}: ready after {time.perf_counter() - began:.1f} s")
            for users, num_requests in USERS.items():
                print(f"  {users:3} users   {measure(server.url, users, num_requests)}", flush=True)
            if module == "helpers.cluster":
                print(f"  memory of each replica in MiB: {memory(server.url)}")


if __name__ == "__main__":
    main()
