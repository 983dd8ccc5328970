"""Speculation changes no token: not with right drafts, wrong ones or proposers that fail, in any company.

`EngineMachine` runs greedy and seeded requests with stop strings, few blocks, shared prefixes and chunks, on proposers
of every kind. A draft is computed like a chunk, which test_ragged_exactness.py does for every family.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from helpers import SamplingParams
from helpers.engine import BlockManager, Sequence
from helpers.features.speculation import NgramProposer
from tests.support.engine_machine import EngineMachine, run_machine

# --- proposers --------------------------------------------------------------------------------------------------------


class Perfect:
    """Proposes what follows in one of the texts."""

    def __init__(self, texts=()):
        self.texts = list(texts)

    def propose(self, token_ids, k):
        texts = (text for text in self.texts if text[: len(token_ids)] == token_ids)
        return next(texts, [])[len(token_ids) : len(token_ids) + k]


class WrongAtTheEnd(Perfect):
    """Proposes what follows, except for the last id: all work is done, and something is rejected every time."""

    def propose(self, token_ids, k):
        drafts = super().propose(token_ids, k)
        return [*drafts[:-1], drafts[-1] ^ 1] if drafts else []


class Mischievous(Perfect):
    """Proposes what follows, or fails, or writes into the tokens that it is given."""

    def __init__(self, texts=()):
        super().__init__(texts)
        self.draw = random.Random(1)

    def propose(self, token_ids, k):
        drafts = super().propose(token_ids, k)
        match self.draw.randrange(10):
            case 0:
                raise RuntimeError("on purpose")
            case 1:
                return [*drafts[:1], "a"][:k]
            case 2:
                token_ids.clear()
            case 3:
                token_ids += [1, 2, 3]
            case 4:
                token_ids[:] = token_ids[::-1]
        return drafts


PROPOSERS = {"perfect": Perfect, "wrong at the end": WrongAtTheEnd, "mischievous": Mischievous, "ngram": NgramProposer}


# --- any company ------------------------------------------------------------------------------------------------------

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


class SpeculatingMachine(EngineMachine):
    names, params = ("embedded", "llama"), st.sampled_from(PARAMS)
    make_proposer: type

    def draw_settings(self, draw, longest):
        settings, rows = super().draw_settings(draw, longest), draw(st.sampled_from([16, 1, 4, 6]))
        block_size = draw(st.sampled_from([1, 4, 16]))
        self.proposer, self.texts = self.make_proposer(), []
        return settings | {
            "execution": "ragged",
            "policy": "fcfs",
            "linear_backend": "pytorch",
            "max_batch_size": rows,
            "max_tokens_per_step": rows + draw(st.integers(5, 30)),
            "chunked_prefill": True,
            "block_size": block_size,
            "num_blocks": -(-longest // block_size) + draw(st.integers(0, 3)),
            "speculative": self.proposer,
            "num_speculative_tokens": draw(st.integers(1, 6)),
        }

    def draw_requests(self, data, most=4):
        requests = super().draw_requests(data, most)
        for prompt, params in requests:
            for index in range(params.n):
                ids = self.tokenizer(prompt)["input_ids"]
                self.texts.append(ids + self.expected(prompt, params, index).token_ids)
                if isinstance(self.proposer, Perfect):  # it also knows what would follow after the end
                    endless = replace(params, max_tokens=LONGEST, stop=(), ignore_eos=True)
                    self.proposer.texts.insert(0, ids + self.expected(prompt, endless, index).token_ids)
        return requests

    @invariant()
    def no_block_with_a_rejected_token_is_registered(self):
        blocks = self.engine.block_manager
        hashes = {digest for text in self.texts for digest in hashes_of(text, blocks.block_size)}
        assert set(blocks._block_of) <= hashes

    def teardown(self):
        super().teardown()
        if self.engine is not None:
            self.no_block_with_a_rejected_token_is_registered()
            trace = self.engine.trace
            self.events.update(drafted=trace.drafted_tokens, accepted=trace.accepted_tokens)


def hashes_of(text: list[int], block_size: int) -> list[bytes]:
    return BlockManager(1, block_size)._hashes(Sequence("text", text, 1), len(text))


@pytest.mark.filterwarnings("ignore:The proposer")
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_whatever_is_proposed_every_request_gets_its_own_tokens(proposer, always_drafts):
    name = f"Speculating_{proposer}"
    events = run_machine(name, 7, 10, SpeculatingMachine, make_proposer=PROPOSERS[proposer])
    assert events["drafted"] > 50 and events["num_cached_tokens"] > 10 and events["num_partial_chunks"] > 5, events
    if proposer == "perfect":  # another text may go on differently
        assert 0.8 * events["drafted"] < events["accepted"] <= events["drafted"], events
    else:
        assert 5 < events["accepted"] <= events["drafted"], events
