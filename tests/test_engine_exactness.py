"""The engine's claim: whatever the policy, whoever comes, goes or fails meanwhile, everybody gets its own tokens.

Hypothesis drives an engine of random settings with everything that can be done to one: requests are added, taken back
and streamed, others are generated in between, forward passes fail. Every single output is compared with what
`model.generate` gives the prompt alone. A sequence that breaks the claim is printed as code.
"""

import contextlib
import itertools
from collections import Counter

import pytest
from conftest import LONGEST, PROMPTS, alone, random_pair
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.batching import text_of
from helpers.scheduler import POLICIES

PAIRS = {"embedded": load_model, "gpt2": lambda: random_pair("gpt2"), "llama": lambda: random_pair("llama")}
REQUEST = st.tuples(st.sampled_from(PROMPTS), st.integers(1, LONGEST))


@st.composite
def configs(draw):
    rows = draw(st.sampled_from([4, 2, 5, 1, 3]))
    chunked = draw(st.booleans())
    return EngineConfig(
        max_batch_size=rows,
        max_tokens_per_step=draw(st.integers(8, 64)) if chunked else 128,  # a prompt has up to 80 bytes
        policy=draw(st.sampled_from(sorted(POLICIES))),
        mixed_batches=draw(st.booleans()),
        chunked_prefill=chunked,
        execution=draw(st.sampled_from(["padded", "auto"])),
        block_size=8,
        num_blocks=draw(st.sampled_from([16, None])),  # 16 hold the longest request and hardly anybody else
        prefix_caching=draw(st.booleans()),
    )


class ForwardFailed(Exception):
    pass


@contextlib.contextmanager
def failing(model, after: int):
    """After so many forward passes, the next one raises."""
    passes = itertools.count()

    def fail(*_):
        if next(passes) == after:
            raise ForwardFailed("on purpose")

    handle = model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


