"""The thread between the event loop and the engine, without HTTP: what is accepted, what comes back, what is left.

The engine counts letters, so that all answers can be foretold; a gate holds it in the middle of an iteration.
"""

import asyncio
import functools
import threading
import time
from contextlib import asynccontextmanager

import pytest
from conftest import CountingModel, letter_tokenizer

from helpers import Engine, EngineConfig, RequestOutput, SamplingParams
from helpers.server.engine_thread import (
    DeadlinePassed,
    EngineFailed,
    EngineThread,
    QueueFull,
    ShuttingDown,
    name_of,
)
from tests.serving import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")


class Gated(CountingModel):
    """Waits in every forward pass until it is let through."""

    def __init__(self, shut: bool, context: int):
        super().__init__(context, eos_token_id=99)
        self.begun, self.allowed = threading.Semaphore(0), threading.Semaphore(0 if shut else 10**6)
        self.faults: list[BaseException] = []

    def forward(self, input_ids, position_ids, attention_mask, past_key_values):
        self.begun.release()
        assert self.allowed.acquire(timeout=PATIENCE)
        if self.faults:
            raise self.faults.pop()
        return super().forward(input_ids, position_ids, attention_mask, past_key_values)


@asynccontextmanager
async def running(shut: bool = False, max_queue: int = 4, pace: float = 0.0, context: int = 40, **config):
    """A thread with an engine of two rows that says the next letter."""
    model = Gated(shut, context)
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
        assert not thread._thread.is_alive()


def in_loop(test):
    """Run an asynchronous test; what waits for something that never comes ends in an error."""

    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), PATIENCE))

    return run


async def submit(thread, prompt="ab", max_tokens=3, id="r", deadline=None, **params):
    prompts = prompt if isinstance(prompt, list) else [prompt]
    answers, _ = await thread.submit(id, prompts, SamplingParams(max_tokens, **params), deadline=deadline)
    return answers


async def texts(answers) -> dict[int, str]:
    last = {}
    with answers:
        async for choice, output in answers:
            last[choice] = output.text
    return last


async def eventually(true) -> None:
    while not true():
        await asyncio.sleep(0.002)


def empty(thread) -> bool:
    engine = thread.engine
    return not (
        thread.open or thread._listeners or thread._unfinished or engine.waiting or engine.running or engine._unfinished
    )


# --- answers --------------------------------------------------------------------------------------------------------


@in_loop
async def test_answers_come_token_by_token():
    async with running() as thread:
        answers, prompt_tokens = await thread.submit("r", ["abc"], SamplingParams(3))
        assert prompt_tokens == 3
        outputs = [(choice, output.new_text, output.text, output.finish_reason) async for choice, output in answers]
        assert outputs == [(0, "d", "d", None), (0, "e", "de", None), (0, "f", "def", "length")]
        assert answers.unfinished == 0 and empty(thread)


@in_loop
async def test_choices_are_numbered_prompt_by_prompt():
    async with running(max_queue=10) as thread:
        assert await texts(await submit(thread, ["ab", "d", "f"], 2)) == {0: "cd", 1: "ef", 2: "gh"}
        # The logits are 1 for the next letter and 0 for nine others: one of many is drawn, so min_p leaves one.
        drawn = await submit(thread, ["ab", "d"], 2, n=3, temperature=1, min_p=1.0)
        assert await texts(drawn) == {0: "cd", 1: "cd", 2: "cd", 3: "ef", 4: "ef", 5: "ef"}
        finished = [output for outputs, _ in thread.seen for output in outputs if output.finish_reason]
        names = {name_of((one.request_id, one.index)) for one in finished if one.text in ("cd", "ef")}
        assert names == {"r", "r/1", "r/2", "r/3", "r/4", "r/5"}
        assert empty(thread)


def test_names():
    assert name_of("cmpl-1") == name_of(("cmpl-1", 0)) == "cmpl-1"
    assert name_of(("cmpl-1", 2)) == "cmpl-1/2"
    assert name_of("cmpl-1/4") == "cmpl-1/4" and name_of(("cmpl-1/4", 1)) == "cmpl-1/5"


