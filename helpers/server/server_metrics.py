"""What the engine does, for monitoring: the metrics that Prometheus fetches from `/metrics`.

All times are in seconds. A request's clock starts when the request is accepted. A token counts once it has reached the
event loop; a client sees the network's delay in addition.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..server.output_delta import OutputDelta
from .engine_client import EngineClient
from .snapshot import Snapshot

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class ServerMetrics:
    """The metrics of one server, in a registry of their own.

    Attributes:
        requests: counts HTTP requests by status; the middleware increments it.
        prompt_tokens: counts the tokens of accepted prompts; the application increments it.
    """

    def __init__(self, engine_client: EngineClient):
        self.registry = registry = CollectorRegistry()
        self._client, self._snapshot = engine_client, Snapshot()
        self._last_token_time: dict[tuple[str, int], float] = {}  # of each unfinished sequence
        engine_client.observers.append(self.observe)

        def gauge(name: str, help_text: str, value: Callable[[], float]) -> None:
            Gauge(f"engine_{name}", help_text, registry=registry).set_function(value)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"engine_{name}", help_text, labels, registry=registry)

        def histogram(name: str, help_text: str) -> Histogram:
            return Histogram(f"engine_{name}_seconds", help_text, buckets=SECONDS, registry=registry)

        gauge("rows", "Rows: sequences that can run at once.", lambda: engine_client.engine.config.max_batch_size)
        gauge("rows_used", "Rows that hold a sequence.", lambda: self._snapshot.num_running)
        gauge("queue_length", "Sequences that wait for a row.", lambda: self._snapshot.num_waiting)
        gauge("sequences_unfinished", "Sequences accepted and not finished.", lambda: engine_client.num_in_flight)
        if (blocks := engine_client.engine.block_manager) is not None:
            gauge("blocks", "Blocks of the KV cache.", lambda: blocks.num_blocks)
            gauge("blocks_used", "Blocks in the block table of a sequence.", lambda: self._snapshot.blocks_used)
            gauge(
                "blocks_cached", "Blocks kept for prompts with the same prefix.", lambda: self._snapshot.blocks_cached
            )
        self._iterations = counter("iterations", "Forward passes.")
        self.requests = counter("requests", "HTTP requests, by status of the response.", "status")
        self._finished = counter("sequences_finished", "Finished sequences, by finish reason.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of accepted prompts.")
        self._tokens = counter("generated_tokens", "Generated tokens.")
        if engine_client.engine.config.speculative is not None:
            self._drafted = counter("drafted_tokens", "Drafts: guessed tokens that were verified.")
            self._accepted = counter("accepted_tokens", "Drafts that were right.")
        self._ttft = histogram("time_to_first_token", "Time from acceptance to the first token (TTFT).")
        self._itl = histogram("inter_token_latency", "Time between two tokens of a sequence (ITL).")
        self._e2e = histogram("request_latency", "Time from acceptance to the last token of a sequence (E2E).")

    def observe(self, outputs: list[OutputDelta], snapshot: Snapshot) -> None:
        """Count and time the outputs of a step."""
        self._snapshot, now = snapshot, time.perf_counter()
        self._iterations.inc(len(snapshot.passes))
        if self._client.engine.config.speculative is not None:
            drafted, accepted = snapshot.drafts
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
        self._tokens.inc(sum(len(output.new_token_ids) for output in outputs))
        for output in outputs:
            sequence = (output.request_id, output.index)
            stream = self._client.stream_of(output.request_id)  # None if its client has left
            if output.new_token_ids:
                if sequence in self._last_token_time:
                    self._itl.observe(now - self._last_token_time[sequence])
                elif stream is not None:
                    self._ttft.observe(now - stream.accepted)
                for _ in output.new_token_ids[1:]:  # accepted drafts are available at the same time
                    self._itl.observe(0)
                self._last_token_time[sequence] = now
            if output.finish_reason is not None:
                self._finished.labels(output.finish_reason).inc()
                if stream is not None:
                    self._e2e.observe(now - stream.accepted)
                self._last_token_time.pop(sequence, None)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
