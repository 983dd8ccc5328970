"""A server whose load is several times its capacity, with clients that disconnect at random moments.

    python -m tests.soak                     10,000 requests, four times capacity, three of ten clients leave
    python -m tests.soak --requests 1000     fewer

Every completed response must equal what the model generates for its request alone. Every other request must have been
refused with 429 or left by its own client. In the end nothing may be left of any request: rows, blocks, tasks, memory.

The clients run in their own process, so that the memory of this one is the server's.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from helpers import SamplingParams
from tests.serving import LocalServer, embedded_engine, wait_until

ROWS, MAX_QUEUE, TRACE_LENGTH = 8, 24, 1000
PROMPTS = (
    "Once upon a time",
    "There was once a poor miller called Jonas, and",
    "Question: What does the clever owl eat?\nAnswer:",
    "The quick brown fox",
    "Once upon a time there was a fox who lived in a den under the old oak and",
    "On a snowy night",
)
LIMITS = (1, 2, 5, 11, 24, 50)  # max_tokens


@dataclasses.dataclass
class Figures:
    """What the soak measured; memory in MiB. `left_over` and `wrong` should be empty."""

    requests: int
    seconds: float  # from the first request to the last response
    offered: float  # requests per second
    capacity: float  # requests per second that the engine alone can finish
    completed: int
    refused: int
    left: int
    wrong: list[str]
    left_over: dict
    rss_before: float
    rss_half: float  # when half of the requests had been sent
    rss_after: float
    tasks_before: int
    tasks_after: int
    trace: int  # iterations in the engine's trace


def run(requests: int, times_capacity: float, seed: int = 0, leaving: float = 0.3, patience: float = 30) -> Figures:
    """Serve requests; the fraction `leaving` is left by its client at a random moment."""
    engine = embedded_engine(max_batch_size=ROWS, trace_length=TRACE_LENGTH)
    pool = [(prompt, limit) for prompt in PROMPTS for limit in LIMITS]
    prompts, params = [prompt for prompt, _ in pool], [SamplingParams(limit) for _, limit in pool]
    outputs = engine.generate(prompts, params)
    start = time.perf_counter()
    engine.generate(prompts, params)
    capacity = len(pool) / (time.perf_counter() - start)

    server = LocalServer(engine, max_queue=MAX_QUEUE)
    try:
        plan = {
            "url": server.url,
            "pool": [[*one, o.text, len(o.token_ids)] for one, o in zip(pool, outputs, strict=True)],
            "requests": requests,
            "rate": times_capacity * capacity,
            "leaving": leaving,
            "seed": seed,
        }
        tasks_before, rss = server.num_tasks(), [_rss()]
        with subprocess.Popen(
            [sys.executable, "-m", "tests.soak_clients"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        ) as clients:
            clients.stdin.write(json.dumps(plan) + "\n")
            clients.stdin.flush()
            assert clients.stdout.readline() == "half\n"
            rss.append(_rss())
            ends = json.loads(clients.stdout.readline())
        with contextlib.suppress(AssertionError):  # the figures say what is left
            wait_until(lambda: not server.left_over() and server.num_tasks() <= tasks_before, patience=patience)
        rss.append(_rss())
        counts = Counter(ends["ends"])
        expected = ("completed", "refused", "left")
        return Figures(
            requests,
            ends["seconds"],
            requests / ends["sent"],
            capacity,
            *(counts[end] for end in expected),
            [end for end in ends["ends"] if end not in expected],
            server.evaluate(server.left_over),
            *rss,
            tasks_before,
            server.num_tasks(),
            len(engine.trace.passes),
        )
    finally:
        server.end()


def _rss() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--times-capacity", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = run(options.requests, options.times_capacity, options.seed)
    for name, value in dataclasses.asdict(figures).items():
        print(f"{name:14}", f"{value:.1f}" if isinstance(value, float) else value)
    sys.exit(bool(figures.wrong or figures.left_over or figures.tasks_after > figures.tasks_before))


if __name__ == "__main__":
    main()
