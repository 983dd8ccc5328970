"""What the layer of replicas costs: `python -m benchmarks.replicas_cost`.

The claim: through the cluster's front end, a request gets its first token at most 15 ms later than from the single
server, and each further token at most 1 ms later (medians). Both servers compute on one core per engine. The single
server and the front end with one replica differ only in the layer. Two replicas share the rows of the single server.

`--separate` compares the throughput of two replicas with that of two single servers which know nothing of each other
and have half of the users each. The claim: it is at least 0.95 of theirs. Two causes of a difference are counted: rows
per forward pass, and the processor time of all processes of a server, which hardly depends on other programs.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import cyclopts
import httpx
import psutil

from helpers.load_test import run_load, token_ids
from helpers.server import launch
from helpers.server.launch import LaunchedServer

from .in_turns import measured_on, table, take_turns

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


def measure(url: str, users: int, num_requests: int) -> Cost:
    """Return the medians of a closed loop."""
    requests = [(prompt, OUTPUT_TOKENS) for prompt in token_ids([PROMPT_TOKENS] * (num_requests + users))]
    run_load(url, requests[:users], users=users, body={"ignore_eos": True})  # the first requests may be slow
    result = run_load(url, requests[users:], users=users, body={"ignore_eos": True})
    ttft, itl = (1000 * result.percentile(name, 50) for name in ("ttft", "itl"))
    return Cost(ttft, itl, result.output_throughput)


def memory(url: str) -> list[int]:
    """Return the MiB of each replica that no other process shares."""
    replicas = httpx.get(f"{url}/replicas").json()
    return [psutil.Process(replica["pid"]).memory_full_info().uss >> 20 for replica in replicas]


def throughput(urls: list[str]) -> float:
    """Return the output tokens per second of servers that share 64 users, all together."""
    users, num_requests = 64 // len(urls), USERS[64] // len(urls)
    with ThreadPoolExecutor() as pool:
        return sum(cost.tokens_per_second for cost in pool.map(lambda url: measure(url, users, num_requests), urls))


def work(servers: list[LaunchedServer]) -> Counter:
    """Return what servers have done so far: output tokens, forward passes, and seconds of processor time."""
    totals = Counter()
    for server in servers:
        front = psutil.Process(server.process.pid)
        for process in (front, *front.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                totals["seconds"] += sum(process.cpu_times()[:2])  # of the user and of the system
        for line in httpx.get(f"{server.url}/metrics").text.splitlines():
            if line.startswith(("engine_generated_tokens_total ", "engine_iterations_total ")):
                name, value = line.split()
                totals[name] += float(value)
    return totals


def throughput_with_causes(servers: list[LaunchedServer]) -> tuple[float, str]:
    """Return the throughput of servers, and text with the tokens per forward pass and the processor time per token."""
    before = work(servers)
    rate = throughput([server.url for server in servers])
    totals = work(servers) - before
    tokens = totals["engine_generated_tokens_total"]
    causes = tokens / totals["engine_iterations_total"], 1e6 * totals["seconds"] / tokens
    return rate, f"{rate:5.0f} tokens/s, {causes[0]:.1f} per forward pass, {causes[1]:.0f} us of processor time each"


def arrangement_throughput(name: str, module: str, commands: list[Sequence[str]]) -> float:
    """Start servers, one per command, and return the throughput of all together; print it with its causes."""
    with ExitStack() as stack:
        servers = [stack.enter_context(launch(*command, module=module)) for command in commands]
        rate, text = throughput_with_causes(servers)
    print(f"{name}: {text}", flush=True)
    return rate


def compare_with_separate_servers(rounds: int, model: Sequence[str]) -> None:
    """Measure two single servers and two replicas in turn. `model` are the options that name it."""
    options = ("--rows", str(ROWS // 2), "--max-queue", str(ROWS), *model)
    arrangements = {
        "separate": ("helpers.server", [options] * 2),
        "replicas": ("helpers.cluster", [(*options, "--replicas", "2")]),
    }
    runs = {name: partial(arrangement_throughput, name, *servers) for name, servers in arrangements.items()}
    rates = take_turns(runs, rounds, warm_up=0)
    ratio = median(rates["replicas"]) / median(rates["separate"])
    print(f"Two replicas have {ratio:.2f} of the throughput of two separate servers (medians of {rounds} rounds).")


def main(*, separate: bool = False, rounds: int = 3, model: str | None = None) -> None:
    """Measure what the layer of replicas costs.

    Args:
        separate: compare two replicas with two separate servers.
        rounds: with --separate, how often each is measured.
        model: with --separate, a model folder, run in bfloat16; the embedded model if left out.
    """
    print(measured_on())
    os.environ["OMP_NUM_THREADS"] = "1"
    if separate:
        return compare_with_separate_servers(rounds, ("--model", model, "--dtype", "bfloat16") if model else ())
    rows = []
    for name, (module, engines, options) in ARRANGEMENTS.items():
        with launch("--rows", str(ROWS // engines), "--max-queue", str(ROWS), *options, module=module) as server:
            for users, num_requests in USERS.items():
                cost = measure(server.url, users, num_requests)
                cells = f"{cost.ttft:.1f}", f"{cost.itl:.2f}", f"{cost.tokens_per_second:.0f}"
                rows.append([name, users, *cells])
            if module == "helpers.cluster":
                print(f"{name}: {memory(server.url)} MiB of memory that no other process shares")
    print(table(["", "users", "TTFT, ms", "ITL, ms", "tokens per second"], rows))


if __name__ == "__main__":
    cyclopts.run(main)
