"""The claim of ragged execution: preemption, caching, chunks and sharing change no token, on any family that runs so.

Every family of families.py that can be run ragged is served with few tokens an iteration and too few blocks, so that
all of that happens; the tests see to it that it did. Then hypothesis drives two models with whatever comes and goes.
"""

from collections import Counter

import pytest
import transformers
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
from helpers.ragged import Store, supports_ragged
from tests.families import FAMILIES, Watching, reference, serve_ragged, tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
of_every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name, indirect=True)


@pytest.fixture
def family(request):
    """Those that run ragged. Which these are on which transformers, SUPPORT.md says, and test_families.py compares."""
    if not request.param.available:
        pytest.skip(f"transformers {transformers.__version__} does not know {request.param.config['model_type']}")
    if not supports_ragged(reference(request.param).model):
        pytest.skip("runs padded")
    return request.param


@of_every_family
@pytest.mark.parametrize("kernels", [None, False], ids=["compiled kernels", "PyTorch alone"])
def test_chunks_preemptions_and_caching_change_no_token(family, kernels):
    alone = reference(family)
    tokens, engine = serve_ragged(alone.model, alone.requests * 2, seed=0, kernels=kernels)  # everything is asked twice
    assert tokens == alone.tokens * 2
    happened = engine.scheduler
    assert happened.preempted > 3 and happened.chunks > 10 and happened.cached > 20
    assert engine.execution.blocks.used == 0


@of_every_family
def test_samples_that_share_their_prompt_are_those_of_single_requests(family, monkeypatch):
    model, copies = reference(family).model, []
    monkeypatch.setattr(Store, "copy_slots", spied(Store.copy_slots, copies))
    prompt = tokenizer()(reference(family).requests[0].prompt)["input_ids"][:22]  # the last block is half full
    config = EngineConfig(execution="ragged", max_batch_size=4, block_size=4)
    settings = {"max_tokens": 8, "temperature": 0.8, "top_k": 20, "ignore_eos": True}
    shared = Engine(model, tokenizer(), config).generate([prompt], SamplingParams(n=3, seed=5, **settings))
    assert len(copies) == 2
    singly = [SamplingParams(seed=5 + index, **settings) for index in range(3)]
    single = Engine(model, tokenizer(), config).generate([prompt] * 3, singly)
    assert [output.token_ids for output in shared] == [output.token_ids for output in single]
    assert len({tuple(output.token_ids) for output in shared}) == 3


# --- whatever comes and goes ------------------------------------------------------------------------------------------

PAIRS = {"embedded": load_model, "llama": lambda: random_pair("llama")}


class RaggedMachine(RuleBasedStateMachine):
    """Greedy requests and sampled ones in company, added and taken back at any time, with hardly any room."""

    pair = staticmethod(load_model)
    happened: Counter  # in all examples together

    @initialize(
        rows=st.integers(2, 6),
        tokens=st.integers(6, 30),
        room=st.integers(0, 4),
        caching=st.booleans(),
        kernels=st.sampled_from([None, False]),  # None: where they can be compiled
    )
    def begin(self, rows, tokens, room, caching, kernels):
        self.model, self.tokenizer = self.pair()
        longest = max(len(self.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS) + LONGEST
        config = EngineConfig(
            max_batch_size=rows,
            max_tokens_per_step=tokens,
            policy=Watching(),
            execution="ragged",
            block_size=4,
            num_blocks=-(-longest // 4) + room,
            prefix_caching=caching,
            kernels=kernels,
        )
        self.engine = Engine(self.model, self.tokenizer, config)
        self.asked, self.ended = {}, {}

    @rule(requests=st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(1, LONGEST)), min_size=1, max_size=5))
    def add(self, requests):
        for prompt, max_tokens in requests:
            request_id = self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
            self.asked[request_id] = (prompt, max_tokens)

    @rule(prompt=st.sampled_from(PROMPTS), n=st.integers(2, 3), max_tokens=st.integers(1, 12))
    def add_samples(self, prompt, n, max_tokens):
        self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=n, n=n))

    @rule(steps=st.integers(1, 15))
    def step(self, steps):
        for _ in range(steps):
            self.check(self.engine.step())

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        self.engine.abort_request(list(self.asked)[which % len(self.asked)])

    @invariant()
    def whoever_runs_has_memory_and_nobody_else(self):
        blocks = self.engine.execution.blocks
        assert blocks.used == len({block for table in blocks.tables.values() for block in table})
        assert set(blocks.tables) == set(self.engine._running)

    def teardown(self):
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self.check(self.engine.step())
        assert set(self.ended) == set(self.asked)
        assert self.engine.execution.blocks.used == 0
        self.happened.update({what: getattr(self.engine.scheduler, what) for what in ("preempted", "chunks", "cached")})

    def check(self, outputs):
        for output in outputs:
            assert output.error is None
            if output.request_id not in self.asked:
                continue
            prompt, max_tokens = self.asked[output.request_id]
            ids = alone(self.model, self.tokenizer, prompt, max_tokens)
            assert output.token_ids == ids[: len(output.token_ids)]
            if output.finish_reason is not None:
                assert output.finish_reason == "abort" or output.token_ids == ids
                self.ended[output.request_id] = output.finish_reason


@pytest.mark.parametrize("name", PAIRS)
def test_whatever_comes_and_goes_every_greedy_request_gets_its_own_tokens(name):
    machine = type(f"Ragged_{name}", (RaggedMachine,), {"pair": staticmethod(PAIRS[name]), "happened": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=True, deadline=None, max_examples=20, stateful_step_count=20, phases=[Phase.generate]
        ),
    )
    assert all(machine.happened[what] > 20 for what in ("preempted", "chunks", "cached")), machine.happened
