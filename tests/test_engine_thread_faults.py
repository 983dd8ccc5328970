"""The engine's thread when something fails, and at the end: every request ends, with the error that concerns it."""

import asyncio
import threading
import traceback

import pytest

from helpers.server.errors import EngineFailed, ShuttingDown
from helpers.server.output_delta import OutputDelta
from tests.support.gated_thread import in_loop, is_empty, running, submit, texts, wait_until
from tests.support.serving import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")


# --- faults ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_that_the_engine_refuses_late_fails_alone():
    """It has been validated before. Whatever still goes wrong costs other requests nothing."""
    async with running() as thread:
        add = thread.engine.add_request

        def refusing(token_ids, params, engine_id, *others, **named):
            if engine_id == "bad":
                raise ValueError("no room")
            return add(token_ids, params, engine_id, *others, **named)

        thread.engine.add_request = refusing
        bad = await submit(thread, "a", 2, "bad", n=2, temperature=1)
        good = await submit(thread, "a", 2, "good")
        with pytest.raises(EngineFailed, match="ValueError: no room"):
            await texts(bad)
        assert await texts(good) == {0: "bc"}
        await wait_until(lambda: is_empty(thread))


@in_loop
async def test_a_crashing_thread_accepts_no_request(monkeypatch):
    """Reporting the error takes the thread a moment; a request that it accepted meanwhile would wait forever."""
    crashing, crash = threading.Event(), threading.Event()
    monkeypatch.setattr(traceback, "print_exc", lambda: crashing.set() or crash.wait(PATIENCE))
    async with running() as thread:
        thread.engine.step = lambda: (_ for _ in ()).throw(GeneratorExit)
        with pytest.raises(EngineFailed):
            await texts(await submit(thread))
        await wait_until(crashing.is_set)
        assert not thread._running.done()
        try:
            with pytest.raises(EngineFailed):
                await submit(thread)
        finally:
            crash.set()


@in_loop
async def test_a_reader_that_is_cancelled_while_a_token_arrives_is_cancelled():
    """asyncio.wait_for would lose the cancellation (Python 3.11), and wait for a request that has been aborted."""
    for deadline in (None, 100.0):
        async with running(shut=True) as thread:
            stream = await submit(thread, max_tokens=5, deadline=deadline)
            reading = asyncio.ensure_future(texts(stream))
            await asyncio.sleep(0)  # now it waits for an output
            stream.put(OutputDelta("r", 0, "c", [1], None, 1, None))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading], timeout=PATIENCE / 2)
            assert reading.done()


# --- the end --------------------------------------------------------------------------------------------------------


@in_loop
async def test_draining_finishes_the_accepted_requests():
    async with running(shut=True) as thread:
        streams = [await submit(thread, "a", 3, str(n)) for n in range(4)]
        draining = asyncio.ensure_future(thread.drain(PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown) as caught:
            await submit(thread)
        assert caught.value.retry_after >= 1
        thread.model.allowed.release(100)
        assert [await texts(one) for one in streams] == [{0: "bcd"}] * 4
        await draining
        assert is_empty(thread)


@in_loop
async def test_draining_fails_what_takes_longer_than_its_grace():
    async with running(shut=True) as thread:
        streams = [await submit(thread, "a", 3, str(n)) for n in range(3)]
        await thread.drain(0.05)
        for stream in streams:
            with pytest.raises(ShuttingDown, match="could not finish"):
                await texts(stream)
        thread.model.allowed.release(100)
        await wait_until(lambda: is_empty(thread))


@in_loop
async def test_a_request_that_is_being_validated_when_draining_begins_is_refused():
    async with running() as thread:
        begun, proceed = threading.Event(), threading.Event()
        submitting = asyncio.ensure_future(submit(thread, [lambda: begun.set() or (proceed.wait(PATIENCE) and "a")]))
        await wait_until(begun.is_set)
        draining = asyncio.ensure_future(thread.drain(PATIENCE))
        await asyncio.sleep(0)
        proceed.set()
        with pytest.raises(ShuttingDown):
            await submitting
        await draining
        assert is_empty(thread)