@in_loop
async def test_a_prompt_may_be_made_where_it_costs_the_loop_nothing():
    async with running() as thread:
        names = []

        def prompt():
            names.append(threading.current_thread().name)
            return "cd"

        assert await texts(await submit(thread, [prompt, [5, 6]], 2)) == {0: "ef", 1: "gh"}
        assert names[0].startswith("tokenizing")


# --- a bounded queue ------------------------------------------------------------------------------------------------


@in_loop
async def test_as_many_answers_as_rows_and_places_are_accepted():
    async with running(shut=True, max_queue=3) as thread:
        accepted = [await submit(thread, "a", 2, str(n)) for n in range(3)]
        accepted.append(await submit(thread, ["a", "b"], 2, "3"))
        assert thread.open == 5
        for prompts in ("a", ["a", "b"]):
            with pytest.raises(QueueFull) as caught:
                await submit(thread, prompts, 2, "more")
            assert 1 <= caught.value.retry_after <= 60 and "5 answers already" in str(caught.value)
        with pytest.raises(ValueError, match="asks for 6 answers, and this server works on 5 at most: split it"):
            await submit(thread, ["a"] * 6, 2, "never")
        assert thread.open == 5
        thread.model.allowed.release(100)
        assert [await texts(one) for one in accepted] == [{0: "bc"}] * 3 + [{0: "bc", 1: "cd"}]
        assert await texts(await submit(thread, "a", 2, "more")) == {0: "bc"}
        assert empty(thread)


@in_loop
async def test_places_are_taken_before_tokens_are_made():
    """Else any number of requests could wait for that, and then be refused all the same."""
    async with running(max_queue=1) as thread:
        check, checked, go_on = thread.engine.admission.check, [], threading.Event()

        def slow(prompt, params):
            if threading.current_thread().name.startswith("tokenizing"):
                checked.append(prompt)
                go_on.wait(PATIENCE)
            return check(prompt, params)

        thread.engine.admission.check = slow
        waiting = [asyncio.ensure_future(submit(thread, "a", 2, str(n))) for n in range(20)]
        await eventually(lambda: sum(one.done() for one in waiting) == 17)
        assert len(checked) == 1, "one after another"
        go_on.set()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert len(checked) == 3 and sum(isinstance(one, QueueFull) for one in results) == 17
        for one in results:
            if not isinstance(one, QueueFull):
                assert await texts(one) == {0: "bc"}
        assert empty(thread)


@in_loop
async def test_whoever_is_refused_or_gives_up_leaves_no_place_taken():
    async with running() as thread:
        for wrong in ("", "a" * 60, [99999]):
            with pytest.raises(ValueError):
                await submit(thread, [wrong])
        giving_up = asyncio.ensure_future(submit(thread, [lambda: time.sleep(0.05) or "a"]))
        await asyncio.sleep(0)
        assert thread.open == 1
        giving_up.cancel()
        await asyncio.gather(giving_up, return_exceptions=True)
        assert empty(thread)


@in_loop
async def test_retry_after_is_the_usual_time_between_two_ends():
    async with running() as thread:
        assert thread.retry_after() == 1
        for gap, seconds in ((0.1, 1), (2.5, 3), (500, 60)):
            thread._ended.clear()
            thread._ended.extend([10 + gap * number for number in range(9)] + [10**6])
            assert thread.retry_after() == seconds


def test_a_queue_has_at_least_no_places():
    with pytest.raises(ValueError, match="at least 0, not -1"):
        EngineThread(Engine(CountingModel(), letter_tokenizer(), EngineConfig(execution="padded")), -1)


# --- taking back ----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_request_that_is_taken_back_has_left_before_the_next_iteration():
    async with running(shut=True) as thread:
        leaving, staying = await submit(thread, "ab", 9, "leaving"), await submit(thread, "c", 4, "staying")
        for _ in range(2):
            thread.model.allowed.release()
        with leaving:
            assert (await anext(leaving))[1].text == "c"
        assert thread.listener("leaving") is None and thread.open == 2
        thread.model.allowed.release(100)
        assert await texts(staying) == {0: "defg"}
        await eventually(lambda: empty(thread))
        mine = [slot for one in thread.engine.trace.iterations for slot in one.slots if slot.request_id == "leaving"]
        assert 1 <= sum(slot.new_tokens for slot in mine) <= 3
        ends = [output.finish_reason for outputs, _ in thread.seen for output in outputs if output.finish_reason]
        assert sorted(ends) == ["abort", "length"]


