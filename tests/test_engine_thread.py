"""The thread between the event loop and the engine, without HTTP: what a client could hardly see or bring about.

The engine counts letters, so that all outputs are known in advance; a gate holds it in the middle of an iteration.
What clients get, whether they stay or leave, is in test_server.py and test_server_faults.py.
"""

import asyncio
import threading

import pytest

from helpers.server.http_errors import EngineFailed, QueueFull, ShuttingDown
from tests.support.gated_thread import in_loop, is_empty, running, submit, texts, wait_until
from tests.support.serving import PATIENCE

# --- a bounded queue ------------------------------------------------------------------------------------------------


@in_loop
async def test_places_are_taken_before_prompts_are_tokenized():
    """Otherwise any number of requests could wait for the tokenizer, only to be refused afterwards."""
    async with running(max_queue=1) as thread:
        validate, validated, proceed = thread.engine.validator.validate, [], threading.Event()

        def slow(prompt, params):
            if threading.current_thread().name.startswith("tokenizer"):
                validated.append(prompt)
                proceed.wait(PATIENCE)
            return validate(prompt, params)

        thread.engine.validator.validate = slow
        waiting = [asyncio.ensure_future(submit(thread, "a", 2, str(n))) for n in range(20)]
        await wait_until(lambda: validated and sum(future.done() for future in waiting) == 17)
        assert len(validated) == 1, "one after another"
        proceed.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert len(validated) == 3 and sum(isinstance(result, QueueFull) for result in results) == 17
        for result in results:
            if not isinstance(result, QueueFull):
                assert await texts(result) == {0: "bc"}
        assert is_empty(thread)


@in_loop
async def test_a_refused_or_abandoned_request_leaves_no_place_taken():
    async with running() as thread:
        for wrong in ("", "a" * 60, [99999]):
            with pytest.raises(ValueError):
                await submit(thread, [wrong])
        proceed = threading.Event()
        abandoned = asyncio.ensure_future(submit(thread, [lambda: proceed.wait(PATIENCE) and "a"]))
        await asyncio.sleep(0)
        assert thread.num_in_flight == 1
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        proceed.set()
        assert is_empty(thread)


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
async def test_draining_finishes_the_accepted_requests_within_its_grace_and_fails_the_others():
    async with running(shut=True) as thread:
        streams = [await submit(thread, "a", 3, str(n)) for n in range(4)]
        draining = asyncio.ensure_future(thread.drain(PATIENCE))
        await asyncio.sleep(0)
        thread.model.allowed.release(100)
        assert [await texts(stream) for stream in streams] == [{0: "bcd"}] * 4
        await draining
    async with running(shut=True) as thread:
        stream = await submit(thread, "a", 3)
        await thread.drain(0.05)
        with pytest.raises(ShuttingDown, match="could not finish"):
            await texts(stream)


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
