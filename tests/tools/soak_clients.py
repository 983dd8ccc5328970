"""The clients of the soak (soak.py), in a process that has nothing else to do: no model is loaded here.

They read their plan from standard input. They write a line whenever they have sent as many requests as the plan marks,
send a few more, and wait for a line: a server is restarted meanwhile. At the end they write how each request ended.
"""

import asyncio
import json
import random
import re
import socket
import sys
import time
from urllib.parse import urlsplit

import aiohttp

PATIENCE = 60.0  # seconds until a client reports that it got no response
RETRY_AFTER = 0.5  # seconds until a client sends its request again, when there is no server
OUTAGE = 0.02  # the fraction of all requests that are sent while a server is restarted


async def all_clients(plan: dict) -> None:
    """Send each request at its time: an open loop, in which no request waits for an earlier response."""
    chance, start = random.Random(plan["seed"]), time.perf_counter()
    kinds, weights = [*plan["misbehavior"], "behave"], list(plan["misbehavior"].values())
    weights.append(1 - sum(weights))
    tasks, now = [], 0.0
    marks = plan["marks"]
    pauses = [mark + int(OUTAGE * plan["requests"]) for mark in marks]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(plan["requests"]):
            now += chance.expovariate(plan["rate"])
            await asyncio.sleep(max(0.0, start + now - time.perf_counter()))
            if number in marks:
                print("mark", flush=True)
            if number in pauses:
                paused = time.perf_counter()
                await asyncio.to_thread(sys.stdin.readline)
                start += time.perf_counter() - paused
            (kind,) = chance.choices(kinds, weights)
            client = Client(session, plan, random.Random(chance.random()))
            tasks.append(asyncio.create_task(client.run(kind)))
        sent = time.perf_counter() - start
        results = await asyncio.gather(*tasks)
    print(json.dumps({"seconds": time.perf_counter() - start, "sent": sent, "results": results}), flush=True)


class Client:
    """One client with one request. `chance` decides what it asks for, and when it leaves if it does."""

    def __init__(self, session: aiohttp.ClientSession, plan: dict, chance: random.Random):
        self.session, self.chance, self.client_timeout = session, chance, plan["client_timeout"]
        self.url = plan["url"] + "/v1/completions"
        self.prompt, self.max_tokens, self.text, self.num_tokens = chance.choice(plan["pool"])
        self.stream, self.attempts = chance.random() < 0.5, 1

    async def run(self, kind: str) -> dict:
        """Return how the request ended, after how many seconds and attempts."""
        start = time.perf_counter()
        end = await getattr(self, kind.replace(" ", "_"))()
        return {"kind": kind, "end": end, "seconds": time.perf_counter() - start, "attempts": self.attempts}

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
        except TimeoutError:
            return f"lost: no response within {PATIENCE:g} s and {self.attempts} attempts"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    async def leave(self) -> str:
        """Leave after some tokens, or after 1 ms to 2 s, more often early than late."""
        by_tokens = self.stream and self.chance.random() < 0.5
        moment = self.chance.random()
        seconds = PATIENCE if by_tokens else 0.001 * 2000**moment
        try:
            async with asyncio.timeout(seconds):
                return await self._attempt(max_chunks=1 + moment * self.max_tokens if by_tokens else None)
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            return "left"

    async def _attempt(self, max_chunks: float | None = None) -> str:
        settings = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "stream": self.stream}
        if self.stream:
            settings["stream_options"] = {"include_usage": True}
        async with self.session.post(self.url, json=settings) as response:
            if response.status == 429:
                error = (await response.json())["error"]
                is_explained = error["code"] == "queue_full" and response.headers["Retry-After"] == "1"
                return "refused" if is_explained else f"refused without a reason: {error}"
            if response.status != 200:
                return f"status {response.status}: {await response.text()}"
            received, usage, chunks = "", None, 0
            if not self.stream:
                content = await response.json()
                received, usage = content["choices"][0]["text"], content["usage"]
            async for line in response.content:
                if line.strip() in (b"", b"data: [DONE]"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    return f"an error in a stream: {chunk}"
                usage, chunks = chunk.get("usage"), chunks + 1
                received += "".join(choice["text"] for choice in chunk["choices"])
                if max_chunks is not None and chunks >= max_chunks:
                    response.close()
                    return "left"
            exact = received == self.text and usage["completion_tokens"] == self.num_tokens
            return "completed" if exact else f"{received!r} instead of {self.text!r}, {usage}"

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
        with await self._connected(receive_buffer=4096) as connection:
            if connection.fileno() < 0:
                return "unread"
            try:
                await loop.sock_sendall(connection, head.encode() + body)
                await asyncio.sleep(4 * self.client_timeout)
                while part := await loop.sock_recv(connection, 2**16):
                    received += part
            except ConnectionError:
                return "unread"
        head, _, content = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        is_complete = len(content) >= int(length[1]) if length else b"data: [DONE]" in content
        if is_complete and head.split()[1] == b"200":
            return f"the server waited until a client that did not read had {len(content)} bytes"
        return "unread"

    async def send_slowly(self) -> str:
        """Send one byte at a time, until the server ends it."""
        loop, patience = asyncio.get_running_loop(), 10 * self.client_timeout
        with await self._connected() as connection:
            if connection.fileno() < 0:
                return "cut off"
            reading = asyncio.ensure_future(loop.sock_recv(connection, 2**16))
            try:
                async with asyncio.timeout(patience):
                    await loop.sock_sendall(connection, b"POST /v1/completions HTTP/1.1\r\nX: ")
                    while not reading.done():
                        await loop.sock_sendall(connection, b"x")
                        await asyncio.wait([reading], timeout=self.client_timeout / 10)
                    response = reading.result()
                    return "cut off" if response == b"" else f"a slow sender got {response!r}"
            except TimeoutError:
                return f"the server waits for a slow sender after {patience:g} s"
            except ConnectionError:
                return "cut off"
            finally:
                reading.cancel()

    async def _connected(self, receive_buffer: int | None = None) -> socket.socket:
        """Return a connection, closed if there is no server."""
        connection = socket.socket()
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        address = urlsplit(self.url)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (address.hostname, address.port))
        except OSError:
            connection.close()
        return connection


if __name__ == "__main__":
    asyncio.run(all_clients(json.loads(sys.stdin.readline())))