class EngineMachine(RuleBasedStateMachine):
    pair = staticmethod(load_model)

    @initialize(config=configs())
    def begin(self, config):
        self.model, self.tokenizer = self.pair()
        self.engine = Engine(self.model, self.tokenizer, config)
        step, steps = self.engine.step, itertools.count()

        def bounded():
            assert next(steps) < 3000, "somebody was lost, and is waited for"
            return step()

        self.engine.step = bounded
        self.asked: dict = {}  # id -> prompt, max_tokens
        self.outputs: dict = {}  # id -> the last output
        self.streams: dict = {}  # id -> iterator
        self.gone, self.may_fail = set(), set()  # taken back by closing a stream; in the queue while a pass failed

    # --- what can happen ---

    @rule(
        requests=st.lists(REQUEST, min_size=1, max_size=4),
        as_ids=st.booleans(),
        priority=st.integers(-2, 2),
        named=st.booleans(),
    )
    def add(self, requests, as_ids, priority, named):
        for prompt, max_tokens in requests:
            given = self.tokenizer(prompt)["input_ids"] if as_ids else prompt
            name = f"request {len(self.asked)}" if named else None
            id = self.engine.add_request(given, SamplingParams(max_tokens=max_tokens), name, priority)
            assert id not in self.asked and (not named or id == name)
            self.asked[id] = prompt, max_tokens

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.check(self.engine.step())

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        id = self.unfinished()[which % len(self.unfinished())]
        assert self.engine.abort_request(id)
        assert not self.engine.abort_request(id), "taken back twice"
        untold = [output for output in self.engine.step() if self.check([output]) and output.request_id == id]
        assert untold and untold[-1].finish_reason in ("abort", self.reason(id))

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=4), gap=st.integers(0, 3))
    def generate(self, requests, gap):
        params = [SamplingParams(max_tokens=max_tokens) for _, max_tokens in requests]
        arrivals = [gap * place for place in range(len(requests))][::-1]
        outputs = self.engine.generate([prompt for prompt, _ in requests], params, arrivals=arrivals)
        for request, output in zip(requests, outputs, strict=True):
            assert output.request_id not in self.asked
            self.asked[output.request_id] = request
            self.outputs[output.request_id] = output
            self.check_content(output)
            assert output.finish_reason == self.reason(output.request_id)

    @precondition(lambda self: len(self.streams) < 3)
    @rule(request=REQUEST)
    def stream(self, request):
        before = {answer.request_id for answer in self.engine._waiting}
        iterator = self.engine.stream(request[0], SamplingParams(max_tokens=request[1]))
        (id,) = {answer.request_id for answer in self.engine._waiting} - before
        self.asked[id], self.streams[id] = request, iterator

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2), pieces=st.integers(1, 10))
    def listen(self, which, pieces):
        id = list(self.streams)[which % len(self.streams)]
        heard = list(itertools.islice(self.streams[id], pieces))
        assert all(output.request_id == id for output in heard)
        self.check(heard)
        if len(heard) < pieces:
            assert self.finished(id), "a stream ended before its request"
            del self.streams[id]

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2))
    def close(self, which):
        id, iterator = list(self.streams.items())[which % len(self.streams)]
        del self.streams[id]
        iterator.close()
        self.gone.add(id)
        assert all(answer.request_id != id for answer in self.engine._waiting + self.engine._running)

    @precondition(lambda self: self.unfinished())
    @rule(after=st.integers(0, 2))
    def fail(self, after):
        self.may_fail = set(self.unfinished())
        with failing(self.engine.execution.model, after):
            outputs = self.engine.step()
        self.check(outputs)
        self.may_fail = set()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.check(self.engine.step())
        for id, iterator in self.streams.items():
            assert list(iterator) == [] and self.finished(id)
        assert all(self.finished(id) for id in self.asked), "somebody was lost"
        assert self.engine.step() == []
        self.check_nothing_is_left()
        self.check_the_trace()

    # --- what must hold ---

    def check(self, outputs) -> bool:
        for output in outputs:
            last = self.outputs.get(output.request_id)
            assert output.request_id not in self.gone, "nobody wants to know"
            assert last is None or last.finish_reason is None, "an output behind the end"
            assert output.token_ids == (last.token_ids if last else []) + output.new_token_ids
            assert output.text == (last.text if last else "") + output.new_text
            assert output.new_token_ids or output.finish_reason, "an output that says nothing"
            self.outputs[output.request_id] = output
            self.check_content(output)
        return True

    def check_content(self, output):
        prompt, max_tokens = self.asked[output.request_id]
        ids = alone(self.model, self.tokenizer, prompt, max_tokens)
        got = output.token_ids
        assert got == ids[: len(got)], f"request {output.request_id!r}"
        ended_by_itself = len(got) == len(ids)
        if output.finish_reason in ("stop", "length"):
            assert ended_by_itself and output.finish_reason == self.reason(output.request_id)
        elif output.finish_reason == "error":
            assert output.request_id in self.may_fail and output.error == "ForwardFailed: on purpose"
        else:
            assert output.finish_reason in (None, "abort") and not ended_by_itself
        assert (output.error is None) == (output.finish_reason != "error")
        words = got[:-1] if output.finish_reason == "stop" else got
        if output.finish_reason:
            assert output.text == text_of(words, self.tokenizer)
        else:
            assert text_of(words, self.tokenizer).startswith(output.text)
        assert len(output.token_times) == len(got)
        assert [output.arrival, *output.token_times] == sorted([output.arrival, *output.token_times])

    @invariant()
    def no_more_run_than_there_are_rows(self):
        if not hasattr(self, "engine"):
            return
        engine, config = self.engine, self.engine.config
        assert len(engine._running) <= config.max_batch_size
        assert not set(engine._running) & set(engine._waiting)
        assert all(not answer.finish_reason for answer in engine._running + engine._waiting)

    def check_nothing_is_left(self):
        execution = self.engine.execution
        assert self.engine._waiting == self.engine._running == self.engine._untold == []
        if hasattr(execution, "_decoding"):
            assert execution._decoding["request_ids"] == [] and not execution._reading and not execution._released
        else:
            assert execution.memory.used == 0

    def check_the_trace(self):
        """Rows and tokens agree with what came out; in padded execution, where nobody is preempted, to the token."""
        trace, told, read = self.engine.trace, {}, {}
        steps = Counter()
        for iteration in trace.iterations:
            steps[iteration.step] += sum(slot.tokens for slot in iteration.slots)
        assert max(steps.values(), default=0) <= self.engine.config.max_tokens_per_step
        assert all(len(iteration.slots) == self.engine.config.max_batch_size for iteration in trace.iterations)
        for slot in (slot for iteration in trace.iterations for slot in iteration.slots):
            told[slot.request_id] = told.get(slot.request_id, 0) + slot.new_tokens
            if slot.work == "prefill":
                read[slot.request_id] = read.get(slot.request_id, 0) + slot.tokens
        for id, output in self.outputs.items():
            if id not in self.gone:
                assert told.get(id, 0) == len(output.token_ids)
            if hasattr(self.engine.execution, "_decoding"):
                prompt = len(self.tokenizer(self.asked[id][0])["input_ids"])
                assert read.get(id, 0) == prompt if output.token_ids else read.get(id, 0) <= prompt

    # --- how ---

    def finished(self, id) -> bool:
        return id in self.gone or (id in self.outputs and self.outputs[id].finish_reason is not None)

    def unfinished(self) -> list:
        """Whose end nobody has heard yet, and who is still in the engine."""
        there = [answer.request_id for answer in self.engine._waiting + self.engine._running]
        left = [id for id in self.asked if not self.finished(id)]
        assert set(there) <= set(left)
        return [id for id in left if id in there]

    def reason(self, id) -> str:
        ids = alone(self.model, self.tokenizer, *self.asked[id])
        return "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"


def machine_of(family: str, examples: int):
    machine = type(f"Engine_{family}", (EngineMachine,), {"pair": staticmethod(PAIRS[family])})
    machine.TestCase.settings = settings(
        derandomize=True, deadline=None, max_examples=examples, stateful_step_count=25, phases=[Phase.generate]
    )
    return pytest.mark.usefixtures("one_thread")(machine.TestCase)


TestExactOnTheEmbeddedModel = machine_of("embedded", 10)
TestExactOnARandomGPT2 = machine_of("gpt2", 20)
TestExactOnARandomLlama = machine_of("llama", 20)
