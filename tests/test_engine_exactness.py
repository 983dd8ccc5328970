"""The engine's claim: whichever requests arrive, leave or fail, and whatever the policy, each one gets its own tokens.

Hypothesis drives an engine of random settings with all that can be done to one. Requests are added and cancelled, some
are streamed, others generated side by side, and forward passes fail. Every single output is compared with what
`model.generate` gives the prompt alone, and none may be lost, repeated or delivered to another caller. A run that
breaks the claim is printed as code.
"""

import contextlib
import itertools
from collections import Counter

from conftest import LONGEST, PROMPTS, alone, random_pair
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.detokenizer import text_of
from helpers.engine import POLICIES

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
        num_blocks=draw(st.sampled_from([16, None])),  # 16 hold the longest request and hardly any other
        prefix_caching=draw(st.booleans()),
    )


class ForwardFailed(Exception):
    pass


@contextlib.contextmanager
def failing(model, after: int):
    """Make the model raise in one forward pass, after a number of others."""
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
        iterate, steps = self.engine.iterate, itertools.count()

        def bounded():
            assert next(steps) < 3000, "a request was lost, and a caller waits for it"
            iterate()

        self.engine.iterate = bounded
        self.requests: dict = {}  # id -> prompt, max_tokens
        self.outputs: dict = {}  # id -> the last output
        self.streams: dict = {}  # id -> iterator
        self.closed, self.may_fail = set(), set()  # by closing a stream; unfinished when a pass failed

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
            name = f"request {len(self.requests)}" if named else None
            id = self.engine.add_request(given, SamplingParams(max_tokens=max_tokens), name, priority)
            assert id not in self.requests and (not named or id == name)
            self.requests[id] = prompt, max_tokens

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.check_step()

    @precondition(lambda self: self.unfinished())
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        id = self.unfinished()[which % len(self.unfinished())]
        assert self.engine.abort_request(id)
        assert not self.engine.abort_request(id), "cancelled twice"
        if id in self.streams:
            outputs = list(self.streams.pop(id))
            self.check(outputs, {id})
        else:
            outputs = [output for output in self.check_step() if output.request_id == id]
        assert outputs[-1].finish_reason == "abort"

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=4), gap=st.integers(0, 3))
    def generate(self, requests, gap):
        params = [SamplingParams(max_tokens=max_tokens) for _, max_tokens in requests]
        arrivals = [gap * place for place in range(len(requests))][::-1]
        outputs = self.engine.generate([prompt for prompt, _ in requests], params, arrivals=arrivals)
        for request, output in zip(requests, outputs, strict=True):
            assert output.request_id not in self.requests
            self.requests[output.request_id] = request
            self.outputs[output.request_id] = output
            self.check_content(output)
            assert output.finish_reason == self.reason(output.request_id)

    @precondition(lambda self: len(self.streams) < 3)
    @rule(request=REQUEST)
    def stream(self, request):
        before = set(self.engine.scheduler.requests)
        iterator = self.engine.stream(request[0], SamplingParams(max_tokens=request[1]))
        (id,) = set(self.engine.scheduler.requests) - before
        assert id not in self.requests
        self.requests[id], self.streams[id] = request, iterator

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2), pieces=st.integers(1, 10))
    def read(self, which, pieces):
        id = list(self.streams)[which % len(self.streams)]
        outputs = list(itertools.islice(self.streams[id], pieces))
        self.check(outputs, {id})
        if len(outputs) < pieces:
            assert self.finished(id), "a stream ended before its request"
            del self.streams[id]

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 2))
    def close(self, which):
        id, iterator = list(self.streams.items())[which % len(self.streams)]
        del self.streams[id]
        iterator.close()
        self.closed.add(id)
        assert id not in self.engine.scheduler.requests

    @precondition(lambda self: self.unfinished())
    @rule(after=st.integers(0, 2))
    def fail(self, after):
        self.may_fail.update(self.unfinished())
        with failing(self.engine.runner.model, after):
            self.check_step()
        self.may_fail &= set(self.streams)  # whose outputs are read later

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for id in list(self.streams)[:1]:  # one is read to its end first, the others when all has happened
            self.check(list(self.streams.pop(id)), {id})
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.check_step()
        for id, iterator in self.streams.items():
            self.check(list(iterator), {id})
            assert self.finished(id)
        assert all(self.finished(id) for id in self.requests), "a request was lost"
        assert self.engine.step() == []
        self.check_nothing_is_left()
        self.check_the_trace()

    # --- what must hold ---

    def check_step(self) -> list:
        """Run an iteration; its outputs are those of requests that no stream reads."""
        outputs = self.engine.step()
        self.check(outputs, set(self.requests) - set(self.streams) - self.closed)
        return outputs

    def check(self, outputs, readable):
        for output in outputs:
            last = self.outputs.get(output.request_id)
            assert output.request_id in readable, "delivered to the wrong caller"
            assert last is None or last.finish_reason is None, "an output behind the end"
            assert output.token_ids == (last.token_ids if last else []) + output.new_token_ids, "lost or repeated"
            assert output.text == (last.text if last else "") + output.new_text
            assert output.new_token_ids or output.finish_reason, "an output without anything new"
            self.outputs[output.request_id] = output
            self.check_content(output)

    def check_content(self, output):
        prompt, max_tokens = self.requests[output.request_id]
        expected, given = alone(self.model, self.tokenizer, prompt, max_tokens), output.token_ids
        assert given == expected[: len(given)], f"request {output.request_id!r}"
        complete = len(given) == len(expected)
        if output.finish_reason in ("stop", "length"):
            assert complete and output.finish_reason == self.reason(output.request_id)
        elif output.finish_reason == "error":
            assert output.request_id in self.may_fail and output.error == "ForwardFailed: on purpose"
        else:
            assert output.finish_reason in (None, "abort") and not complete
        assert (output.error is None) == (output.finish_reason != "error")
        words = given[:-1] if output.finish_reason == "stop" else given
        if output.finish_reason:
            assert output.text == text_of(words, self.tokenizer)
        else:
            assert text_of(words, self.tokenizer).startswith(output.text)
        assert len(output.token_times) == len(given)
        assert [output.arrival, *output.token_times] == sorted([output.arrival, *output.token_times])

    @invariant()
    def no_more_sequences_run_than_there_are_rows(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        assert len(scheduler.running) <= self.engine.config.max_batch_size
        assert {*scheduler.running, *scheduler.waiting} == set(scheduler.unfinished)
        assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.unfinished)
        assert all(not sequence.finish_reason for sequence in scheduler.unfinished)

    def check_nothing_is_left(self):
        engine, scheduler = self.engine, self.engine.scheduler
        assert not scheduler.unfinished and not scheduler.requests and not scheduler.running and not scheduler.waiting
        assert not engine.outputs.pending and not engine.outputs._subscribers and not engine.outputs._emitted
        if engine.block_manager is None:
            assert engine.runner._decoding is None and not engine.runner._prefilling
        else:
            assert engine.block_manager.used == 0

    def check_the_trace(self):
        """Rows and tokens agree with the outputs. In padded execution, which never preempts, prefills do, too."""
        trace, generated, prefilled = self.engine.trace, Counter(), Counter()
        steps = Counter()
        for iteration in trace.passes:
            steps[iteration.step] += sum(row.tokens for row in iteration.row_steps)
            assert len(iteration.row_steps) == self.engine.config.max_batch_size
            for row in iteration.row_steps:
                generated[row.request_id] += row.new_tokens
                prefilled[row.request_id] += row.tokens if row.work == "prefill" else 0
        assert max(steps.values(), default=0) <= self.engine.config.max_tokens_per_step
        for id, output in self.outputs.items():
            if id not in self.closed:
                assert generated[id] == len(output.token_ids)
            if self.engine.block_manager is None:
                prompt = len(self.tokenizer(self.requests[id][0])["input_ids"])
                assert prefilled[id] == prompt if output.token_ids else prefilled[id] <= prompt

    # --- how ---

    def finished(self, id) -> bool:
        return id in self.closed or (id in self.outputs and self.outputs[id].finish_reason is not None)

    def unfinished(self) -> list:
        """Return the ids of the requests that wait or run in the engine."""
        there = set(self.engine.scheduler.requests)
        assert there <= {id for id in self.requests if not self.finished(id)}
        return [id for id in self.requests if id in there]

    def reason(self, id) -> str:
        ids = alone(self.model, self.tokenizer, *self.requests[id])
        return "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"


def machine_of(family: str, examples: int):
    machine = type(f"Engine_{family}", (EngineMachine,), {"pair": staticmethod(PAIRS[family])})
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=25, phases=[Phase.generate])
    return machine.TestCase


TestExactOnTheEmbeddedModel = machine_of("embedded", 6)
TestExactOnARandomGPT2 = machine_of("gpt2", 12)
TestExactOnARandomLlama = machine_of("llama", 12)
