"""What the engine does, for people: the events that the page draws, at most 20 per second.

An event holds every iteration since the listener's previous event, up to a limit. So a timeline has no gaps, even if
its client reads slowly, and no events queue up for it.
"""

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from ..server.output_delta import OutputDelta
from ..trace import TracedPass
from .engine_client import EngineClient
from .formats import server_sent_event
from .http_errors import TooManyListeners
from .response_stream import choice_name
from .snapshot import Snapshot

MIN_INTERVAL, MAX_INTERVAL = 0.05, 2.0  # seconds between two events of a listener
KEPT = 200  # the most iterations, and the most finished sequences, in an event
RATE_WINDOW = 2.0  # seconds over which tokens per second are averaged
TOGETHER = 16  # steps that are described at once: a forward pass evicts the code that does it from the caches
MAX_LISTENERS = 16


class LiveView:
    """Follows an engine and reports to its listeners."""

    def __init__(self, engine_client: EngineClient):
        self._client = engine_client
        self._snapshot, self._version = Snapshot(), 0  # the version grows with every step
        self._undescribed: list[tuple[list[OutputDelta], Snapshot]] = []  # the newest steps
        self._iterations: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._finished: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._iteration_numbers, self._finished_numbers = itertools.count(), itertools.count()
        self._tokens: deque[tuple[float, int]] = deque()  # (time, how many) of each step in the window
        policy = engine_client.engine.config.policy
        self._policy = policy if isinstance(policy, str) else type(policy).__name__
        self._rows: dict[str | None, list[list | None]] = {}  # of the last iteration, by replica
        self._num_listeners = 0
        engine_client.observers.append(self.observe)

    def observe(self, outputs: list[OutputDelta], snapshot: Snapshot) -> None:
        """Record a step and its outputs."""
        self._snapshot, self._version = snapshot, self._version + 1
        self._tokens.append((time.perf_counter(), sum(len(output.new_token_ids) for output in outputs)))
        self._undescribed.append((outputs, snapshot))
        if len(self._undescribed) == TOGETHER:
            self._describe_steps()

    def _describe_steps(self) -> None:
        self._forget_old_tokens()
        for outputs, snapshot in self._undescribed:
            self._iterations.extend(self._described(iteration, snapshot.replica) for iteration in snapshot.passes)
            for output in outputs:
                if output.finish_reason is not None:
                    name = choice_name((output.request_id, output.index))
                    finished = {"id": name, "reason": output.finish_reason, "tokens": output.num_tokens}
                    self._finished.append({"n": next(self._finished_numbers)} | finished)
        self._undescribed.clear()

    def listen(self) -> ExitStack:
        """Count one listener more until the end of the `with` block of what is returned. Call this on the event loop.

        Raises:
            TooManyListeners: there are `MAX_LISTENERS` already.
        """
        if self._num_listeners >= MAX_LISTENERS:
            raise TooManyListeners(
                f"{MAX_LISTENERS} pages follow this server's events, and it allows no more: close one, or try later."
            )
        self._num_listeners += 1
        listening = ExitStack()
        listening.callback(self._remove_listener)
        return listening

    def _remove_listener(self) -> None:
        self._num_listeners -= 1

    async def events(self) -> AsyncIterator[str]:
        """Yield events for one listener, until the server drains: after a step, or after two seconds without one."""
        last_iteration = last_finished = -1  # that the listener knows
        while not self._client.draining:
            self._describe_steps()
            iterations = [iteration for iteration in self._iterations if iteration["n"] > last_iteration]
            finished = [request for request in self._finished if request["n"] > last_finished]
            last_iteration = iterations[-1]["n"] if iterations else last_iteration
            last_finished = finished[-1]["n"] if finished else last_finished
            sent, version = time.perf_counter(), self._version
            yield server_sent_event(json.dumps(self._state() | {"iterations": iterations, "finished": finished}))
            await asyncio.sleep(MIN_INTERVAL)
            while version == self._version and not self._client.draining and time.perf_counter() - sent < MAX_INTERVAL:
                await asyncio.sleep(MIN_INTERVAL)

    def _state(self) -> dict[str, Any]:
        client, now = self._client, self._snapshot
        config, blocks = client.engine.config, client.engine.block_manager
        self._forget_old_tokens()
        counts = blocks and {"total": blocks.num_blocks, "used": now.blocks_used, "cached": now.blocks_cached}
        return {
            "rows": config.max_batch_size,
            "replicas": client.replicas_in_view,
            "policy": self._policy,
            "max_queue": client.capacity - config.max_batch_size,
            "pace": client.pace,
            "blocks": counts,
            "waiting": [choice_name(label) for label in now.waiting],
            "waiting_count": now.num_waiting,
            "running_count": now.num_running,
            "tokens_per_second": sum(tokens for _, tokens in self._tokens) / RATE_WINDOW,
        }

    def _described(self, iteration: TracedPass, replica: str | None) -> dict[str, Any]:
        rows = [
            None if row.work == "empty" else [choice_name(row.request_id), row.work, row.tokens, row.new_tokens]
            for row in iteration.row_steps
        ]
        if self._policy == "static":
            rows = self._with_finished_rows(rows, self._rows.get(replica, []))
        self._rows[replica] = rows
        described = {"n": next(self._iteration_numbers), "seconds": round(iteration.seconds, 6), "slots": rows}
        return described if replica is None else described | {"replica": replica}

    def _with_finished_rows(self, rows: list[list | None], rows_before: list[list | None]) -> list[list | None]:
        """Return the rows of an iteration, with the finished requests whose batch still runs.

        To the engine their rows are empty, as it computes nothing for them. But with the policy "static", no other
        request gets these rows before the longest request of the batch has finished.
        """
        pairs = list(itertools.zip_longest(rows, rows_before))
        if not any(row and before and row[0] == before[0] for row, before in pairs):
            return rows  # a new batch
        finished = {request["id"] for request in self._finished}
        return [
            [before[0], "finished", 0, 0] if row is None and before and before[0] in finished else row
            for row, before in pairs
        ]

    def _forget_old_tokens(self) -> None:
        while self._tokens and self._tokens[0][0] < time.perf_counter() - RATE_WINDOW:
            self._tokens.popleft()
