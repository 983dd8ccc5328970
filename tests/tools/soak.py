"""A server that gets several times its capacity, from clients of which many misbehave, and that is killed twice.

    make soak                                    10,000 requests at four times capacity: several minutes
    python -m tests.tools.soak --requests 1000   fewer

Of a hundred clients, 60 are well-behaved. Thirty leave at a random moment, five never read their response, and five
send their request too slowly. Twice, the server's process is killed and started again; a well-behaved client then sends
its request again.

The report says what must be nothing: well-behaved requests that were neither answered nor refused, responses that
differ from what the model generates for the request alone, and what is left of any request at the end. The exit status
is 1 if a promise is broken. Everything stays on this machine: one process for the server, and this one for the clients.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

import aiohttp
import httpx
import psutil

from helpers import SamplingParams
from helpers.server import launch
from tests.support.serving import embedded_engine

ROWS, MAX_QUEUE, CLIENT_TIMEOUT = 8, 24, 2.0
PROMPTS = (
    "Once upon a time",
    "There was once a poor miller called Jonas, and",
    "Question: What does the clever owl eat?\nAnswer:",
    "The quick brown fox",
    "Once upon a time there was a fox who lived in a den under the old oak and",
    "On a snowy night",
)
LIMITS = (1, 2, 5, 11, 24, 50)  # max_tokens
KINDS = {"behave": 0.6, "leave": 0.3, "never_read": 0.05, "send_slowly": 0.05}  # the fraction of the clients of a kind
GOOD_ENDS = ("completed", "refused", "left", "unread", "cut off")
GAUGES = ("rows_used", "queue_length", "sequences_unfinished", "blocks_used")
PATIENCE = 60.0  # seconds until a client reports that it got no response
RETRY_AFTER = 0.5  # seconds until a client sends its request again, when there is no server
OUTAGE = 0.02  # the fraction of all requests that are sent while a server is restarted


class RestartingServer:
    """A server in its own process, at one address, that can be killed and started again."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._start()

    def _start(self) -> None:
        options = {"port": self.port, "rows": ROWS, "max-queue": MAX_QUEUE, "client-timeout": CLIENT_TIMEOUT}
        self._launching = launch(*[f"--{name}={value}" for name, value in options.items()])
        self.process = psutil.Process(self._launching.__enter__().process.pid)
        self.descriptors = self.process.num_fds()  # of a server that has no client yet

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.end()
        self._start()

    def end(self) -> None:
        self._launching.__exit__(None, None, None)

    def left_over(self) -> dict[str, float]:
        """Return what counts requests and is not 0, and the descriptors that were not closed."""
        page = httpx.get(self.url + "/metrics").text
        counts = {name: float(re.search(rf"^engine_{name} (\S+)$", page, re.MULTILINE)[1]) for name in GAUGES}
        counts["descriptors"] = max(0, self.process.num_fds() - self.descriptors - 2)
        return {name: count for name, count in counts.items() if count}

    def wait_until_nothing_is_left(self, patience: float = 30) -> dict[str, float]:
        """Return what is left over when patience ends; return at once when that is nothing."""
        end = time.monotonic() + patience
        while (left_over := self.left_over()) and time.monotonic() < end:
            time.sleep(0.1)
        return left_over


