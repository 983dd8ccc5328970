"""A server under several times the load that it can bear, with clients that go away whenever they like.

    python -m tests.soak                     10,000 requests, four times capacity, three of ten clients leave
    python -m tests.soak --requests 1000     fewer

Every answer has to be what the model says alone, every other request has to be refused with 429 or have been left by
its own client; and in the end nothing may be left of any of them: rows, blocks, tasks, memory.

The clients live in a process of their own, so that what this one holds in memory is the server's.
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
from tests.serving import Serving, embedded_engine, eventually

ROWS, MAX_QUEUE, TRACED = 8, 24, 1000
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
    """What came of it; memory in MiB. `left_over` and `wrong` should be empty."""

    requests: int
    seconds: float  # from the first request to the last answer
    offered: float  # requests a second
    capacity: float  # requests a second that the engine alone can answer
    answered: int
    refused: int
    left: int
    wrong: list[str]
    left_over: dict
    rss_before: float
    rss_half: float  # when half of the requests had been sent
    rss_after: float
    tasks_before: int
    tasks_after: int
    trace: int  # iterations that the engine remembers


def run(requests: int, times_capacity: float, seed: int = 0, leaving: float = 0.3, patience: float = 30) -> Figures:
    """Serve so many requests, of which the fraction `leaving` is left by its client at some random moment."""
    engine = embedded_engine(max_batch_size=ROWS, trace_length=TRACED)
    pool = [(prompt, limit) for prompt in PROMPTS for limit in LIMITS]
    prompts, params = [prompt for prompt, _ in pool], [SamplingParams(limit) for _, limit in pool]
    outputs = engine.generate(prompts, params)
    start = time.perf_counter()
    engine.generate(prompts, params)
    capacity = len(pool) / (time.perf_counter() - start)

    server = Serving(engine, max_queue=MAX_QUEUE)
    try:
        plan = {
            "url": server.url,
            "pool": [[*one, o.text, len(o.token_ids)] for one, o in zip(pool, outputs, strict=True)],
            "requests": requests,
            "rate": times_capacity * capacity,
            "leaving": leaving,
            "seed": seed,
        }
        tasks_before, rss = server.tasks(), [_rss()]
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
        with contextlib.suppress(AssertionError):  # the figures say what there is
            eventually(lambda: not server.left_over() and server.tasks() <= tasks_before, patience=patience)
        rss.append(_rss())
        counts = Counter(end if end in ("answered", "refused", "left") else "wrong" for end in ends["ends"])
        return Figures(
            requests,
            ends["seconds"],
            requests / ends["sent"],
            capacity,
            counts["answered"],
            counts["refused"],
            counts["left"],
            [end for end in ends["ends"] if end not in ("answered", "refused", "left")],
            server.ask(server.left_over),
            *rss,
            tasks_before,
            server.tasks(),
            len(engine.trace.iterations),
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
