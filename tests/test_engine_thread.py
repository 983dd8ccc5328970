"""The thread between the event loop and the engine, without HTTP: what it accepts, delivers and cancels.

The engine counts letters, so that all outputs are known in advance; a gate holds it in the middle of an iteration.
"""

import asyncio
import threading
import time

import pytest
from conftest import CountingModel, letter_tokenizer

from helpers import Engine, EngineConfig, SamplingParams
from helpers.server.engine_thread import EngineThread
from helpers.server.errors import QueueFull
from helpers.server.response_stream import choice_name
from helpers.server.snapshot import MAX_NAMED
from tests.support.gated_thread import in_loop, is_empty, running, submit, texts, wait_until
from tests.support.serving import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")


# --- outputs --------------------------------------------------------------------------------------------------------


@in_loop
async def test_outputs_come_token_by_token():
    async with running() as thread:
        stream, token_ids = await thread.submit("r", ["abc"], SamplingParams(3))
        assert token_ids == [[1, 2, 3]]
        outputs = [(choice, output.new_text, output.finish_reason) async for choice, output in stream]
        assert outputs == [(0, "d", None), (0, "e", None), (0, "f", "length")]
        assert stream.num_unfinished == 0 and is_empty(thread)


@in_loop
async def test_choices_are_numbered_prompt_by_prompt():
    async with running(max_queue=10) as thread:
        assert await texts(await submit(thread, ["ab", "d", "f"], 2)) == {0: "cd", 1: "ef", 2: "gh"}
        # The logits are 1 for the next letter and 0 for nine others, so min_p leaves only the next letter to draw.
        drawn = await submit(thread, ["ab", "d"], 2, n=3, temperature=1, min_p=1.0)
        assert await texts(drawn) == {0: "cd", 1: "cd", 2: "cd", 3: "ef", 4: "ef", 5: "ef"}
        finished = [output for outputs, _ in thread.seen for output in outputs if output.finish_reason]
        names = {choice_name((one.request_id, one.index)) for one in finished if one.new_text in ("d", "f")}
        assert names == {"r", "r/1", "r/2", "r/3", "r/4", "r/5"}
        assert is_empty(thread)


def test_the_names_of_choices():
    assert choice_name("cmpl-1") == choice_name(("cmpl-1", 0)) == "cmpl-1"
    assert choice_name(("cmpl-1", 2)) == "cmpl-1/2"
    assert choice_name("cmpl-1/4") == "cmpl-1/4" and choice_name(("cmpl-1/4", 1)) == "cmpl-1/5"


@in_loop
async def test_a_function_can_make_a_prompt_off_the_event_loop():
    async with running() as thread:
        names = []

        def prompt():
            names.append(threading.current_thread().name)
            return "cd"

        assert await texts(await submit(thread, [prompt, [5, 6]], 2)) == {0: "ef", 1: "gh"}
        assert names[0].startswith("tokenizer")


# --- a bounded queue ------------------------------------------------------------------------------------------------


@in_loop
async def test_as_many_sequences_are_accepted_as_there_are_rows_and_places_in_the_queue():
    async with running(shut=True, max_queue=3) as thread:
        accepted = [await submit(thread, "a", 2, str(n)) for n in range(3)]
        accepted.append(await submit(thread, ["a", "b"], 2, "3"))
        assert thread.num_in_flight == 5
        for prompts in ("a", ["a", "b"]):
            with pytest.raises(QueueFull) as caught:
                await submit(thread, prompts, 2, "more")
            assert 1 <= caught.value.retry_after <= 60 and "5 of at most 5 sequences" in str(caught.value)
        with pytest.raises(ValueError, match=r"asks for 6 sequences, .* holds at most 5 at a time: split"):
            await submit(thread, ["a"] * 6, 2, "never")
        assert thread.num_in_flight == 5
        thread.model.allowed.release(100)
        assert [await texts(one) for one in accepted] == [{0: "bc"}] * 3 + [{0: "bc", 1: "cd"}]
        assert await texts(await submit(thread, "a", 2, "more")) == {0: "bc"}
        assert is_empty(thread)


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
        await wait_until(lambda: validated and sum(one.done() for one in waiting) == 17)
        assert len(validated) == 1, "one after another"
        proceed.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert len(validated) == 3 and sum(isinstance(one, QueueFull) for one in results) == 17
        for one in results:
            if not isinstance(one, QueueFull):
                assert await texts(one) == {0: "bc"}
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


@in_loop
async def test_retry_after_is_the_usual_time_between_two_finished_sequences():
    async with running() as thread:
        assert thread.retry_after() == 1
        for gap, seconds in ((0.1, 1), (2.5, 3), (500, 60)):
            thread._finish_times.clear()
            thread._finish_times.extend([10 + gap * number for number in range(9)] + [10**6])
            thread._retry_after = None
            assert thread.retry_after() == seconds


@in_loop
async def test_retry_after_considers_only_times_when_all_rows_were_taken():
    async with running() as thread:
        thread._finish_times.extend([0.0, 30.0, 60.0])
        assert thread.retry_after() == 30
        await texts(await submit(thread))  # alone on two rows, so the time since the previous one says nothing
        assert thread.retry_after() == 1


