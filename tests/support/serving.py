"""What the server's tests share: a server on a thread of this process, and a gate that its engine has to pass.

With a gate, tests count iterations where they would otherwise have to guess seconds.
"""

import asyncio
import contextlib
import copy
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import uvicorn

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.server.app import make_app
from helpers.server.connections import ConnectionLimits

PATIENCE = 120.0  # seconds until a test fails: for machines with a lot of other work
OWL, MILLER, FOX = "Once upon a time", "There was once a poor miller called Jonas, and", "The quick brown fox"


def wait_until(condition: Callable[[], bool], message: str = "it never became true", patience: float = PATIENCE):
    """Wait for something that happens on another thread."""
    end, pause = time.monotonic() + patience, 0.002
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(pause)
        pause = min(1.05 * pause, 0.05)  # a long wait leaves the cores to what it waits for


class Gate:
    """Holds an engine in the middle of a forward pass until more passes are allowed.

    Attributes:
        passes: how many forward passes have begun.
        faults: errors to raise, by the number of the pass, from 0.
    """

    def __init__(self, engine: Engine, shut: bool = False):
        self.passes, self.faults = 0, {}
        self._allowed, self._shut, self._held = threading.Semaphore(0), shut, False
        head = engine.runner.model.lm_head  # the last layer: keys and values have been written
        head.register_forward_pre_hook(self._pass)

    def _pass(self, *_) -> None:
        number, self.passes = self.passes, self.passes + 1
        if self._shut:
            self._held = True
            self._allowed.acquire()
        if number in self.faults:
            raise self.faults[number]

    def allow(self, passes: int = 1) -> None:
        """Let this many passes end, and wait until the next one has begun."""
        for _ in range(passes):
            wait_until(lambda: self._held, f"no pass has begun after {self.passes}")
            self._held = False
            self._allowed.release()
        wait_until(lambda: self._held, f"no pass has begun after {self.passes}")

    def open(self) -> None:
        """Hold no pass any more."""
        self._shut = False
        self._allowed.release(10**6)


def embedded_engine(**config) -> Engine:
    """Return an engine of the embedded model without its chat template: a chat is the texts of its messages."""
    model, tokenizer = load_model()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    return Engine(model, tokenizer, EngineConfig(**{"max_batch_size": 2, "trace_length": 1000} | config))


class QuickServer(uvicorn.Server):
    """Notices its end within a hundredth of a second instead of a tenth: tests end a hundred servers."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


class LocalServer:
    """A server on a thread of this process. `thread` is the thread of its engine."""

    def __init__(self, engine: Engine, limits: ConnectionLimits | None = None, **options):
        app = make_app(engine, **options)
        settings = (limits or ConnectionLimits()).uvicorn_settings()
        self.thread, self.engine = app.state.engine_client, engine
        config = uvicorn.Config(
            app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=5, **settings
        )
        self.server = QuickServer(config)
        self._running = threading.Thread(target=self.server.run, daemon=True)
        self._running.start()
        wait_until(lambda: self.server.started, "the server did not start")
        self.url = "http://{}:{}".format(*self.server.servers[0].sockets[0].getsockname()[:2])
        self.loop = self.thread._loop

    def evaluate(self, expression: Callable):
        """Return the value of an expression on the server's event loop."""

        async def value():
            return expression()

        return asyncio.run_coroutine_threadsafe(value(), self.loop).result(PATIENCE)

    def num_tasks(self) -> int:
        """Return how many tasks the event loop has, without that of this call."""
        return self.evaluate(lambda: len(asyncio.all_tasks(self.loop))) - 1

    def num_in_flight(self) -> int:
        return self.evaluate(lambda: self.thread.num_in_flight)

    def streams(self) -> list[str]:
        """Return the engine's ids of the requests whose clients are still there, in order of arrival."""
        return self.evaluate(lambda: list(self.thread._streams))

    def assert_empty(self) -> None:
        """Wait until nothing is left of any request."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.evaluate(self.left_over))
        assert self.evaluate(self.left_over) == {}

    def left_over(self) -> dict[str, object]:
        """Return what is left of requests; nothing if all have ended."""
        thread, engine = self.thread, self.engine
        counts = {
            "in flight": thread.num_in_flight,
            "streams": len(thread._streams),
            "unfinished": len(thread._num_unfinished),
            "inbox": thread._inbox.qsize(),
            "waiting": engine.waiting,
            "queue": len(engine.scheduler.waiting),
            "running": engine.running,
            "pending outputs": engine.outputs.pending,
            "known requests": engine.scheduler.requests,
            "connections": len(self.server.server_state.tasks),
        }
        if blocks := engine.block_manager:
            counts |= {"used": blocks.used, "tables": blocks.tables, "references": sum(blocks.references)}
        return {name: count for name, count in counts.items() if count}

    def end(self) -> None:
        self.server.should_exit = True
        self._running.join(PATIENCE)
        assert not self._running.is_alive(), "the server did not end"


@contextlib.contextmanager
def serving(engine: Engine | None = None, **options) -> Iterator[LocalServer]:
    """Serve an engine on a thread of this process."""
    server = LocalServer(engine or embedded_engine(), **options)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def gated(shut: bool = True, config: dict | None = None, **options) -> Iterator[tuple[LocalServer, Gate]]:
    """Serve an engine with the embedded model on two rows, behind a gate."""
    engine = embedded_engine(**config or {})
    gate = Gate(engine, shut)
    with serving(engine, **options) as server:
        try:
            yield server, gate
        finally:
            gate.open()


@functools.cache
def expected(prompt: str, max_tokens: int, **settings):
    """Return the engine's output for this prompt alone."""
    return _engine().generate(prompt, SamplingParams(max_tokens, **settings))[0]


