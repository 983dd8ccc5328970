"""Kill replicas at random under load, and check that no token of any stream is lost, repeated or changed.

    python -m tests.tools.kill_replicas --kills 50

Takes about ten seconds per kill on two cores, because a new process has to load a model for each one.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time

import httpx

from helpers import SamplingParams
from helpers.server import launch
from tests.support.serving import embedded_engine

PROMPTS = ["Once upon a time there was a fox", "What comes up", "The clever owl", "A rolling stone", "Look before"]


def bodies(draw: random.Random, number: int) -> list[dict]:
    """Return different requests: greedy ones and seeded ones."""
    return [
        {"prompt": draw.choice(PROMPTS), "max_tokens": draw.randint(20, 300), "ignore_eos": True}
        | ({"temperature": 0} if index % 2 else {"temperature": 1.2, "seed": index})
        for index in range(number)
    ]


async def one_user(http: httpx.AsyncClient, draw: random.Random, expected: list, counts: dict) -> None:
    """Send one request after another until all replicas are killed, and compare each response."""
    while not counts["done"]:
        body, expected_text = draw.choice(expected)
        received = []
        try:
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:]).get("choices", [{}]):
                            received.append(choice.get("text", "an error"))
        except httpx.HTTPError as error:
            received.append(repr(error))
        counts["requests"] += 1
        counts["wrong"] += "".join(received) != expected_text


async def ready_replicas(http: httpx.AsyncClient) -> list[dict]:
    return [one for one in (await http.get("/replicas")).json() if one["state"] == "ready"]


async def killer(http: httpx.AsyncClient, draw: random.Random, kills: int, replicas: int, counts: dict) -> None:
    """Kill random replicas, each once the one before has been replaced."""
    for _ in range(kills):
        while len(listed := await ready_replicas(http)) < replicas:
            await asyncio.sleep(0.1)
        await asyncio.sleep(draw.uniform(0, 1))
        os.kill(draw.choice(listed)["pid"], signal.SIGKILL)
        counts["kills"] += 1
        print(counts, file=sys.stderr, flush=True)
        while len(await ready_replicas(http)) == replicas:
            await asyncio.sleep(0.02)
    counts["done"] = True


async def attack(url: str, options, expected: list) -> dict:
    draw, counts = random.Random(options.seed), {"kills": 0, "requests": 0, "wrong": 0, "done": False}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        users = [one_user(http, draw, expected, counts) for _ in range(options.users)]
        await asyncio.gather(*users, killer(http, draw, options.kills, options.replicas, counts))
        text = (await http.get("/metrics")).text
        counts["resumed"] = next(line.split()[1] for line in text.splitlines() if line.startswith("requests_resumed "))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.tools.kill_replicas", description=__doc__)
    for name, default in {"kills": 50, "replicas": 2, "users": 12, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    engine, requests = embedded_engine(max_batch_size=8), bodies(random.Random(options.seed), 24)
    expected = []
    for body in requests:
        params = {key: value for key, value in body.items() if key != "prompt"}
        expected.append((body, engine.generate(body["prompt"], SamplingParams(**params))[0].text))
    began = time.perf_counter()
    with launch("--replicas", str(options.replicas), "--pace", "0.01", module="helpers.cluster") as front:
        counts = asyncio.run(attack(front.url, options, expected))
    print(
        f"{counts['kills']} replicas killed in {time.perf_counter() - began:.0f} s; {counts['requests']} streams, "
        f"{counts['resumed']} resumptions, {counts['wrong']} streams that were not those of the request alone"
    )
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