def test_the_queue_cannot_have_a_negative_number_of_places():
    with pytest.raises(ValueError, match=r"at least 0, .* not -1"):
        EngineThread(Engine(CountingModel(), letter_tokenizer(), EngineConfig(execution="padded")), -1)


# --- cancelling -----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_cancelled_request_has_left_before_the_next_iteration():
    async with running(shut=True) as thread:
        leaving, staying = await submit(thread, "ab", 9, "leaving"), await submit(thread, "c", 4, "staying")
        for _ in range(2):
            thread.model.allowed.release()
        with leaving:
            assert (await anext(leaving))[1].new_text == "c"
        assert thread.stream_of("leaving") is None and thread.num_in_flight == 2
        thread.model.allowed.release(100)
        assert await texts(staying) == {0: "defg"}
        await wait_until(lambda: is_empty(thread))
        row_steps = [row for one in thread.engine.trace.passes for row in one.row_steps]
        assert 1 <= sum(row.new_tokens for row in row_steps if row.request_id == "leaving") <= 3
        ends = [output.finish_reason for outputs, _ in thread.seen for output in outputs if output.finish_reason]
        assert sorted(ends) == ["abort", "length"]


@in_loop
async def test_a_client_that_has_read_everything_cancels_nothing():
    async with running() as thread:
        stream = await submit(thread)
        await texts(stream)
        thread.engine.abort_request = None  # calling it would be an error
        with stream:
            pass
        assert await texts(await submit(thread)) == {0: "cde"}


# --- what observers see, and an idle thread ---------------------------------------------------------------------------


@in_loop
async def test_observers_see_every_iteration_once_and_the_queue():
    async with running(shut=True, max_queue=10) as thread:
        streams = [await submit(thread, "ab", 2 + n, str(n)) for n in range(5)]
        thread.model.allowed.release(100)  # not before: a request that ended early would leave no queue to be seen
        await asyncio.gather(*map(texts, streams))
        seen = [one for _, snapshot in thread.seen for one in snapshot.passes]
        assert seen == list(thread.engine.trace.passes)
        assert max(snapshot.num_waiting for _, snapshot in thread.seen) >= 1
        assert all(len(snapshot.waiting) == snapshot.num_waiting for _, snapshot in thread.seen)
        assert max(snapshot.num_running for _, snapshot in thread.seen) == 2
        last = thread.seen[-1][1]
        assert (last.waiting, last.num_waiting, last.num_running) == ((), 0, 0)
        assert (last.blocks_used, last.blocks_cached) == (0, 0)
        tokens = sum(len(output.new_token_ids) for outputs, _ in thread.seen for output in outputs)
        assert tokens == 2 + 3 + 4 + 5 + 6 == sum(row.new_tokens for one in seen for row in one.row_steps)


@in_loop
async def test_a_snapshot_of_a_long_queue_has_its_length_and_its_first_names():
    async with running(shut=True, max_queue=3 * MAX_NAMED) as thread:
        stream = await submit(thread, ["a"] * (2 + 3 * MAX_NAMED), 1)
        thread.model.allowed.release(10**6)
        await texts(stream)
        longest = max((snapshot for _, snapshot in thread.seen), key=lambda snapshot: snapshot.num_waiting)
        assert longest.num_waiting > MAX_NAMED == len(longest.waiting)
        first = 2 + 3 * MAX_NAMED - longest.num_waiting
        assert [choice_name(label) for label in longest.waiting] == [f"r/{first + n}" for n in range(MAX_NAMED)]


@in_loop
async def test_steps_of_several_passes_are_seen_whole():
    """Padded execution prefills new requests in a pass of their own."""
    async with running(max_queue=10, trace_length=2) as thread:
        await asyncio.gather(*[texts(await submit(thread, "ab", 3, str(n))) for n in range(5)])
        starts = [one.start for _, snapshot in thread.seen for one in snapshot.passes]
        assert starts == sorted(set(starts)) and len(thread.engine.trace.passes) == 2
        tokens = [row.new_tokens for _, seen in thread.seen for one in seen.passes for row in one.row_steps]
        assert sum(tokens) == 15


@in_loop
async def test_a_thread_with_nothing_to_do_makes_no_steps():
    async with running() as thread:
        await texts(await submit(thread))
        steps, rounds, empty_inbox = thread.engine.steps, [], thread._empty_inbox
        thread._empty_inbox = lambda wait: rounds.append(wait) or empty_inbox(wait)
        for number in range(3):
            thread._inbox.put(lambda: None)  # wakes the thread
            await wait_until(lambda number=number: len(rounds) > number)
        assert thread.engine.steps == steps and set(rounds) == {True}, "it does not even poll its inbox"
        assert len(rounds) <= 4, "one per task; the thread may not yet have waited when the first one came"


@in_loop
async def test_slow_motion_takes_the_least_time_per_iteration_and_can_be_ended():
    async with running(pace=0.05) as thread:
        start = time.perf_counter()
        await texts(await submit(thread, "a", 4))
        assert time.perf_counter() - start >= 3 * 0.05
        thread.pace = 1.0
        stream = await submit(thread, "a", 4)
        assert (await anext(stream))[1].new_text == "b"
        thread.pace = 0
        assert await texts(stream) == {0: "cde"}
