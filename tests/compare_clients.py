"""The load generator and OpenAI's own client send the same requests at the same times to the same server, in turns.

    python -m tests.compare_clients                                 starts this course's server
    python -m tests.compare_clients --url http://127.0.0.1:8000     uses a running server

The other client shares no code with ours: it is `openai` on httpx, which parses streams itself, with the timing below.
It computes for some milliseconds per request (more on a busy machine), which slows a server on the same machine. The
server that this program starts therefore runs in slow motion, 0.1 s per iteration, and is overloaded: compared with a
queue of seconds, a client's computation is negligible.

The comparison takes three minutes. The exit status is 1 if a figure differs by more than 5%.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

import openai

from helpers import Request, workloads
from helpers.load_test import arrival_times, run_load

FIGURES = ("median TTFT (ms)", "median E2E (ms)", "requests/s", "tokens/s")


def with_openai(url: str, requests: Sequence[Request], rate: float, body: dict) -> tuple[float, ...]:
    """Return the figures as measured with the official client."""

    async def one(client, model: str, request: Request, due: float, start: float):
        await asyncio.sleep(start + due - time.perf_counter())
        stream = await client.completions.create(
            model=model,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=body,
        )
        times, tokens = [], 0
        async for chunk in stream:
            if chunk.choices:
                times.append(time.perf_counter() - start)
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
        return times[0] - due, times[-1] - due, tokens, times[-1]

    async def everything():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            start = time.perf_counter()
            pairs = zip(requests, arrival_times(len(requests), rate), strict=True)
            return await asyncio.gather(*(one(client, model, request, due, start) for request, due in pairs))

    first, last, tokens, ends = zip(*asyncio.run(everything()), strict=True)
    seconds = max(ends)
    return (
        1000 * statistics.median(first),
        1000 * statistics.median(last),
        len(requests) / seconds,
        sum(tokens) / seconds,
    )


def with_ours(url: str, requests: Sequence[Request], rate: float, body: dict) -> tuple[float, ...]:
    """Return the figures as measured by the load generator."""
    result = run_load(url, requests, rate, body={"temperature": 0} | body, progress=False)
    if len(result.ok) < len(requests):
        raise RuntimeError(f"Not all requests were completed:\n{result}")
    medians = (1000 * result.percentile(name, 50) for name in ("ttft", "e2e"))
    return *medians, result.request_throughput, result.output_throughput


def compare(
    url: str, requests: Sequence[Request], rate: float, rounds: int = 5, body: dict | None = None
) -> dict[str, float]:
    """Return our value divided by theirs for each figure: medians over rounds in which each client has one turn."""
    clients = with_ours, with_openai
    rows = []
    for number in range(rounds):
        turns = (0, 1) if number % 2 == 0 else (1, 0)  # the first turn finds a colder server
        rows.append({turn: clients[turn](url, requests, rate, body or {}) for turn in turns})
    print(f"{'':20}{'ours':>12}{'openai':>12}{'ratio':>9}")
    ratios = {}
    for index, name in enumerate(FIGURES):
        ours, theirs = (statistics.median(row[turn][index] for row in rows) for turn in (0, 1))
        ratios[name] = ours / theirs
        print(f"{name:20}{ours:12.2f}{theirs:12.2f}{ratios[name]:9.3f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compare_clients")
    parser.add_argument("--url", help="a running server (default: start this course's)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second (default: 8)")
    parser.add_argument("--requests", type=int, default=60, help="requests per turn (default: 60)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of two turns (default: 5)")
    args = parser.parse_args()
    requests = workloads.budgets(args.requests, 8, 24)
    if args.url:
        ratios = compare(args.url, requests, args.rate, args.rounds)
    else:
        from helpers.server import launch

        with launch("--pace", "0.1") as server:
            ratios = compare(server.url, requests, args.rate, args.rounds, {"ignore_eos": True})
    return int(any(abs(ratio - 1) > 0.05 for ratio in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
