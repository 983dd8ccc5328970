"""What the layer of replicas costs: `python -m benchmarks.replicas_cost`.

The claim: through the cluster's front end, a request gets its first token at most 15 ms later than from the single
server, and each further token at most 1 ms later (medians). Both servers compute on one core per engine. The single
server and the front end with one replica differ only in the layer. Two replicas share the rows of the single server.

`--separate` compares the throughput of two replicas with that of two single servers which know nothing of each other
and have half of the users each. The claim: it is at least 0.95 of theirs. Two causes of a difference are counted: rows
per forward pass, and the processor time of all processes of a server, which hardly depends on other programs.
"""

import argparse
import itertools
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median

import httpx
import psutil

from helpers.load_test import run_load
from helpers.load_test.prompts import token_ids
from helpers.server import launch
from helpers.server.launch import LaunchedServer

from .machine import processor

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32, 64
USERS = {1: 40, 64: 256}  # how many requests they send
ARRANGEMENTS = {
    "single server": ("helpers.server", 1, ()),
    "front end, 1 replica": ("helpers.cluster", 1, ("--replicas", "1")),
    "front end, 2 replicas": ("helpers.cluster", 2, ("--replicas", "2")),
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


def throughput(urls: list[str]) -> float:
    """Return the output tokens per second of servers that share 64 users, all together."""
    users, num_requests = 64 // len(urls), USERS[64] // len(urls)
    with ThreadPoolExecutor() as pool:
        return sum(cost.tokens_per_second for cost in pool.map(lambda url: measure(url, users, num_requests), urls))


def work(servers: list[LaunchedServer]) -> Counter:
    """Return what servers have done so far: output tokens, forward passes, and seconds of processor time."""
    done = Counter()
    for server in servers:
        front = psutil.Process(server.process.pid)
        for process in (front, *front.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                done["seconds"] += sum(process.cpu_times()[:2])  # of the user and of the system
        for line in httpx.get(f"{server.url}/metrics").text.splitlines():
            if line.startswith(("engine_generated_tokens_total ", "engine_iterations_total ")):
                name, value = line.split()
                done[name] += float(value)
    return done


def throughput_with_causes(servers: list[LaunchedServer]) -> tuple[float, str]:
    """Return the throughput of servers, and text with the tokens per forward pass and the processor time per token."""
    before = work(servers)
    rate = throughput([server.url for server in servers])
    done = work(servers) - before
    tokens = done["engine_generated_tokens_total"]
    causes = tokens / done["engine_iterations_total"], 1e6 * done["seconds"] / tokens
    return rate, f"{rate:5.0f} tokens/s, {causes[0]:.1f} per forward pass, {causes[1]:.0f} us of processor time each"


def compare_with_separate_servers(rounds: int, model: tuple[str, ...]) -> None:
    """Measure two single servers and two replicas in turn. `model` are the options that name it."""
    options, rates = ("--rows", str(ROWS // 2), "--max-queue", str(ROWS), *model), {"separate": [], "replicas": []}
    for _ in range(rounds):
        for name, commands in {"separate": [options] * 2, "replicas": [(*options, "--replicas", "2")]}.items():
            module = "helpers.cluster" if name == "replicas" else "helpers.server"
            with ExitStack() as stack:
                servers = [stack.enter_context(launch(*one, module=module)) for one in commands]
                rate, text = throughput_with_causes(servers)
            rates[name].append(rate)
            print(f"{name}: {text}", flush=True)
    ratio = median(rates["replicas"]) / median(rates["separate"])
    print(f"Two replicas have {ratio:.2f} of the throughput of two separate servers (medians of {rounds} rounds).")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.replicas_cost", description=__doc__)
    parser.add_argument("--separate", action="store_true", help="compare two replicas with two separate servers")
    parser.add_argument(
        "--rounds", type=int, default=3, help="with --separate: how often each is measured (default: 3)"
    )
    parser.add_argument("--model", help="with --separate: a model folder, run in bfloat16 (default: the embedded one)")
    options = parser.parse_args()
    print(processor())
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.separate:
        model = ("--model", options.model, "--dtype", "bfloat16") if options.model else ()
        return compare_with_separate_servers(options.rounds, model)
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
