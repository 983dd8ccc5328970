"""The course's server and vLLM's, under the same load, in turns: `python -m benchmarks.servers`.

Both serve the same model to clients of `helpers.load_test` with the same number of rows. No prompt is sent twice, so
prefix caches find nothing. At each rate, one server is tested right after the other, while the other is idle. The
rates are multiples of what the faster of the two completes under constant load. The report marks each server's knee.
It also compares a single user, and one user per row, with the engine itself: HTTP, JSON and threads are the difference.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers import Engine, EngineConfig, Request, SamplingParams, load_model
from helpers.load_test import lengths, run_load, token_ids
from helpers.load_test.report import LoadResult
from helpers.load_test.sweep import capacity, table
from helpers.server import launch

from . import machine
from .engines import vllm_environment
from .install import HOME, python_of
from .models import RANDOM, find_model

PROMPTS, OUTPUTS = "uniform:16-128", "uniform:16-64"
SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.4)  # of the faster server's capacity
BODY = {"temperature": 0, "ignore_eos": True}


def main() -> int:
    """Run the comparison and print it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__.partition(": ")[0])
    parser.add_argument("--model", default="gpt2", help=f"{', '.join(RANDOM)} (random weights), embedded, or a folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--requests", type=int, default=60, help="per rate and server")
    parser.add_argument("--alone", action="store_true", help="measure only what the server adds to the engine")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = find_model(options.model)
    about = machine.describe()
    print(f"{model.description}, {options.dtype}, {options.rows} rows, prompts {PROMPTS}, outputs {OUTPUTS}.")
    print(f"{about['processor']}, {about['cores']} cores, matrix units: {', '.join(about['matrix units'])}.")

    def requests(number: int) -> list[Request]:
        prompts = lengths(PROMPTS, options.requests, [options.seed, 1])
        outputs = lengths(OUTPUTS, options.requests, [options.seed, 2])
        contents = token_ids(prompts, 1000 * options.seed + number)
        return [Request(prompt, tokens) for prompt, tokens in zip(contents, outputs, strict=True)]

    def beside_the_engine() -> str:
        few = alone(model.folder, options.dtype, users=1, count=1, repeats=15)
        return f"{few}\n{alone(model.folder, options.dtype, options.rows, 6 * options.rows, repeats=5)}"

    if options.alone:
        print(beside_the_engine())
        return 0
    with ExitStack() as stack:
        urls = {"course": stack.enter_context(course_server(model.folder, options.dtype, options.rows))}
        if python_of("vllm").exists():
            urls["vLLM"] = stack.enter_context(vllm_server(model.folder, options.dtype, options.rows))
        most = {name: capacity(url, requests, body=BODY, progress=False) for name, url in urls.items()}
        print("Capacity, requests per second:", ", ".join(f"{name} {rate:.2f}" for name, rate in most.items()))
        results: dict[str, list[LoadResult]] = {name: [] for name in urls}
        for number, share in enumerate(SHARES):
            for name, url in urls.items():
                rate = share * max(most.values())
                first, measured = requests(number)[:4], requests(number)[4:]  # the first requests may be slow
                run_load(url, first, users=4, body=BODY, progress=False)
                results[name].append(run_load(url, measured, rate, body=BODY, progress=False))
        for name, measured in results.items():
            print(f"\n{name}\n{table(measured)}")
    print(f"\n{beside_the_engine()}")
    return 0


@contextmanager
def course_server(folder: Path, dtype: str, rows: int) -> Iterator[str]:
    """Start the course's server, and return its address."""
    options = {"model": folder, "dtype": dtype, "rows": rows, "max-queue": 1000}
    with launch(*(f"--{name}={value}" for name, value in options.items()), shares_cores=False) as server:
        yield server.url


@contextmanager
def vllm_server(folder: Path, dtype: str, rows: int, patience: float = 300) -> Iterator[str]:
    """Start vLLM's server from its own environment, and return its address once it answers.

    Raises:
        RuntimeError: it ended, or did not answer within `patience` seconds; its log is in build/bench/logs.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python, url = python_of("vllm"), f"http://127.0.0.1:{port}"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", dtype]
    command += ["--max-num-seqs", str(rows), "--host", "127.0.0.1", "--port", str(port)]
    # Compiling the model needs ninja and others from the environment's folder.
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    log = HOME / "logs" / "vllm_server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as output,
        subprocess.Popen(
            [str(part) for part in command],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | vllm_environment()
            | {"PATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            end = time.monotonic() + patience
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"vLLM's server did not start; its log is {log}.")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def alone(folder: Path, dtype: str, users: int, count: int, repeats: int) -> str:
    """Compare the requests of some users, of whom each sends the next one when the last one has ended, with the same
    requests on an engine in this process, in turns. `count` requests are sent per turn.
    """
    import torch

    model, tokenizer = load_model(folder, dtype=getattr(torch, dtype))
    engine = Engine(model, tokenizer, EngineConfig(max_batch_size=users, prefix_caching=False))
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    times: list[tuple[float, float]] = []
    with course_server(folder, dtype, rows=users) as url:
        for turn in range(repeats + 1):
            prompts = token_ids([32] * count, seed=7 + turn)
            time.sleep(0.3)  # the threads of the turn before spin for a while
            start = time.perf_counter()
            engine.generate(prompts, params)
            own = time.perf_counter() - start
            time.sleep(0.3)
            load = run_load(url, [Request(prompt, 32) for prompt in prompts], users=users, body=BODY, progress=False)
            times.append((own, load.duration))
    engine_time, server_time = (1000 * statistics.median(seconds) for seconds in zip(*times[1:], strict=True))
    extra = sorted(1000 * (server - own) for own, server in times[1:])
    return (
        f"Users: {users}. {count} requests of 32 prompt and 32 output tokens, medians of {repeats}: engine "
        f"{engine_time:.1f} ms, through the server {server_time:.1f} ms; the difference is "
        f"{statistics.median(extra):.1f} ms ({extra[0]:.1f} to {extra[-1]:.1f}), and the server has "
        f"{statistics.median(own / server for own, server in times[1:]):.2f} of the engine's throughput."
    )


if __name__ == "__main__":
    sys.exit(main())
