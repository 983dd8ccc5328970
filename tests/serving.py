"""What the server's tests share: a server on a thread of this process, and a gate that an engine has to pass.

Behind a gate, tests count iterations where they would otherwise have to guess seconds.
"""

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import uvicorn

from helpers import Engine, EngineConfig, SamplingParams
from helpers.server.app import make_app

PATIENCE = 60.0  # seconds until a test gives up: for machines with a lot of other work


def eventually(true: Callable[[], bool], what: str = "it never came true", patience: float = PATIENCE) -> None:
    """Wait for something that happens on another thread."""
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.002)


class Gate:
    """Holds an engine in the middle of a forward pass, until more passes are allowed.

    Attributes:
        passes: how many have begun.
        faults: errors to raise, by the number of the pass, the first one 0.
    """

    def __init__(self, engine: Engine, shut: bool = False):
        self.passes, self.faults = 0, {}
        self._allowed, self._shut, self._held = threading.Semaphore(0), shut, False
        head = engine.execution.model.lm_head  # the last layer: keys and values have been written
        head.register_forward_pre_hook(self._pass)

    def _pass(self, *_) -> None:
        number, self.passes = self.passes, self.passes + 1
        if self._shut:
            self._held = True
            self._allowed.acquire()
        if number in self.faults:
            raise self.faults[number]

    def allow(self, passes: int = 1) -> None:
        """Let so many passes end, and wait until the next one has begun."""
        for _ in range(passes):
            eventually(lambda: self._held, f"no pass has begun after {self.passes}")
            self._held = False
            self._allowed.release()
        eventually(lambda: self._held, f"no pass has begun after {self.passes}")

    def open(self) -> None:
        self._shut = False
        self._allowed.release(10**6)


def embedded_engine(**config) -> Engine:
    return Engine(config=EngineConfig(**{"max_batch_size": 2, "trace_length": 1000} | config))


class Serving:
    """A server on a thread of this process. `thread` is the engine's."""

    def __init__(self, engine: Engine, sockets=None, **options):
        app = make_app(engine, **options)
        self.thread, self.engine = app.state.thread, engine
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)
        self._running = threading.Thread(target=self.server.run, kwargs={"sockets": sockets}, daemon=True)
        self._running.start()
        eventually(lambda: self.server.started, "the server did not start")
        self.url = "http://{}:{}".format(*self.server.servers[0].sockets[0].getsockname()[:2])
        self.loop = self.thread._loop

    def ask(self, question: Callable):
        """What something is on the server's event loop."""

        async def asked():
            return question()

        return asyncio.run_coroutine_threadsafe(asked(), self.loop).result(PATIENCE)

    def tasks(self) -> int:
        """How many tasks the event loop has, beside this question's."""
        return self.ask(lambda: len(asyncio.all_tasks(self.loop))) - 1

    def settled(self) -> None:
        """Wait until nothing is left of any request."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self.ask(self.left_over))
        assert self.ask(self.left_over) == {}

    def left_over(self) -> dict[str, object]:
        """What there still is of requests; nothing if all have ended."""
        thread, engine = self.thread, self.engine
        counts = {
            "open": thread.open,
            "listeners": len(thread._listeners),
            "unfinished": len(thread._unfinished),
            "inbox": thread._inbox.qsize(),
            "waiting": engine.waiting,
            "running": engine.running,
            "untold": engine._untold,
            "known": engine._unfinished,
            "connections": len(self.server.server_state.tasks),
        }
        if blocks := getattr(engine.execution, "blocks", None):
            counts |= {"used": blocks.used, "tables": blocks.tables, "references": sum(blocks.references)}
        return {name: count for name, count in counts.items() if count}

    def end(self) -> None:
        self.server.should_exit = True
        self._running.join(PATIENCE)
        assert not self._running.is_alive(), "the server did not end"


@contextlib.contextmanager
def serving(engine: Engine | None = None, sockets=None, **options) -> Iterator[Serving]:
    """A server for an engine, on a thread of this process."""
    server = Serving(engine or embedded_engine(), sockets, **options)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def gated(shut: bool = True, config: dict | None = None, **options) -> Iterator[tuple[Serving, Gate]]:
    """A server whose engine, the embedded model on two rows, waits at a gate."""
    engine = embedded_engine(**config or {})
    gate = Gate(engine, shut)
    with serving(engine, **options) as server:
        try:
            yield server, gate
        finally:
            gate.open()


@functools.cache
def expected(prompt: str, max_tokens: int, **settings):
    """What the engine answers to this prompt alone."""
    return _engine().generate(prompt, SamplingParams(max_tokens, **settings))[0]


_engine = functools.cache(Engine)


def body(prompt: str = "Once upon a time", max_tokens: int = 8, **settings) -> dict:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | settings


def post(server, path: str = "/v1/completions", timeout: float = PATIENCE, **settings) -> httpx.Response:
    return httpx.post(server.url + path, json=settings, timeout=timeout)


def events_of(lines: Iterator[str]) -> Iterator[dict | str]:
    """The data of server-sent events: dictionaries, and at the end `"[DONE]"`."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def text_of_chunks(chunks) -> str:
    return "".join(choice["text"] for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"])


class Asking:
    """A request on a thread of its own, so that a test can go on meanwhile. `response` is what came of it."""

    def __init__(self, server, path: str = "/v1/completions", method: str = "POST", **settings):
        self.response: httpx.Response | None = None
        self.chunks: list[dict | str] = []
        self.error: Exception | None = None
        self.client = httpx.Client(timeout=PATIENCE)
        self._request = self.client.build_request(method, server.url + path, json=settings)
        self._running = threading.Thread(target=self._ask, daemon=True)
        self._running.start()

    def _ask(self) -> None:
        try:
            self.response = self.client.send(self._request, stream=True)
            if self.response.headers["content-type"].startswith("text/event-stream"):
                for chunk in events_of(self.response.iter_lines()):
                    self.chunks.append(chunk)
            else:
                self.response.read()
        except Exception as error:
            self.error = error

    def done(self) -> "Asking":
        self._running.join(PATIENCE)
        assert not self._running.is_alive(), "no end of the answer"
        assert self.error is None, self.error
        return self

    @property
    def answer(self) -> tuple[int, dict | list]:
        """Status, and the answer or its chunks."""
        self.done()
        return self.response.status_code, self.chunks or self.response.json()


class Wire:
    """A client that is nothing but a connection: it can send what no library would, and go away at any moment."""

    def __init__(self, server, data: bytes, receive_buffer: int | None = None):
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((host, int(port)))
        self.socket.sendall(data)

    @classmethod
    def posting(cls, server, settings: dict, path: str = "/v1/completions", **options) -> "Wire":
        data = json.dumps(settings).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        )
        return cls(server, head.encode() + b"\r\n" + data, **options)

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while end not in data:
            piece = self.socket.recv(2**16)
            assert piece, f"the connection ended after {data!r}"
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()


def one_after_another(server, *bodies: dict) -> list[Asking]:
    """Requests that arrive in this order: each has been accepted before the next one is sent."""
    requests = []
    for settings in bodies:
        before = server.ask(lambda: len(server.thread._listeners))
        requests.append(Asking(server, **settings))
        eventually(lambda before=before: server.ask(lambda: len(server.thread._listeners)) > before, "not accepted")
    return requests