@in_loop
async def test_who_has_heard_the_end_takes_nothing_back():
    async with running() as thread:
        answers = await submit(thread)
        await texts(answers)
        thread.engine.abort_request = None  # would be an error
        with answers:
            pass
        assert await texts(await submit(thread)) == {0: "cde"}


@in_loop
async def test_a_deadline_counts_from_acceptance():
    async with running(shut=True) as thread:
        late, patient = await submit(thread, "a", 3, "late", deadline=0.05), await submit(thread, "b", 3, "patient")
        with pytest.raises(DeadlinePassed, match=r"its deadline of 0.05 s"):
            await texts(late)
        thread.model.allowed.release(100)
        assert await texts(patient) == {0: "cde"}
        await eventually(lambda: empty(thread))


# --- faults ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_error_reaches_those_it_concerns():
    async with running(shut=True) as thread:
        one, other, third = [await submit(thread, "ab", 3, str(n)) for n in range(3)]
        thread.model.faults = [MemoryError("full")]
        thread.model.allowed.release(100)
        concerned = 0
        for answers in (one, other, third):
            try:
                assert await texts(answers) == {0: "cde"}
            except EngineFailed as error:
                assert str(error) == "MemoryError: full"
                concerned += 1
        assert 1 <= concerned <= 2
        await eventually(lambda: empty(thread))


@in_loop
async def test_what_the_engine_refuses_late_is_an_error_of_that_request_alone():
    """It has been checked before; what can still go wrong costs nobody else anything."""
    async with running() as thread:
        add = thread.engine.add_request

        def refusing(token_ids, params, engine_id, priority):
            if engine_id == "bad":
                raise ValueError("no room")
            return add(token_ids, params, engine_id, priority)

        thread.engine.add_request = refusing
        bad = await submit(thread, "a", 2, "bad", n=2, temperature=1)
        good = await submit(thread, "a", 2, "good")
        with pytest.raises(EngineFailed, match="ValueError: no room"):
            await texts(bad)
        assert await texts(good) == {0: "bc"}
        await eventually(lambda: empty(thread))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@in_loop
async def test_a_thread_that_dies_says_so_to_everybody():
    async with running(shut=True) as thread:
        requests = [await submit(thread, "a", 3, str(n)) for n in range(4)]
        thread.model.faults = [SystemExit("over")]
        thread.model.allowed.release(100)
        for answers in requests:
            with pytest.raises(EngineFailed, match="The engine has stopped: SystemExit: over"):
                await texts(answers)
        with pytest.raises(EngineFailed, match="has to be started anew"):
            await submit(thread)
        assert not thread.alive and thread.died and thread.open == 0
        await asyncio.wait_for(thread.drain(PATIENCE), 5)


@in_loop
async def test_a_thread_that_is_dying_accepts_nobody(monkeypatch):
    """What it has to say of its error takes a moment; a request that came in then would wait for ever."""
    dying, die = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda *_: dying.set() or die.wait(PATIENCE))
    async with running() as thread:
        thread.engine.step = lambda: (_ for _ in ()).throw(GeneratorExit)
        with pytest.raises(EngineFailed):
            await texts(await submit(thread))
        await eventually(dying.is_set)
        assert thread._thread.is_alive()
        try:
            with pytest.raises(EngineFailed):
                await submit(thread)
        finally:
            die.set()


@in_loop
async def test_whoever_is_cancelled_while_a_token_arrives_is_cancelled():
    """asyncio.wait_for would lose it (Python 3.11), and wait for a request that nobody works on any more."""
    for deadline in (None, 100.0):
        async with running(shut=True) as thread:
            answers = await submit(thread, max_tokens=5, deadline=deadline)
            reading = asyncio.ensure_future(texts(answers))
            await asyncio.sleep(0.01)
            answers.put(RequestOutput("r", "ab", "c", [1], None, new_token_ids=[1]))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading], timeout=5)
            assert reading.done()


