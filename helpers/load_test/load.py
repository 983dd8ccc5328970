"""All requests at their times: open loop, where nothing waits for the server, or closed loop, where every user does.

In an open loop each request is a task of its own that sleeps until it is due, so a request that is answered late delays
no other. In a closed loop, `users` users each wait for an answer before they ask again: a slow server is asked less
often, and what the users would have wanted meanwhile is never measured. That is how a closed loop hides overload.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tqdm import tqdm

from ..batching import Request
from .arrivals import arrival_times
from .client import Answer, Client, Prompt
from .report import LIMITS, LoadResult

T = TypeVar("T")
Ask = Callable[[int, float, Callable[[], float]], Awaitable[Answer]]  # which request, when it was due, the clock


def run_load(
    url: str,
    requests: Sequence[Request | tuple[Prompt, int]],
    rate: float | None = None,
    *,
    cv: float = 1.0,
    seed: int = 0,
    users: int | None = None,
    think: float = 0.0,
    warm_up: int = 0,
    limits: dict[str, float] | None = None,
    model: str | None = None,
    api_key: str | None = None,
    chat: bool = False,
    body: dict[str, Any] | None = None,
    timeout: float = 600.0,
    progress: bool = True,
) -> LoadResult:
    """Send requests to a server, and measure. Works in a notebook, too, whose own event loop goes on meanwhile.

    Args:
        url: the server's.
        requests: `Request`s or (prompt, max_tokens) tuples; a prompt may be a list of token ids.
        rate: open loop: so many requests a second, at times drawn by `arrival_times`.
        cv, seed: for `arrival_times`.
        users: closed loop, instead of a rate: so many users, each of whom waits for an answer before asking again.
        think: seconds for which a user reads an answer before the next question. Who gets none waits for as long as
            the server says, or a second.
        warm_up: so many of the requests, the first ones, are sent and answered before the clock starts. They are left
            out of all figures.
        limits: the largest "ttft", "tpot" and "e2e" (seconds) that a request may have to count as good.
        model, api_key, chat, body, timeout: see `Client`.
        progress: show a bar where somebody looks at stderr.

    Raises:
        ConnectionError, PermissionError: see `Client`.
        ValueError: a setting that has no meaning; see `Client` for two more.
    """
    if (rate is None) == (users is None):
        raise ValueError("Say either a rate (open loop) or a number of users (closed loop).")
    if users is not None and users < 1:
        raise ValueError(f"users is a number of at least 1, not {users}.")
    if think < 0 or timeout <= 0:
        raise ValueError("think is at least 0 seconds, and timeout more than 0.")
    if not 0 <= warm_up < len(requests):
        raise ValueError(f"A warm-up of {warm_up} leaves no request to measure: there are {len(requests)}.")
    if unknown := set(limits or {}) - set(LIMITS):
        raise ValueError(f"There is no limit {unknown.pop()!r}; there are {', '.join(LIMITS)}.")
    pairs = [(one.prompt, one.max_tokens) if isinstance(one, Request) else one for one in requests]
    times = None if rate is None else arrival_times(len(pairs) - warm_up, rate, cv, seed)
    client = Client(url, model, api_key, chat, body, timeout)

    async def load() -> list[Answer]:
        async with client:
            await _together([_ask_now(client, *pair) for pair in pairs[:warm_up]])
            name = f"{rate:g} requests/s" if users is None else f"{users} users"
            with tqdm(total=len(pairs) - warm_up, desc=name, leave=False, disable=None if progress else True) as bar:

                async def ask(number: int, due: float, now: Callable[[], float]) -> Answer:
                    answer = await client.ask(number, *pairs[warm_up + number], due, now)
                    bar.update()
                    return answer

                if times is not None:
                    return await _open_loop(ask, times)
                return await _closed_loop(ask, len(pairs) - warm_up, users, think)

    answers = _in_a_thread(load())
    way = {"rate": rate, "cv": cv, "seed": seed} if users is None else {"users": users, "think": think}
    settings = {"url": url, "model": client.model, "chat": chat, "body": body or {}, "timeout": timeout}
    return LoadResult(way | {"warm_up": warm_up} | settings, answers, dict(limits or {}))


async def _open_loop(ask: Ask, times: Sequence[float]) -> list[Answer]:
    now = _clock()

    async def one(number: int) -> Answer:
        await asyncio.sleep(times[number] - now())
        return await ask(number, times[number], now)

    return await _together([one(number) for number in range(len(times))])


async def _closed_loop(ask: Ask, count: int, users: int, think: float) -> list[Answer]:
    """A user's request is due when the answer before it is complete and read: the server decides when.

    Who got none asks again after as long as the server says, or a second: else a few who are refused would use up all
    requests in no time.
    """
    now, numbers = _clock(), iter(range(count))

    async def user() -> list[Answer]:
        answers = []
        for number in numbers:  # whoever is free takes the next one
            if answers:
                await asyncio.sleep(think if answers[-1].status == "ok" else max(think, answers[-1].retry_after or 1.0))
            answers.append(await ask(number, now(), now))
        return answers

    answers = itertools.chain(*await _together([user() for _ in range(users)]))
    return sorted(answers, key=lambda answer: answer.request_id)


async def _ask_now(client: Client, prompt: Prompt, max_tokens: int) -> Answer:
    return await client.ask(0, prompt, max_tokens, 0.0, _clock())


async def _together(coroutines: Sequence[Awaitable[T]]) -> list[T]:
    """Their results. Whoever interrupts this interrupts them all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in coroutines]
    return [task.result() for task in tasks]


def _clock() -> Callable[[], float]:
    """A clock that shows the seconds since now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def _in_a_thread(coroutine: Awaitable[T]) -> T:
    """Run it in a thread of its own, because a notebook's thread has an event loop that already runs."""
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