class Client:
    """One client with one request. `chance` decides what it asks for, and when it leaves if it does."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pool: list, chance: random.Random):
        self.session, self.url, self.chance = session, url, chance
        self.prompt, self.max_tokens, self.output = chance.choice(pool)
        self.stream, self.attempts = chance.random() < 0.5, 1

    # --- clients that read their responses ----------------------------------------------------------------------

    async def behave(self) -> str:
        """Send the request, and again if the server is gone; return "completed", "refused", or what is wrong."""
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        return await self._attempt()
                    except (aiohttp.ClientError, ConnectionError):
                        self.attempts += 1
                        await asyncio.sleep(RETRY_AFTER)
        except Exception as error:  # also a time limit that has passed
            return f"{type(error).__name__}: {error} after {self.attempts} attempts"

    async def leave(self) -> str:
        """Leave after 1 ms to 2 s, more often early than late."""
        try:
            async with asyncio.timeout(0.001 * 2000 ** self.chance.random()):
                return await self._attempt()
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            return "left"

    async def _attempt(self) -> str:
        settings = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": self.stream}
        if self.stream:
            settings["stream_options"] = {"include_usage": True}
        async with self.session.post(self.url + "/v1/completions", json=settings) as response:
            if response.status == 429:
                return "refused"
            if response.status != 200:
                return f"status {response.status}: {await response.text()}"
            received, usage = "", None
            if not self.stream:
                content = await response.json()
                received, usage = content["choices"][0]["text"], content["usage"]
            async for line in response.content:
                if line.strip() in (b"", b"data: [DONE]"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    return f"an error in a stream: {chunk}"
                usage = chunk.get("usage")
                received += "".join(choice["text"] for choice in chunk["choices"])
            exact = received == self.output.text and usage["completion_tokens"] == len(self.output.token_ids)
            return "completed" if exact else f"{received!r} instead of {self.output.text!r}, {usage}"

    # --- clients that do not ------------------------------------------------------------------------------------

    async def never_read(self) -> str:
        """Ask for a response that is larger than the system's buffers, and stay connected without reading it.

        It is not much larger: a long response costs the others' time even if it is read, which is not what this shows.
        """
        settings = {"prompt": self.prompt, "max_tokens": 100, "ignore_eos": True, "logprobs": 20, "stream": self.stream}
        body = json.dumps(settings).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        loop, received = asyncio.get_running_loop(), b""
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                await loop.sock_connect(connection, ("127.0.0.1", urlsplit(self.url).port))
                await loop.sock_sendall(connection, head.encode() + body)
                await asyncio.sleep(4 * CLIENT_TIMEOUT)
                while part := await loop.sock_recv(connection, 2**16):
                    received += part
            except OSError:
                return "unread"
        head, _, content = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        is_complete = len(content) >= int(length[1]) if length else b"data: [DONE]" in content
        if is_complete and head.split()[1] == b"200":
            return f"the server waited until a client that did not read had {len(content)} bytes"
        return "unread"

    async def send_slowly(self) -> str:
        """Send one byte at a time, until the server ends it."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(self.url).port)
        except OSError:
            return "cut off"
        writer.write(b"POST /v1/completions HTTP/1.1\r\nX: ")
        reading = asyncio.ensure_future(reader.read())
        try:
            async with asyncio.timeout(10 * CLIENT_TIMEOUT):
                while not reading.done():
                    writer.write(b"x")
                    await asyncio.wait([reading], timeout=CLIENT_TIMEOUT / 10)
            return "cut off" if reading.result() == b"" else f"a slow sender got {reading.result()!r}"
        except TimeoutError:
            return f"the server waits for a slow sender after {10 * CLIENT_TIMEOUT:g} s"
        except ConnectionError:
            return "cut off"
        finally:
            writer.close()


async def send_all(server: RestartingServer, pool: list, requests: int, rate: float, seed: int, restarts: int):
    """Send each request at its time, and restart the server at equal distances.

    Each of the requests has a task of its own, so none waits for an earlier response.

    Returns:
        How the requests ended: a count of each end, and how many requests were sent again.
    """
    chance, clients, tasks = random.Random(seed), [], []
    kills = [requests * (number + 1) // (restarts + 1) for number in range(restarts)]
    outage, restarting = int(OUTAGE * requests), None
    start, now = time.perf_counter(), 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(requests):
            now += chance.expovariate(rate)
            await asyncio.sleep(max(0.0, start + now - time.perf_counter()))
            if number in kills:
                restarting = asyncio.create_task(asyncio.to_thread(server.kill_and_restart))
            if number - outage in kills:
                paused = time.perf_counter()
                await restarting
                start += time.perf_counter() - paused
            (kind,) = chance.choices([*KINDS], [*KINDS.values()])
            clients.append(Client(session, server.url, pool, random.Random(chance.random())))
            tasks.append(asyncio.create_task(getattr(clients[-1], kind)()))
        ends = Counter(await asyncio.gather(*tasks))
    return ends, sum(client.attempts > 1 for client in clients)


def run(requests: int, times_capacity: float, seed: int = 0, restarts: int = 2) -> dict:
    """Serve all clients, with restarts; return how their requests ended, and what is left of them."""
    engine = embedded_engine(max_batch_size=ROWS)
    pairs = [(prompt, limit) for prompt in PROMPTS for limit in LIMITS]
    prompts, params = [prompt for prompt, _ in pairs], [SamplingParams(limit) for _, limit in pairs]
    outputs = engine.generate(prompts, params)
    start = time.perf_counter()
    engine.generate(prompts, params)
    capacity = len(pairs) / (time.perf_counter() - start)  # what the engine alone can finish, in requests per second
    pool = [(*pair, output) for pair, output in zip(pairs, outputs, strict=True)]
    server = RestartingServer()
    try:
        ends, retried = asyncio.run(send_all(server, pool, requests, times_capacity * capacity, seed, restarts))
        return {"ends": ends, "retried": retried, "left over": server.wait_until_nothing_is_left()}
    finally:
        server.end()


def broken_promises(figures: dict) -> list[str]:
    left_over = [f"{count:g} {name} left over" for name, count in figures["left over"].items()]
    return [end for end in figures["ends"] if end not in GOOD_ENDS] + left_over


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.tools.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--times-capacity", type=float, default=4.0)
    options = parser.parse_args()
    figures = run(options.requests, options.times_capacity)
    for end, count in figures["ends"].items():
        print(f"{count:6} {end}")
    print(f"{figures['retried']:6} requests were sent again")
    broken = broken_promises(figures)
    print(*[f"BROKEN: {promise}" for promise in broken] or ["Every promise was kept."], sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
