"""Send all requests of a load test, in an open or a closed loop.

In an open loop, each request is a task of its own that sleeps until its send time, so a late response delays no other
request. In a closed loop, each user waits for a response before sending the next request. A slow server then receives
fewer requests, and those that users would have sent meanwhile are never measured. A closed loop therefore hides
overload.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tqdm import tqdm

from ..metrics import LIMITS
from ..request import Request
from .client import Client, Prompt, RequestResult
from .report import LoadResult
from .workload import arrival_times

T = TypeVar("T")
# Sends a request, given its number, its intended send time and the clock.
Send = Callable[[int, float, Callable[[], float]], Awaitable[RequestResult]]


def run_load(
    url: str,
    requests: Sequence[Request | tuple[Prompt, int]],
    rate: float | None = None,
    *,
    cv: float = 1.0,
    seed: int = 0,
    users: int | None = None,
    limits: dict[str, float] | None = None,
    progress: bool = True,
    **client_settings,
) -> LoadResult:
    """Send requests to a server and measure its responses.

    This also works in a notebook, whose thread already runs an event loop.

    Args:
        url: the address of the server.
        requests: `Request`s or (prompt, max_tokens) tuples; a prompt may be a list of token ids.
        rate: for an open loop: requests per second, sent at the times that `arrival_times` returns.
        cv, seed: see `arrival_times`.
        users: for a closed loop: the number of users. Each user waits for a response before sending the next request.
            After one that was not completed, the user waits for the server's Retry-After, or one second if there is
            none.
        limits: the largest "ttft", "tpot" and "e2e" (in seconds) of a request that counts as good.
        progress: show a progress bar if stderr is a terminal.
        client_settings: `model`, `api_key`, `chat`, `body` and `timeout`; see `Client`.

    Raises:
        ConnectionError, PermissionError: see `Client`.
        ValueError: a setting is out of range or contradicts another; see also `Client`.
    """
    _check_settings(len(requests), rate, users, limits or {})
    pairs = [(request.prompt, request.max_tokens) if isinstance(request, Request) else request for request in requests]
    times = None if rate is None else arrival_times(len(pairs), rate, cv, seed)
    client = Client(url, **client_settings)

    async def load() -> list[RequestResult]:
        async with client:
            name = f"{rate:g} requests/s" if users is None else f"{users} users"
            with tqdm(total=len(pairs), desc=name, leave=False, disable=None if progress else True) as bar:

                async def send(number: int, due: float, now: Callable[[], float]) -> RequestResult:
                    result = await client.send(number, *pairs[number], due, now)
                    bar.update()
                    return result

                if times is not None:
                    return await _open_loop(send, times)
                return await _closed_loop(send, len(pairs), users)

    results = _run_in_thread(load())
    loop = {"rate": rate, "cv": cv, "seed": seed} if users is None else {"users": users}
    settings = {"url": url} | {name: getattr(client, name) for name in ("model", "chat", "body", "timeout")}
    return LoadResult(loop | settings, results, dict(limits or {}))


def _check_settings(count: int, rate: float | None, users: int | None, limits: dict) -> None:
    if (rate is None) == (users is None):
        raise ValueError("Give either a rate (open loop) or a number of users (closed loop).")
    if users is not None and users < 1:
        raise ValueError(f"users is at least 1, not {users}.")
    if not count:
        raise ValueError("There are no requests to send: give at least one.")
    if unknown := set(limits) - set(LIMITS):
        raise ValueError(f"There is no limit {unknown.pop()!r}; there are {', '.join(LIMITS)}.")


async def _open_loop(send: Send, times: Sequence[float]) -> list[RequestResult]:
    now = _start_clock()

    async def send_when_due(number: int) -> RequestResult:
        await asyncio.sleep(times[number] - now())
        return await send(number, times[number], now)

    return await asyncio.gather(*map(send_when_due, range(len(times))))


async def _closed_loop(send: Send, count: int, users: int) -> list[RequestResult]:
    """Send each user's next request once the previous response is complete: the server sets the pace.

    After a request that was not completed, the user waits for the server's Retry-After, or one second. Without this
    pause, a few refused users would use up all requests within moments.
    """
    now, numbers = _start_clock(), iter(range(count))

    async def user() -> list[RequestResult]:
        results = []
        for number in numbers:  # users share the iterator: each takes the next request when ready
            if results and results[-1].status != "ok":
                await asyncio.sleep(results[-1].retry_after or 1.0)
            results.append(await send(number, now(), now))
        return results

    results = itertools.chain(*await asyncio.gather(*(user() for _ in range(users))))
    return sorted(results, key=lambda result: result.request_id)


def _start_clock() -> Callable[[], float]:
    """Return a clock that counts seconds from now on."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def _run_in_thread(coroutine: Awaitable[T]) -> T:
    """Run a coroutine in a thread of its own, because the thread of a notebook already runs an event loop."""
    running = []

    async def main() -> T:
        running.extend((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, main())
        try:
            return future.result()
        except KeyboardInterrupt:  # Ctrl-C reaches this thread only
            loop, task = running
            loop.call_soon_threadsafe(task.cancel)
            raise