_engine = functools.cache(Engine)


def body(prompt: str = OWL, max_tokens: int = 8, **settings) -> dict:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | settings


def post(server, path: str = "/v1/completions", timeout: float = PATIENCE, **settings) -> httpx.Response:
    return httpx.post(server.url + path, json=settings, timeout=timeout)


def text_of_response(response: dict) -> str:
    """Return the text of a completion's only choice."""
    (choice,) = response["choices"]
    return choice["text"]


def error_of(outcome: httpx.Response | tuple[int, dict | list], status: int) -> dict:
    """Return the error in a response, or its status and content, that must have this status, in OpenAI's format."""
    if isinstance(outcome, httpx.Response):
        outcome = outcome.status_code, outcome.json()
    assert outcome[0] == status, outcome
    error = outcome[1]["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


def events_of(lines: Iterator[str]) -> Iterator[dict | str]:
    """Yield the data of server-sent events: dictionaries, and at the end `"[DONE]"`."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def text_of_chunks(chunks) -> str:
    return "".join(choice["text"] for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"])


class BackgroundRequest:
    """A request on a thread of its own, so that a test can continue meanwhile. `response` is None until it arrives."""

    def __init__(self, server, path: str = "/v1/completions", method: str = "POST", **settings):
        self.response: httpx.Response | None = None
        self.chunks: list[dict | str] = []
        self.client = httpx.Client(timeout=PATIENCE)
        request = self.client.build_request(method, server.url + path, json=settings)
        self._running = ThreadPoolExecutor(1).submit(self._run, request)

    def _run(self, request: httpx.Request) -> None:
        self.response = self.client.send(request, stream=True)
        if self.response.headers["content-type"].startswith("text/event-stream"):
            for chunk in events_of(self.response.iter_lines()):
                self.chunks.append(chunk)
        else:
            self.response.read()

    def wait(self) -> "BackgroundRequest":
        """Wait for the end of the response."""
        self._running.result(PATIENCE)
        return self

    @property
    def outcome(self) -> tuple[int, dict | list]:
        """The status, and the body or its chunks."""
        self.wait()
        return self.response.status_code, self.chunks or self.response.json()

    @property
    def text(self) -> str:
        """The text of a successful response, complete or in chunks."""
        status, content = self.outcome
        assert status == 200, content
        return text_of_chunks(content) if isinstance(content, list) else text_of_response(content)


class RawConnection:
    """A client that is just a connection: it can send what no library would, and disconnect at any moment."""

    def __init__(self, server, data: bytes, receive_buffer: int | None = None):
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((host, int(port)))
        self.socket.sendall(data)

    @classmethod
    def posting(cls, server, settings: dict, path: str = "/v1/completions", **options) -> "RawConnection":
        data = json.dumps(settings).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        return cls(server, head.encode() + data, **options)

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while end not in data:
            piece = self.socket.recv(2**16)
            assert piece, f"the connection ended after {data!r}"
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()


def send_in_order(server, *bodies: dict) -> list[BackgroundRequest]:
    """Send requests, each once the one before has been accepted."""
    requests = []
    for settings in bodies:
        before = len(server.streams())
        requests.append(BackgroundRequest(server, **settings))
        wait_until(lambda before=before: len(server.streams()) > before, "the request was not accepted")
    return requests
