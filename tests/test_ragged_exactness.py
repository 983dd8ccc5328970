"""Ragged execution changes no token: not by preemption, caching, chunks or sharing, on any family that it supports.

Every such family of families.py is served with few tokens per iteration and too few blocks, so that all of this
happens; the tests count the events. Then hypothesis lets requests arrive, leave and be cancelled at random, on two
models.
"""

from collections import Counter

import pytest
import torch
from conftest import LONGEST, PROMPTS, alone, random_pair, spied
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.fast.linear_backends import available_backends
from helpers.runners.kv_pool import KVPool
from tests.support.families import FAMILIES, CountingScheduler, reference, serve_ragged, skip_unless_ragged, tokenizer

of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name, indirect=True)


@pytest.fixture
def family(request):
    """A family that runs ragged."""
    skip_unless_ragged(request.param)
    return request.param


@of_every_family
@pytest.mark.parametrize("is_fast", [False, True], ids=["PyTorch", "fast"])
def test_chunks_preemptions_and_caching_change_no_token(family, is_fast):
    """With PyTorch alone, and with kernels and another linear backend, which the families take in turn."""
    settings = {"kernels": False, "linear_backend": "pytorch"}
    if is_fast:
        others = [name for name in available_backends(torch.float32) if name != "pytorch"] or ["auto"]
        settings = {"linear_backend": others[FAMILIES.index(family) % len(others)]}
    alone = reference(family)
    requests, expected = alone.requests[:8] * 2, alone.tokens[:8] * 2  # every request arrives twice
    tokens, engine = serve_ragged(alone.model, requests, seed=0, **settings)
    assert tokens == expected
    events = engine.scheduler
    assert events.num_preempted > 3 and events.num_partial_chunks > 10 and events.num_cached_tokens > 20
    assert engine.block_manager.used == 0


@of_every_family
def test_samples_that_share_their_prompt_equal_those_of_single_requests(family, monkeypatch):
    model, copies = reference(family).model, []
    monkeypatch.setattr(KVPool, "copy_block", spied(KVPool.copy_block, copies))
    prompt = tokenizer()(reference(family).requests[0].prompt)["input_ids"][:22]  # the last block is half full
    config = EngineConfig(execution="ragged", max_batch_size=4, block_size=4)
    settings = {"max_tokens": 8, "temperature": 0.8, "top_k": 20, "ignore_eos": True}
    shared = Engine(model, tokenizer(), config).generate([prompt], SamplingParams(n=3, seed=5, **settings))
    assert len(copies) == 2
    params = [SamplingParams(seed=5 + index, **settings) for index in range(3)]
    single = Engine(model, tokenizer(), config).generate([prompt] * 3, params)
    assert [output.token_ids for output in shared] == [output.token_ids for output in single]
    assert len({tuple(output.token_ids) for output in shared}) == 3


# --- random arrivals and cancellations --------------------------------------------------------------------------------

PAIRS = {"embedded": load_model, "llama": lambda: random_pair("llama")}
EVENTS = ("num_preempted", "num_partial_chunks", "num_cached_tokens")


class RaggedMachine(RuleBasedStateMachine):
    """Greedy and sampled requests are added and cancelled at any time, with hardly any memory."""

    pair, alone = staticmethod(load_model), staticmethod(alone)
    kv_cache = "auto"
    events: Counter  # in all examples together

    @initialize(
        rows=st.integers(2, 6),
        tokens=st.integers(6, 30),
        spare_blocks=st.integers(0, 4),
        caching=st.booleans(),
        kernels=st.sampled_from([None, False]),  # None: if they can be compiled
        linear_backend=st.sampled_from(available_backends(torch.float32)),
    )
    def begin(self, rows, tokens, spare_blocks, caching, kernels, linear_backend):
        self.model, self.tokenizer = self.pair()
        longest = max(len(self.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS) + LONGEST
        config = EngineConfig(
            max_batch_size=rows,
            max_tokens_per_step=tokens,
            execution="ragged",
            block_size=4,
            num_blocks=-(-longest // 4) + spare_blocks,
            prefix_caching=caching,
            kernels=kernels,
            linear_backend=linear_backend,
            kv_cache=self.kv_cache,
            scheduler_cls=CountingScheduler,
        )
        self.engine = Engine(self.model, self.tokenizer, config)
        self.added, self.finished = {}, {}

    @rule(requests=st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(1, LONGEST)), min_size=1, max_size=5))
    def add(self, requests):
        for prompt, max_tokens in requests:
            request_id = self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
            self.added[request_id] = (prompt, max_tokens)

    @rule(prompt=st.sampled_from(PROMPTS), n=st.integers(2, 3), max_tokens=st.integers(1, 12))
    def add_samples(self, prompt, n, max_tokens):
        self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=n, n=n))

    @rule(steps=st.integers(1, 15))
    def step(self, steps):
        for _ in range(steps):
            self.check(self.engine.step())

    @precondition(lambda self: self.added)
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        self.engine.abort_request(list(self.added)[which % len(self.added)])

    @invariant()
    def only_running_sequences_have_memory(self):
        blocks = self.engine.block_manager
        assert blocks.used == len({block for table in blocks.tables.values() for block in table})
        assert set(blocks.tables) == set(self.engine.scheduler.running)

    def teardown(self):
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self.check(self.engine.step())
        assert set(self.finished) == set(self.added)
        assert self.engine.block_manager.used == 0
        self.events.update({name: getattr(self.engine.scheduler, name) for name in EVENTS})

    def check(self, outputs):
        for output in outputs:
            assert output.error is None
            if output.request_id not in self.added:
                continue
            prompt, max_tokens = self.added[output.request_id]
            ids = self.alone(self.model, self.tokenizer, prompt, max_tokens)
            assert output.token_ids == ids[: len(output.token_ids)]
            if output.finish_reason is not None:
                assert output.finish_reason == "abort" or output.token_ids == ids
                self.finished[output.request_id] = output.finish_reason


@pytest.mark.parametrize("name", PAIRS)
def test_whichever_requests_arrive_and_leave_every_greedy_request_gets_its_own_tokens(name):
    machine = type(f"Ragged_{name}", (RaggedMachine,), {"pair": staticmethod(PAIRS[name]), "events": Counter()})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=10, stateful_step_count=20, phases=[Phase.generate])
    )
    assert all(machine.events[name] > 10 for name in EVENTS), machine.events
