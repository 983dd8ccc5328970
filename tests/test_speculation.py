"""Speculation changes no token: not with right drafts, wrong ones or proposers that fail, in any company.

Hypothesis lets greedy and seeded requests arrive, leave and be cancelled, with stop strings, few blocks, shared
prefixes and chunks, on proposers of every kind. Each output is compared with what the request gets alone, without
speculation. Then every family that runs ragged is served with drafts.
"""

import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
from conftest import PROMPTS, random_pair
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
from helpers.detokenizer import REPLACEMENT_CHARACTER
from helpers.engine import BlockManager, Sequence
from helpers.features.speculation import NgramProposer
from tests.support.families import CountingScheduler, by_name, reference, serve_ragged, skip_unless_ragged, tokenizer

# --- proposers --------------------------------------------------------------------------------------------------------


class Perfect:
    """Proposes what follows in one of the texts."""

    def __init__(self, texts=()):
        self.texts = list(texts)

    def propose(self, token_ids, k):
        texts = (text for text in self.texts if text[: len(token_ids)] == token_ids)
        return next(texts, [])[len(token_ids) : len(token_ids) + k]


class Random:
    """Proposes any number of any ids."""

    def __init__(self):
        self.draw = random.Random(0)

    def propose(self, token_ids, k):
        return [self.draw.randrange(256) for _ in range(self.draw.randint(0, k))]


class WrongAtTheEnd(Perfect):
    """Proposes what follows, except for the last id: all work is done, and something is rejected every time."""

    def propose(self, token_ids, k):
        drafts = super().propose(token_ids, k)
        return [*drafts[:-1], drafts[-1] ^ 1] if drafts else []


class Mischievous(Perfect):
    """Proposes what follows, or fails in one of the ways in which a proposer can fail."""

    def __init__(self, texts=()):
        super().__init__(texts)
        self.draw = random.Random(1)

    def propose(self, token_ids, k):
        drafts = super().propose(token_ids, k)
        match self.draw.randrange(10):
            case 0:
                raise RuntimeError("on purpose")
            case 1:
                return [1] * (k + 1)
            case 2:
                return [-1]
            case 3:
                return [10**9]
            case 4:
                return None
            case 5:
                return [*drafts[:1], "a"][:k]
            case 6:
                token_ids.clear()
            case 7:
                token_ids += [1, 2, 3]
            case 8:
                token_ids[:] = token_ids[::-1]
        return drafts


class TwoAtOnce(WrongAtTheEnd):
    """Proposes for all sequences in one call."""

    def propose_batch(self, token_ids, k):
        return [self.propose(*pair) for pair in zip(token_ids, k, strict=True)]


PROPOSERS = {
    "perfect": Perfect,
    "random": Random,
    "wrong at the end": WrongAtTheEnd,
    "mischievous": Mischievous,
    "in a batch": TwoAtOnce,
    "ngram": NgramProposer,
}


# --- any company ------------------------------------------------------------------------------------------------------

