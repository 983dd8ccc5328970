"""What the engine does, for people: the events that the page draws, a few dozen a second at most.

A message holds every iteration since the last one to the same listener, so a timeline has no gaps. Who reads slowly
gets fewer and longer messages, of the newest iterations, instead of a queue that grows.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from ..outputs import RequestOutput
from ..trace import Iteration
from .engine_thread import EngineThread, Snapshot, name_of

INTERVAL = 0.05  # seconds between two messages at least,
HEARTBEAT = 2.0  # and at most
KEPT = 200  # iterations, and ends, that a message holds at most
SHOWN = 100  # names of answers that wait
WINDOW = 2.0  # seconds over which tokens a second are counted


class Watch:
    """Follows an engine, and tells any number of listeners."""

    def __init__(self, thread: EngineThread):
        self.thread = thread
        self._now = Snapshot()
        self._iterations: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._finished: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._numbers, self._ends, self._changes = itertools.count(), itertools.count(), 0
        self._tokens: deque[tuple[float, int]] = deque()  # when, how many
        thread.observers.append(self.observe)

    def observe(self, outputs: list[RequestOutput], snapshot: Snapshot) -> None:
        """After a step."""
        self._now, self._changes = snapshot, self._changes + 1
        self._iterations.extend(self._drawn(iteration) for iteration in snapshot.iterations)
        self._tokens.append((time.perf_counter(), sum(len(output.new_token_ids) for output in outputs)))
        self._forget_old_tokens()
        for output in outputs:
            if output.finish_reason is not None:
                name = name_of((output.request_id, output.index))
                end = {"id": name, "reason": output.finish_reason, "tokens": len(output.token_ids)}
                self._finished.append({"n": next(self._ends)} | end)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """For one listener, for as long as it listens."""
        iteration = end = -1
        while not self.thread.draining:
            changes, since = self._changes, time.perf_counter()
            iterations = [one for one in self._iterations if one["n"] > iteration]
            finished = [one for one in self._finished if one["n"] > end]
            iteration = iterations[-1]["n"] if iterations else iteration
            end = finished[-1]["n"] if finished else end
            yield self._state() | {"iterations": iterations, "finished": finished}
            await asyncio.sleep(INTERVAL)
            while changes == self._changes and not self.thread.draining and time.perf_counter() - since < HEARTBEAT:
                await asyncio.sleep(INTERVAL)

    def _state(self) -> dict[str, Any]:
        thread, now = self.thread, self._now
        config, blocks = thread.engine.config, getattr(thread.engine.execution, "blocks", None)
        self._forget_old_tokens()
        return {
            "rows": config.max_batch_size,
            "policy": config.policy if isinstance(config.policy, str) else type(config.policy).__name__,
            "max_queue": thread.capacity - config.max_batch_size,
            "pace": thread.pace,
            "blocks": blocks and {"total": blocks.blocks, "used": now.blocks_used, "cached": now.blocks_cached},
            "waiting": [name_of(label) for label in now.waiting[:SHOWN]],
            "waiting_count": len(now.waiting),
            "running_count": len(now.running),
            "tokens_per_second": sum(tokens for _, tokens in self._tokens) / WINDOW,
        }

    def _drawn(self, iteration: Iteration) -> dict[str, Any]:
        slots = [
            None if slot.work == "empty" else [name_of(slot.request_id), slot.work, slot.tokens, slot.new_tokens]
            for slot in iteration.slots
        ]
        return {"n": next(self._numbers), "seconds": round(iteration.seconds, 6), "slots": slots}

    def _forget_old_tokens(self) -> None:
        while self._tokens and self._tokens[0][0] < time.perf_counter() - WINDOW:
            self._tokens.popleft()
