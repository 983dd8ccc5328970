"""What the engine does, for people: the events that the page draws, at most 20 per second.

A message holds every iteration since the last message to the same client, so a timeline has no gaps. A client that
reads slowly gets fewer messages with more iterations each, up to a limit, instead of a growing queue of messages.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from ..engine import RequestOutput
from ..trace import TracedPass
from .engine_thread import EngineThread
from .response_stream import choice_name
from .snapshot import Snapshot

MIN_INTERVAL, MAX_INTERVAL = 0.05, 2.0  # seconds between two messages
KEPT = 200  # the most iterations, and the most finished sequences, in a message
RATE_WINDOW = 2.0  # seconds over which tokens per second are averaged


class LiveView:
    """Follows an engine and reports to any number of clients."""

    def __init__(self, thread: EngineThread):
        self._thread = thread
        self._snapshot, self._version = Snapshot(), 0  # the version grows with every step
        self._iterations: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._finished: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._iteration_numbers, self._finished_numbers = itertools.count(), itertools.count()
        self._tokens: deque[tuple[float, int]] = deque()  # (time, how many) of each step in the window
        thread.observers.append(self.observe)

    def observe(self, outputs: list[RequestOutput], snapshot: Snapshot) -> None:
        """Record a step and its outputs."""
        self._snapshot, self._version = snapshot, self._version + 1
        self._iterations.extend(self._described(iteration) for iteration in snapshot.passes)
        self._tokens.append((time.perf_counter(), sum(len(output.new_token_ids) for output in outputs)))
        self._forget_old_tokens()
        for output in outputs:
            if output.finish_reason is not None:
                name = choice_name((output.request_id, output.index))
                finished = {"id": name, "reason": output.finish_reason, "tokens": len(output.token_ids)}
                self._finished.append({"n": next(self._finished_numbers)} | finished)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield messages for one client, until the server drains."""
        last_iteration = last_finished = -1
        while not self._thread.draining:
            version, sent = self._version, time.perf_counter()
            iterations = [one for one in self._iterations if one["n"] > last_iteration]
            finished = [one for one in self._finished if one["n"] > last_finished]
            last_iteration = iterations[-1]["n"] if iterations else last_iteration
            last_finished = finished[-1]["n"] if finished else last_finished
            yield self._state() | {"iterations": iterations, "finished": finished}
            await asyncio.sleep(MIN_INTERVAL)
            while version == self._version and not self._thread.draining and time.perf_counter() - sent < MAX_INTERVAL:
                await asyncio.sleep(MIN_INTERVAL)

    def _state(self) -> dict[str, Any]:
        thread, now = self._thread, self._snapshot
        config, blocks = thread.engine.config, thread.engine.block_manager
        self._forget_old_tokens()
        counts = blocks and {"total": blocks.num_blocks, "used": now.blocks_used, "cached": now.blocks_cached}
        return {
            "rows": config.max_batch_size,
            "policy": config.policy if isinstance(config.policy, str) else type(config.policy).__name__,
            "max_queue": thread.capacity - config.max_batch_size,
            "pace": thread.pace,
            "blocks": counts,
            "waiting": [choice_name(label) for label in now.waiting],
            "waiting_count": now.num_waiting,
            "running_count": now.num_running,
            "tokens_per_second": sum(tokens for _, tokens in self._tokens) / RATE_WINDOW,
        }

    def _described(self, iteration: TracedPass) -> dict[str, Any]:
        row_steps = [
            None if one.work == "empty" else [choice_name(one.request_id), one.work, one.tokens, one.new_tokens]
            for one in iteration.row_steps
        ]
        return {"n": next(self._iteration_numbers), "seconds": round(iteration.seconds, 6), "slots": row_steps}

    def _forget_old_tokens(self) -> None:
        while self._tokens and self._tokens[0][0] < time.perf_counter() - RATE_WINDOW:
            self._tokens.popleft()