PAIRS = {"embedded": load_model, "llama": lambda: random_pair("llama")}
LONGEST = 24
PARAMS = [
    SamplingParams(LONGEST),
    SamplingParams(LONGEST, ignore_eos=True, logprobs=2),
    SamplingParams(9),
    SamplingParams(1),
    SamplingParams(2, temperature=0.9, seed=1),
    SamplingParams(LONGEST, temperature=0.9, seed=1),
    SamplingParams(16, temperature=1.2, seed=2, top_k=20, logprobs=1),
    SamplingParams(LONGEST, repetition_penalty=1.3),
    SamplingParams(LONGEST, temperature=0.7, seed=3, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(LONGEST, stop=(" the", "a a", "er")),
    SamplingParams(LONGEST, temperature=0.5, seed=4, stop="e", ignore_eos=True),
    SamplingParams(8, temperature=1.0, seed=5, n=3),
]


@functools.cache
def alone(name: str, prompt: str, params: SamplingParams):
    """Return the output of a request that runs alone and without speculation."""
    return single_engine(name).generate([prompt], params)[0]


@functools.cache
def single_engine(name: str) -> Engine:
    return Engine(*PAIRS[name](), EngineConfig(max_batch_size=1, prefix_caching=False, linear_backend="pytorch"))


class SpeculatingMachine(RuleBasedStateMachine):
    make_proposer: type
    events: Counter  # in all examples together

    @initialize(
        name=st.sampled_from(sorted(PAIRS)),
        drafts=st.integers(1, 6),
        rows=st.sampled_from([16, 1, 4, 6]),
        spare_tokens=st.integers(5, 30),
        spare_blocks=st.integers(0, 3),
        block_size=st.sampled_from([1, 4, 16]),
        caching=st.booleans(),
        mixed=st.booleans(),
        kernels=st.sampled_from([None, False]),
    )
    def begin(self, name, drafts, rows, spare_tokens, spare_blocks, block_size, caching, mixed, kernels):
        self.name, (self.model, self.tokenizer) = name, PAIRS[name]()
        longest = max(len(self.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS) + LONGEST
        self.proposer = self.make_proposer()
        config = EngineConfig(
            max_batch_size=rows,
            max_tokens_per_step=rows + spare_tokens,
            execution="ragged",
            block_size=block_size,
            num_blocks=-(-longest // block_size) + spare_blocks,
            prefix_caching=caching,
            mixed_batches=mixed,
            kernels=kernels,
            linear_backend="pytorch",
            scheduler_cls=CountingScheduler,
            speculative=self.proposer,
            num_speculative_tokens=drafts,
        )
        self.engine = Engine(self.model, self.tokenizer, config)
        self.added, self.finished, self.texts = {}, {}, []

    @rule(requests=st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(PARAMS)), min_size=1, max_size=4))
    def add(self, requests):
        for prompt, params in requests:
            for index in range(params.n):
                ids = self.tokenizer(prompt)["input_ids"]
                self.texts.append(ids + self.expected(prompt, params, index).token_ids)
                if isinstance(self.proposer, Perfect):  # it also knows what would follow after the end
                    endless = replace(params, max_tokens=LONGEST, stop=(), ignore_eos=True)
                    self.proposer.texts.insert(0, ids + self.expected(prompt, endless, index).token_ids)
            self.added[self.engine.add_request(prompt, params)] = prompt, params

    def expected(self, prompt, params, index):
        """Return what the output with this index is alone."""
        if params.n > 1:
            params = replace(params, seed=params.seed + index, n=1)
        return alone(self.name, prompt, params)

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.check(self.engine.step())

    @precondition(lambda self: self.added)
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        self.engine.abort_request(list(self.added)[which % len(self.added)])

    @invariant()
    def rejected_tokens_have_no_block_and_no_hash(self):
        blocks, running = self.engine.block_manager, self.engine.scheduler.running
        assert set(blocks.tables) == set(running)
        assert blocks.used == len({block for table in blocks.tables.values() for block in table})
        for sequence, table in blocks.tables.items():
            assert len(table) == blocks.blocks_for(sequence.computed)
            assert sequence.computed <= len(sequence.token_ids)
        hashes = {digest for text in self.texts for digest in hashes_of(text, blocks.block_size)}
        assert set(blocks._block_of) <= hashes, "a block with a rejected token was registered"

    def teardown(self):
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self.check(self.engine.step())
        self.rejected_tokens_have_no_block_and_no_hash()
        expected = {(id, index) for id, (_, params) in self.added.items() for index in range(params.n)}
        assert set(self.finished) == expected
        assert self.engine.block_manager.used == 0
        trace, counts = self.engine.trace, self.engine.scheduler
        self.events.update(
            drafted=trace.drafted_tokens,
            accepted=trace.accepted_tokens,
            preempted=counts.num_preempted,
            partial_chunks=counts.num_partial_chunks,
            cached=counts.num_cached_tokens,
        )

    def check(self, outputs):
        for output in outputs:
            assert output.error is None
            prompt, params = self.added[output.request_id]
            expected = self.expected(prompt, params, output.index)
            if output.finish_reason in (None, "abort"):
                assert output.token_ids == expected.token_ids[: len(output.token_ids)]
                assert expected.text.startswith(output.text.rstrip(REPLACEMENT_CHARACTER))  # of an incomplete one
            else:
                assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
                assert output.finish_reason == expected.finish_reason
            assert len(output.token_times) == len(output.token_ids)
            if params.logprobs is not None:
                assert len(output.logprobs) == len(output.token_ids)
                for one, other in zip(output.logprobs, expected.logprobs, strict=False):
                    assert one == pytest.approx(other, abs=1e-3)
            if output.finish_reason is not None:
                assert (output.request_id, output.index) not in self.finished
                self.finished[output.request_id, output.index] = output.finish_reason


def hashes_of(text: list[int], block_size: int) -> list[bytes]:
    return BlockManager(1, block_size)._hashes(Sequence("text", text, 1), len(text))


@pytest.mark.filterwarnings("ignore:The proposer")
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_whatever_is_proposed_every_request_gets_its_own_tokens(proposer, always_drafts):
    name = f"Speculating_{proposer}"  # other names, other examples
    machine = type(name, (SpeculatingMachine,), {"make_proposer": PROPOSERS[proposer], "events": Counter()})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=7, stateful_step_count=10, phases=[Phase.generate])
    )
    events = machine.events
    assert events["drafted"] > 50 and events["cached"] > 10 and events["partial_chunks"] > 5, events
    if proposer == "perfect":  # another text may go on differently
        assert 0.8 * events["drafted"] < events["accepted"] <= events["drafted"], events
    elif proposer != "random":
        assert 5 < events["accepted"] <= events["drafted"], events


# --- every family -----------------------------------------------------------------------------------------------------


# Attention with everything that a family may add to it: learned and rotary positions, biases that grow with distance,
# windows, chunks, sinks, compressed keys. A draft is computed like a chunk, which test_ragged_exactness.py does for
# every family.
KINDS_OF_ATTENTION = ["gpt2", "bloom", "llama", "llama4_text", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("name", KINDS_OF_ATTENTION)
def test_drafts_change_no_token_whatever_the_attention(name, always_drafts):
    family = by_name(name)
    skip_unless_ragged(family)
    alone = reference(family)
    requests, expected = alone.requests[:8], alone.tokens[:8]
    texts = [
        tokenizer()(request.prompt)["input_ids"] + tokens for request, tokens in zip(requests, expected, strict=True)
    ]
    settings = {"linear_backend": "pytorch", "num_speculative_tokens": 3}
    tokens, engine = serve_ragged(alone.model, requests, seed=1, speculative=WrongAtTheEnd(texts), **settings)
    assert tokens == expected
    assert engine.trace.accepted_tokens > 5 and engine.trace.drafted_tokens > engine.trace.accepted_tokens + 5
    assert engine.block_manager.used == 0
