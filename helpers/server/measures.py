"""What the engine does, for machines: the figures that Prometheus fetches from `/metrics`.

All times are in seconds. A request's clock starts when it is accepted and reads when the event loop has a token in
hand: what a client sees in addition is the network.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..outputs import RequestOutput
from .engine_thread import EngineThread, Snapshot

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class Measures:
    """Counts and times of one server, in a registry of its own."""

    def __init__(self, thread: EngineThread):
        self.registry = registry = CollectorRegistry()
        self._thread, self._now = thread, Snapshot()
        self._last_token: dict[tuple[str, int], float] = {}  # of each unfinished answer
        thread.observers.append(self.observe)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"engine_{name}", text, registry=registry).set_function(value)

        gauge("rows", "Rows: sequences that can run at once.", lambda: thread.engine.config.max_batch_size)
        gauge("rows_used", "Rows that a sequence holds.", lambda: len(self._now.running))
        gauge("queue_length", "Answers that wait for a row.", lambda: len(self._now.waiting))
        gauge("answers_unfinished", "Answers accepted and not ended.", lambda: thread.open)
        blocks = getattr(thread.engine.execution, "blocks", None)
        if blocks is not None:
            gauge("blocks", "Blocks of the KV cache.", lambda: blocks.blocks)
            gauge("blocks_used", "Blocks in the table of a sequence.", lambda: self._now.blocks_used)
            gauge("blocks_cached", "Blocks kept for prompts that begin alike.", lambda: self._now.blocks_cached)
        self.iterations = Counter("engine_iterations", "Forward passes.", registry=registry)
        self.requests = Counter("engine_requests", "Requests, by status of the answer.", ["status"], registry=registry)
        self.ended = Counter("engine_answers", "Answers that ended, by reason.", ["reason"], registry=registry)
        self.prompt_tokens = Counter("engine_prompt_tokens", "Tokens of accepted prompts.", registry=registry)
        self.tokens = Counter("engine_generated_tokens", "Tokens generated.", registry=registry)
        self.ttft = Histogram(
            "engine_time_to_first_token_seconds", "TTFT, from acceptance.", buckets=SECONDS, registry=registry
        )
        self.itl = Histogram(
            "engine_inter_token_latency_seconds", "Time between two tokens.", buckets=SECONDS, registry=registry
        )
        self.e2e = Histogram(
            "engine_request_latency_seconds", "From acceptance to the end.", buckets=SECONDS, registry=registry
        )

    def observe(self, outputs: list[RequestOutput], snapshot: Snapshot) -> None:
        """After a step: count and time what it yielded."""
        self._now, now = snapshot, time.perf_counter()
        self.iterations.inc(len(snapshot.iterations))
        for output in outputs:
            answer = (output.request_id, output.index)
            listener = self._thread.listener(output.request_id)
            if output.new_token_ids:
                self.tokens.inc(len(output.new_token_ids))
                if answer in self._last_token:
                    self.itl.observe(now - self._last_token[answer])
                elif listener is not None:
                    self.ttft.observe(now - listener.accepted)
                self._last_token[answer] = now
            if output.finish_reason is not None:
                self.ended.labels(output.finish_reason).inc()
                if listener is not None:
                    self.e2e.observe(now - listener.accepted)
                self._last_token.pop(answer, None)

    def counting_statuses(self, app):
        """An ASGI middleware: count the answers to requests under /v1, by status."""

        async def counted(scope, receive, send):
            async def count(message):
                if message["type"] == "http.response.start" and scope["path"].startswith("/v1/"):
                    self.requests.labels(message["status"]).inc()
                await send(message)

            try:
                await app(scope, receive, count if scope["type"] == "http" else send)
            except Exception:  # what nobody expected is answered outside of all middleware
                self.requests.labels(500).inc()
                raise

        return counted

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
