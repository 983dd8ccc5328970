"""An engine thread for tests, without HTTP: its model counts letters, and a gate holds it in the middle of a pass."""

import asyncio
import functools
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import asynccontextmanager

from conftest import CountingModel, letter_tokenizer

from helpers import Engine, EngineConfig, SamplingParams
from helpers.server.engine_thread import EngineThread
from tests.support.serving import PATIENCE


class GatedModel(CountingModel):
    """Waits in every forward pass until it may continue.

    Attributes:
        allowed: a permit for each pass that may continue.
        faults: errors to raise, one per pass, the last first.
    """

    def __init__(self, shut: bool, context: int):
        super().__init__(context, eos_token_id=99)
        self.allowed = threading.Semaphore(0 if shut else 10**6)
        self.faults: list[BaseException] = []

    def forward(self, input_ids, position_ids, attention_mask, past_key_values):
        assert self.allowed.acquire(timeout=PATIENCE)
        if self.faults:
            raise self.faults.pop()
        return super().forward(input_ids, position_ids, attention_mask, past_key_values)


@asynccontextmanager
async def running(shut: bool = False, max_queue: int = 4, pace: float = 0.0, context: int = 40, **config):
    """Run a thread with an engine of two rows that generates the next letter.

    `thread.model` is its model, and `thread.seen` what an observer got.
    """
    model = GatedModel(shut, context)
    config = EngineConfig(**{"execution": "padded", "max_batch_size": 2, "trace_length": 100} | config)
    thread = EngineThread(Engine(model, letter_tokenizer(), config), max_queue, pace)
    thread.model, thread.seen = model, []
    thread.observers.append(lambda outputs, snapshot: thread.seen.append((outputs, snapshot)))
    thread.start()
    try:
        yield thread
    finally:
        model.allowed.release(10**6)
        await thread.stop()
        assert not thread._worker._thread.is_alive()


def in_loop(test):
    """Run an asynchronous test, which fails if it waits for too long."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), PATIENCE))

    return run


async def submit(thread, prompt="ab", max_tokens=3, id="r", deadline=None, **params):
    prompts = prompt if isinstance(prompt, list) else [prompt]
    stream, _ = await thread.submit(id, prompts, SamplingParams(max_tokens, **params), deadline=deadline)
    return stream


async def texts(stream) -> dict[int, str]:
    """Return the complete text of each choice."""
    texts = defaultdict(str)
    with stream:
        async for choice, output in stream:
            texts[choice] += output.new_text
    return texts


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def is_empty(thread) -> bool:
    """Return whether nothing is left of any request."""
    engine = thread.engine
    return not (
        thread.num_in_flight or thread._streams or thread._num_unfinished or engine.has_unfinished_requests()
        or engine.waiting or engine.running or engine.scheduler.requests
    )  # fmt: skip
