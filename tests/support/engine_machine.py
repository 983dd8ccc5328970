"""A state machine that does to an engine all that can be done to one, and checks every output.

Requests are added and cancelled, some are streamed, others generated side by side, and forward passes fail. Each output
is compared with what its request gets alone: greedy tokens with those of `model.generate`, all others with those of an
engine that runs nothing else. None may be lost, repeated or delivered to another caller.
"""

import contextlib
import functools
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import LONGEST, PROMPTS, alone, random_pair
from hypothesis import Phase, settings, stateful
from hypothesis import strategies as st

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.detokenizer import REPLACEMENT_CHARACTER, text_of
from helpers.engine import POLICIES
from helpers.fast.linear_backends import available_backends
from tests.support.context_runner import check_nothing_is_left, check_state
from tests.support.families import CountingScheduler

PAIRS = {"embedded": load_model, "gpt2": lambda: random_pair("gpt2"), "llama": lambda: random_pair("llama")}
EVENTS = ("num_preempted", "num_partial_chunks", "num_cached_tokens")
GREEDY = st.integers(1, LONGEST).map(SamplingParams)
SEEDED = st.sampled_from([SamplingParams(most, temperature=1.0, seed=most, n=2) for most in (1, 5, 12)])


@functools.cache
def output_alone(name: str, prompt: str, params: SamplingParams, greedy_alone):
    """Return the output of a request that runs alone and without speculation."""
    if params != SamplingParams(params.max_tokens):
        return single_engine(name).generate([prompt], params)[0]
    model, tokenizer = PAIRS[name]()
    ids = greedy_alone(model, tokenizer, prompt, params.max_tokens)
    is_stopped = ids[-1] == tokenizer.eos_token_id
    text = text_of(ids[:-1] if is_stopped else ids, tokenizer)
    return SimpleNamespace(token_ids=ids, text=text, finish_reason="stop" if is_stopped else "length")


@functools.cache
def single_engine(name: str) -> Engine:
    return Engine(*PAIRS[name](), EngineConfig(max_batch_size=1, prefix_caching=False, linear_backend="pytorch"))


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