@in_loop
async def test_retry_after_looks_only_at_times_when_all_rows_were_taken():
    async with running() as thread:
        thread._ended.extend([0.0, 30.0, 60.0])
        assert thread.retry_after() == 30
        await texts(await submit(thread))  # alone on two rows: how long ago the one before ended says nothing
        assert thread.retry_after() == 1


# --- the end --------------------------------------------------------------------------------------------------------


@in_loop
async def test_draining_finishes_what_was_accepted():
    async with running(shut=True) as thread:
        requests = [await submit(thread, "a", 3, str(n)) for n in range(4)]
        draining = asyncio.ensure_future(thread.drain(PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown) as caught:
            await submit(thread)
        assert caught.value.retry_after >= 1
        thread.model.allowed.release(100)
        assert [await texts(one) for one in requests] == [{0: "bcd"}] * 4
        await draining
        assert empty(thread)


@in_loop
async def test_draining_refuses_what_takes_longer():
    async with running(shut=True) as thread:
        requests = [await submit(thread, "a", 3, str(n)) for n in range(3)]
        await thread.drain(0.05)
        for answers in requests:
            with pytest.raises(ShuttingDown, match="could not finish"):
                await texts(answers)
        thread.model.allowed.release(100)
        await eventually(lambda: empty(thread))


@in_loop
async def test_whoever_is_being_checked_when_draining_begins_is_refused():
    async with running() as thread:
        begun, go_on = threading.Event(), threading.Event()
        asking = asyncio.ensure_future(submit(thread, [lambda: begun.set() or (go_on.wait(PATIENCE) and "a")]))
        await eventually(begun.is_set)
        draining = asyncio.ensure_future(thread.drain(PATIENCE))
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(ShuttingDown):
            await asking
        await draining
        assert empty(thread)


# --- what observers see, and what the thread does when there is nothing to do -----------------------------------------


@in_loop
async def test_observers_see_every_iteration_once_and_who_waits():
    async with running(max_queue=10) as thread:
        await asyncio.gather(*[texts(await submit(thread, "ab", 2 + n, str(n))) for n in range(5)])
        seen = [one for _, snapshot in thread.seen for one in snapshot.iterations]
        assert seen == list(thread.engine.trace.iterations)
        assert max(len(snapshot.waiting) for _, snapshot in thread.seen) >= 1
        assert max(len(snapshot.running) for _, snapshot in thread.seen) == 2
        last = thread.seen[-1][1]
        assert (last.waiting, last.running, last.blocks_used, last.blocks_cached) == ((), (), 0, 0)
        tokens = sum(len(output.new_token_ids) for outputs, _ in thread.seen for output in outputs)
        assert tokens == 2 + 3 + 4 + 5 + 6 == sum(slot.new_tokens for one in seen for slot in one.slots)


@in_loop
async def test_steps_of_several_passes_are_seen_whole():
    """Padded execution reads newcomers in a pass of their own."""
    async with running(max_queue=10, trace_length=2) as thread:
        await asyncio.gather(*[texts(await submit(thread, "ab", 3, str(n))) for n in range(5)])
        starts = [one.start for _, snapshot in thread.seen for one in snapshot.iterations]
        assert starts == sorted(set(starts)) and len(thread.engine.trace.iterations) == 2
        tokens = [slot.new_tokens for _, seen in thread.seen for one in seen.iterations for slot in one.slots]
        assert sum(tokens) == 15


@in_loop
async def test_a_thread_with_nothing_to_do_does_nothing():
    async with running() as thread:
        await texts(await submit(thread))
        steps = thread.engine.steps
        await asyncio.sleep(0.1)
        assert thread.engine.steps == steps and thread._inbox.empty()


@in_loop
async def test_slow_motion_takes_at_least_so_long_and_can_be_ended():
    async with running(pace=0.05) as thread:
        start = time.perf_counter()
        await texts(await submit(thread, "a", 4))
        assert time.perf_counter() - start >= 3 * 0.05
        thread.pace = 1.0
        answers = await submit(thread, "a", 4)
        await anext(answers)
        thread.pace = 0
        assert await texts(answers) == {0: "bcde"}
