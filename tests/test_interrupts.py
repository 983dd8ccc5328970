"""Ctrl-C in any stage of a call: no request and no token is lost or doubled, and nothing is left behind."""

import signal

import pytest

from helpers import SamplingParams
from helpers.interrupts import deferred
from tests.support.context_runner import Caller, check_nothing_is_left, check_outputs, check_state

STAGES = {
    "a policy": lambda engine: (engine.scheduler.policy, "order"),
    "the plan": lambda engine: (engine.scheduler, "schedule"),
    "the pass": lambda engine: (engine.runner, "run"),
    "the update": lambda engine: (engine.scheduler, "update"),
    "the outputs": lambda engine: (engine.outputs, "collect"),
    "an arrival": lambda engine: (engine.scheduler, "add"),
    "an end": lambda engine: (engine.scheduler, "finish"),
    "the prompt's check": lambda engine: (engine.validator, "validate"),
}


def disturb(owner, name: str, number: int, act=lambda: signal.raise_signal(signal.SIGINT)) -> list:
    """Do something before or after a method's call with this number; return a list that counts the calls."""
    method, calls = getattr(owner, name), []

    def disturbed(*args, **named):
        calls.append(name)
        if len(calls) == number + 1:
            act()
        result = method(*args, **named)
        if len(calls) == -number:
            act()
        return result

    setattr(owner, name, disturbed)
    return calls


def scenario(caller: Caller, call) -> None:
    for name, *request in (("a", [1, 2, 3], 6, 1), ("b", [4], 9, 3), ("c", [5, 6], 8, 1), ("d", [7], 4, 1)):
        call(caller.add, name, *request)
        call(caller.step)
    call(caller.abort, "c")


@pytest.mark.parametrize("num_blocks", [None, 9])
@pytest.mark.parametrize("number", [0, 2, -1, -3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_call_that_is_interrupted_loses_and_repeats_nothing(stage, number, num_blocks):
    caller, interrupts = Caller(num_blocks), []
    calls = disturb(*STAGES[stage](caller.engine), number)

    def call(function, *args):
        try:
            function(*args)
        except KeyboardInterrupt:
            interrupts.append(function)
            check_state(caller.engine)
            if function != caller.step:
                function(*args)  # it does nothing if the call was completed

    scenario(caller, call)
    while caller.engine.has_unfinished_requests():
        call(caller.step)
    assert len(interrupts) == 1 and len(calls) > abs(number)
    check_outputs(caller)
    check_nothing_is_left(caller.engine)


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_remains_of_an_interrupted_generate_or_stream(stage, number, way):
    caller = Caller(12)
    caller.add("other", [1, 2], 5)
    disturb(*STAGES[stage](caller.engine), number)
    with pytest.raises(KeyboardInterrupt):
        if way == "generate":
            caller.engine.generate([[3], [4, 5], [6]], SamplingParams(9))
        else:
            for prompt in ([3], [4, 5], [6]):
                list(caller.engine.stream(prompt, SamplingParams(9)))
    assert not caller.engine.outputs._subscribers and set(caller.engine.scheduler.requests) <= {"other"}
    caller.finish()
    check_outputs(caller)
    check_nothing_is_left(caller.engine)


def test_a_stream_that_is_closed_in_the_middle_of_an_iteration_leaves_at_its_end():
    """Python may close a stream that is no longer used at any time."""
    caller = Caller(12)
    stream = caller.engine.stream([3], SamplingParams(20, ignore_eos=True))
    next(stream)
    disturb(caller.engine.scheduler, "update", 2, stream.close)
    caller.add("other", [1, 2], 7)
    caller.finish()
    check_outputs(caller)
    check_nothing_is_left(caller.engine)


def test_a_second_interrupt_is_not_deferred():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred(), deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