class EngineMachine(stateful.RuleBasedStateMachine):
    """An engine of random settings, and what its callers have of each request.

    Attributes:
        names: the pairs of a model and a tokenizer to choose from.
        params: the sampling parameters to choose from.
        spare_blocks: the numbers of blocks beyond those of the longest request; None for as many as can be used.
        greedy_alone: as `conftest.alone`.
        events: how often what must change no token happened, in all examples together.
    """

    names, params, spare_blocks = tuple(PAIRS), GREEDY | GREEDY | SEEDED, (0, 1, 3, None)
    greedy_alone = staticmethod(alone)
    events: Counter
    engine = None

    def draw_settings(self, draw, longest: int) -> dict:
        """Return settings of an engine that can run requests of this many tokens."""
        chunked, block_size = draw(st.sampled_from([True, True, False])), draw(st.sampled_from([4, 8]))
        least = -(-longest // block_size)
        return {
            "max_batch_size": draw(st.sampled_from([4, 6, 5, 3, 1])),
            "max_tokens_per_step": draw(st.integers(8, 24)) if chunked else 128,
            "policy": draw(st.sampled_from(sorted(POLICIES))),
            "mixed_batches": draw(st.booleans()),
            "chunked_prefill": chunked,
            "execution": draw(st.sampled_from(["auto", "auto", "padded"])),
            "block_size": block_size,
            "num_blocks": None if (spare := draw(st.sampled_from(self.spare_blocks))) is None else least + spare,
            "prefix_caching": draw(st.booleans()),
            "kernels": draw(st.sampled_from([None, False])),  # None: if they can be compiled
            "linear_backend": draw(st.sampled_from(available_backends(torch.float32))),
        }

    @stateful.initialize(data=st.data())
    def begin(self, data):
        self.name = data.draw(st.sampled_from(self.names))
        self.model, self.tokenizer = PAIRS[self.name]()
        longest = max(len(self.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS) + LONGEST
        chosen = self.draw_settings(data.draw, longest)
        self.engine = Engine(self.model, self.tokenizer, EngineConfig(scheduler_cls=CountingScheduler, **chosen))
        iterate, steps = self.engine.iterate, itertools.count()

        def bounded():
            assert next(steps) < 3000, "a request was lost, and a caller waits for it"
            iterate()

        self.engine.iterate = bounded
        self.requests: dict = {}  # id -> prompt, params
        self.outputs: dict = {}  # (id, index) -> the last output
        self.streams: dict = {}  # id -> iterator
        self.closed, self.may_fail = set(), set()  # by closing a stream; unfinished when a pass failed

    # --- what can happen ---

    def draw_requests(self, data, most: int = 4) -> list:
        return data.draw(st.lists(st.tuples(st.sampled_from(PROMPTS), self.params), min_size=1, max_size=most))

    @stateful.rule(data=st.data(), as_ids=st.booleans(), priority=st.integers(-2, 2), named=st.booleans())
    def add(self, data, as_ids, priority, named):
        for prompt, params in self.draw_requests(data):
            given = self.tokenizer(prompt)["input_ids"] if as_ids else prompt
            name = f"request {len(self.requests)}" if named else None
            id = self.engine.add_request(given, params, name, priority)
            assert id not in self.requests and (not named or id == name)
            self.requests[id] = prompt, params

    @stateful.rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.check_step()

    @stateful.precondition(lambda self: self.unfinished())
    @stateful.rule(which=st.integers(0, 20))
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

    @stateful.rule(data=st.data(), gap=st.integers(0, 3))
    def generate(self, data, gap):
        requests = self.draw_requests(data)
        arrivals = [gap * index for index in range(len(requests))][::-1]
        outputs = self.engine.generate(*zip(*requests, strict=True), arrivals=arrivals)
        expected = [(request, index) for request in requests for index in range(request[1].n)]
        for (request, index), output in zip(expected, outputs, strict=True):
            assert output.index == index and (index or output.request_id not in self.requests)
            self.requests[output.request_id] = request
            self.outputs[output.request_id, index] = output
            self.check_content(output)
            assert output.finish_reason in ("stop", "length")

    @stateful.precondition(lambda self: len(self.streams) < 3)
    @stateful.rule(data=st.data())
    def stream(self, data):
        before, (request,) = set(self.engine.scheduler.requests), self.draw_requests(data, 1)
        iterator = self.engine.stream(*request)
        (id,) = set(self.engine.scheduler.requests) - before
        assert id not in self.requests
        self.requests[id], self.streams[id] = request, iterator

    @stateful.precondition(lambda self: self.streams)
    @stateful.rule(which=st.integers(0, 2), pieces=st.integers(1, 10))
    def read(self, which, pieces):
        id = list(self.streams)[which % len(self.streams)]
        outputs = list(itertools.islice(self.streams[id], pieces))
        self.check(outputs, {id})
        if len(outputs) < pieces:
            assert self.finished(id), "a stream ended before its request"
            del self.streams[id]

    @stateful.precondition(lambda self: self.streams)
    @stateful.rule(which=st.integers(0, 2))
    def close(self, which):
        id, iterator = list(self.streams.items())[which % len(self.streams)]
        del self.streams[id]
        iterator.close()
        self.closed.add(id)
        assert id not in self.engine.scheduler.requests

    @stateful.precondition(lambda self: self.unfinished())
    @stateful.rule(after=st.integers(0, 2))
    def fail(self, after):
        self.may_fail.update(self.unfinished())
        with failing(self.engine.runner.model, after):
            self.check_step()
        self.may_fail &= set(self.streams)  # whose outputs are read later

    def teardown(self):
        if self.engine is None:
            return
        for id in list(self.streams)[:1]:  # one is read to its end first, the others when all has happened
            self.check(list(self.streams.pop(id)), {id})
        while self.engine.has_unfinished_requests():
            self.check_step()
        for id, iterator in self.streams.items():
            self.check(list(iterator), {id})
        assert all(self.finished(id) for id in self.requests), "a request was lost"
        assert self.engine.step() == []
        self.queues_and_memory_agree()
        check_nothing_is_left(self.engine)
        self.check_the_trace()
        self.events.update({name: getattr(self.engine.scheduler, name) for name in EVENTS})

    # --- what must hold ---

    def expected(self, prompt: str, params: SamplingParams, index: int = 0):
        """Return what an output is alone."""
        params = params if params.n == 1 else replace(params, seed=params.seed + index, n=1)
        return output_alone(self.name, prompt, params, self.greedy_alone)

    def check_step(self) -> list:
        """Run an iteration; its outputs are those of requests that no stream reads."""
        outputs = self.engine.step()
        self.check(outputs, set(self.requests) - set(self.streams) - self.closed)
        return outputs

    def check(self, outputs, readable):
        for output in outputs:
            last = self.outputs.get((output.request_id, output.index))
            assert output.request_id in readable, "delivered to the wrong caller"
            assert last is None or last.finish_reason is None, "an output behind the end"
            assert output.token_ids == (last.token_ids if last else []) + output.new_token_ids, "lost or repeated"
            assert output.text == (last.text if last else "") + output.new_text
            assert output.new_token_ids or output.finish_reason, "an output without anything new"
            self.outputs[output.request_id, output.index] = output
            self.check_content(output)

    def check_content(self, output):
        prompt, params = self.requests[output.request_id]
        expected, given = self.expected(prompt, params, output.index), output.token_ids
        if output.finish_reason in ("stop", "length"):
            whole = expected.token_ids, expected.text, expected.finish_reason
            assert (given, output.text, output.finish_reason) == whole, f"request {output.request_id!r}"
        else:
            assert given == expected.token_ids[: len(given)], f"request {output.request_id!r}"
            assert expected.text.startswith(output.text.rstrip(REPLACEMENT_CHARACTER))  # of an incomplete one
            assert output.finish_reason in (None, "abort", "error") and len(given) < len(expected.token_ids)
        if output.finish_reason in ("abort", "error") and not params.stop:
            assert output.text == text_of(given, self.tokenizer)
        if output.finish_reason == "error":
            assert output.request_id in self.may_fail and output.error == "ForwardFailed: on purpose"
        assert (output.error is None) == (output.finish_reason != "error")
        if params.logprobs is not None:
            for scores, expected_scores in zip(output.logprobs, expected.logprobs[: len(given)], strict=True):
                assert scores == pytest.approx(expected_scores, abs=1e-3)
        assert len(output.token_times) == len(given)
        assert [output.arrival, *output.token_times] == sorted([output.arrival, *output.token_times])

    @stateful.invariant()
    def queues_and_memory_agree(self):
        check_state(self.engine)
        assert len(self.engine.scheduler.running) <= self.engine.config.max_batch_size
        if (blocks := self.engine.block_manager) is not None:
            assert all(len(table) == blocks.blocks_for(sequence.computed) for sequence, table in blocks.tables.items())

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
        for (id, index), output in self.outputs.items():
            label = id if self.requests[id][1].n == 1 else (id, index)
            assert id in self.closed or generated[label] == len(output.token_ids)
            if self.engine.block_manager is None:
                prompt = len(self.tokenizer(self.requests[id][0])["input_ids"])
                assert prefilled[label] == prompt if output.token_ids else prefilled[label] <= prompt

    # --- how ---

    def finished(self, id) -> bool:
        last = [self.outputs.get((id, index)) for index in range(self.requests[id][1].n)]
        return id in self.closed or all(output and output.finish_reason for output in last)

    def unfinished(self) -> list:
        """Return the ids of the requests that wait or run in the engine."""
        there = set(self.engine.scheduler.requests)
        assert there <= {id for id in self.requests if not self.finished(id)}
        return [id for id in self.requests if id in there]


def run_machine(
    name: str, examples: int, steps: int, base: type[EngineMachine] = EngineMachine, **attributes
) -> Counter:
    """Run a machine with these attributes, and return its events. Other names draw other examples."""
    machine = type(name, (base,), attributes | {"events": Counter()})
    chosen = settings(max_examples=examples, stateful_step_count=steps, phases=[Phase.generate])
    stateful.run_state_machine_as_test(machine, settings=chosen)
    return machine.events
