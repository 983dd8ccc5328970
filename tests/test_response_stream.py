"""A response's outputs while its client reads late or never: nothing is lost, and what waits is never more than it."""

import asyncio

import pytest

from helpers.server import output_budget
from helpers.server.http_errors import DeadlinePassed, QueueFull
from helpers.server.output_delta import OutputDelta
from tests.support.gated_thread import in_loop, is_empty, running, submit, texts, wait_until
from tests.support.serving import PATIENCE


@in_loop
async def test_a_late_client_gets_every_output_by_itself_and_they_join_to_the_whole():
    async with running(context=400) as thread:
        settings = {"ignore_eos": True, "logprobs": 2, "n": 2, "temperature": 1, "min_p": 1.0}
        stream = await submit(thread, ["a", "b"], 100, **settings)
        await wait_until(lambda: is_empty(thread))
        outputs = [pair async for pair in stream]
        assert [len(output.new_token_ids) for _, output in outputs] == [1] * 400
        for choice in range(4):
            output = OutputDelta.join([output for number, output in outputs if number == choice])
            first = 2 if choice < 2 else 3
            assert output.new_token_ids == [(first + number) % 10 for number in range(100)]
            assert output.new_text.startswith("bcdefghi"[first - 2 :])
            assert [max(scores, key=scores.get) for scores in output.new_logprobs] == output.new_token_ids
            assert (output.num_tokens, output.finish_reason) == (100, "length")


@in_loop
async def test_a_waiting_reader_is_not_woken_for_what_is_taken_and_gets_everything_else_in_order():
    async with running(shut=True, context=400) as thread:
        stream, taken = await submit(thread, "a", 6), []

        def take(choice, output):
            taken.append(output.new_token_ids)
            return output.new_token_ids != [5]

        stream.take = take
        thread.model.allowed.release(1)
        await wait_until(lambda: stream._unread)
        assert not taken, "the reader does not wait yet"
        assert (await anext(stream))[1].new_token_ids == [2]
        reading = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: stream._is_awaited)
        thread.model.allowed.release(2)
        await wait_until(lambda: taken == [[3], [4]])
        assert not reading.done()
        for number in (5, 6):  # before the reader runs
            stream.put(OutputDelta(stream.engine_ids[0], 0, "", [number], None, number - 1, None))
        assert [(await each)[1].new_token_ids for each in (reading, anext(stream))] == [[5], [6]] and taken[2:] == [[5]]


@in_loop
async def test_an_error_while_an_output_is_taken_ends_its_response_and_no_other():
    async with running(shut=True, context=400) as thread:
        bad, good = await submit(thread, "a", 9), await submit(thread, "b", 9, id="good")
        bad.take, reading = lambda *_: 1 / 0, asyncio.ensure_future(anext(bad))
        await wait_until(lambda: bad._is_awaited)
        thread.model.allowed.release(20)
        with pytest.raises(ZeroDivisionError):
            await reading
        assert await texts(good) == {0: "cdefghia"}
        await wait_until(lambda: is_empty(thread))


@in_loop
async def test_large_responses_that_are_not_read_leave_no_room_for_more_of_them_but_for_small_ones(monkeypatch):
    monkeypatch.setattr(output_budget, "MAX_VALUES", 4000)
    async with running(context=400, max_queue=20) as thread:
        large = {"max_tokens": 100, "ignore_eos": True, "logprobs": 3}  # 5 values for each token
        unread = [await submit(thread, ["a"] * 4, id="first", **large)]
        await wait_until(lambda: is_empty(thread))
        unread.append(await submit(thread, ["a"] * 3, id="second", **large))
        with pytest.raises(QueueFull, match=r"3500 tokens and .* not been read, and this one may have 1500"):
            await submit(thread, ["a"] * 3, id="third", **large)
        assert thread.num_in_flight <= 3
        assert len(await texts(await submit(thread, ["a"] * 2, id="small", **large))) == 2
        with pytest.raises(ValueError, match=r"may have 4500 tokens and log-probabilities, .* at most 4000 at a time"):
            await submit(thread, ["a"] * 9, id="too large", **large)
        with unread.pop(0):
            pass  # its client leaves
        assert len(await texts(await submit(thread, ["a"] * 3, id="third", **large))) == 3
        unread.clear()  # a response that was lost before it began to be read
        await wait_until(lambda: is_empty(thread))
        assert thread.output_budget.num_reserved == 0


@in_loop
async def test_a_deadline_ends_a_request_whose_client_does_not_read_and_never_one_that_was_read_in_time():
    async with running(shut=True, context=400) as thread:
        stream = await submit(thread, "a", 300, ignore_eos=True, deadline=0.2)
        thread.model.allowed.release(3)
        await wait_until(lambda: stream._error is not None)
        thread.model.allowed.release(100)
        await wait_until(lambda: is_empty(thread))
        assert not stream._unread, "what was unread is dropped"
        with pytest.raises(DeadlinePassed):
            await anext(stream)
        stream = await submit(thread, "a", 3, deadline=PATIENCE)
        assert await texts(stream) == {0: "bcd"}
        assert stream._timer.cancelled()
