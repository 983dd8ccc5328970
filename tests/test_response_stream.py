"""A response's outputs while its client reads late or never: nothing is lost, and what waits is never more than it."""

import asyncio
import tracemalloc

import pytest

from helpers.engine import OutputDelta
from helpers.server.errors import DeadlinePassed
from helpers.server.response_stream import MAX_SEPARATE
from tests.gated_thread import in_loop, is_empty, running, submit, wait_until
from tests.serving import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")


@in_loop
async def test_a_client_that_has_fallen_behind_gets_the_outputs_of_a_choice_at_once():
    async with running(context=400) as thread:
        settings = {"ignore_eos": True, "logprobs": 2, "n": 2, "temperature": 1, "min_p": 1.0}
        stream = await submit(thread, ["a", "b"], 300, **settings)
        await wait_until(lambda: is_empty(thread))
        outputs = [one async for one in stream]
        assert sorted(choice for choice, _ in outputs) == [0, 1, 2, 3]
        for choice, output in outputs:
            first = 2 if choice < 2 else 3
            assert output.new_token_ids == [(first + number) % 10 for number in range(300)]
            assert output.new_text.startswith("bcdefghi"[first - 2 :]) and output.new_text.count("b") == 30
            assert [max(one, key=one.get) for one in output.new_logprobs] == output.new_token_ids
            assert (output.num_tokens, output.finish_reason) == (300, "length")


@in_loop
async def test_a_client_that_is_only_a_little_late_gets_every_output_by_itself():
    async with running(context=400) as thread:
        stream = await submit(thread, "a", MAX_SEPARATE, ignore_eos=True)
        await wait_until(lambda: is_empty(thread))
        outputs = [output async for _, output in stream]
        assert [len(output.new_token_ids) for output in outputs] == [1] * MAX_SEPARATE
        assert OutputDelta.join(outputs).new_token_ids == [(2 + number) % 10 for number in range(MAX_SEPARATE)]


async def bytes_unread(max_tokens: int, **settings) -> int:
    """Return the memory that a response of this many tokens takes while its client does not read it."""
    async with running(context=max_tokens + 20, trace_length=1, **settings) as thread:
        thread.observers.clear()
        await (await submit(thread, "a", 20)).__anext__()
        tracemalloc.start()
        try:
            stream = await submit(thread, "a", max_tokens, ignore_eos=True, logprobs=3, id="unread")
            await wait_until(lambda: is_empty(thread))
            await (await submit(thread, "a", 1)).__anext__()  # the engine forgets a sequence in the next iteration
            with_stream, _ = tracemalloc.get_traced_memory()
            await stream.__anext__()
            stream.fail(RuntimeError())  # drops the rest
            without, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return with_stream - without


@in_loop
async def test_the_memory_of_an_unread_response_grows_with_its_tokens_not_with_their_square():
    short, long = await bytes_unread(300), await bytes_unread(1200)
    assert 3 < long / short < 6, (short, long)
    assert 300 < long / 1200 < 900, "bytes per token, with three or four log-probabilities each"


@in_loop
async def test_a_deadline_ends_a_request_whose_client_does_not_read():
    async with running(shut=True, context=400) as thread:
        stream = await submit(thread, "a", 300, ignore_eos=True, deadline=0.2)
        thread.model.allowed.release(3)
        await asyncio.sleep(0)
        await wait_until(lambda: stream._error is not None)
        thread.model.allowed.release()
        await wait_until(lambda: is_empty(thread))
        assert not stream._outputs, "what was unread is dropped"
        with pytest.raises(DeadlinePassed):
            await anext(stream)


@in_loop
async def test_the_deadline_of_a_response_that_was_read_in_time_never_fires():
    async with running() as thread:
        stream = await submit(thread, "a", 3, deadline=PATIENCE)
        with stream:
            assert [output.new_text async for _, output in stream] == ["b", "c", "d"]
        assert stream._timer.cancelled()
