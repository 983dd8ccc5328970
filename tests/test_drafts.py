"""Where drafts come from, how many there are, what memory they get, and what a proposer that fails costs."""

import random
import warnings

import pytest
import torch
from conftest import PROMPTS, random_pair
from hypothesis import given
from hypothesis import strategies as st

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.base_engine import BaseEngine
from helpers.engine import BlockManager, Chunk, Feature, ModelInfo, SampledToken, Sequence
from helpers.features.speculation import Context, NgramProposer
from helpers.features.speculation.draft_model import EMBEDDED_DRAFT
from helpers.models import EMBEDDED
from helpers.runners.sampling import BatchSampler
from helpers.simulator import SimulatedRunner, Simulator
from tests.support.engine_machine import ForwardFailed, failing


class Fixed:
    """Proposes the same ids for every sequence."""

    def __init__(self, *proposals):
        self.proposals = proposals

    def propose(self, token_ids, k):
        return list(self.proposals)[:k]


def speculation_of(engine):
    return next(feature for feature in engine.validator.features if feature.name == "speculation")


# --- verification -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "tokens"), [([], [5]), ([5], [5, 6]), ([5, 6, 7], [5, 6, 7, 8]), ([5, 9, 7], [5, 6]), ([4, 6, 7], [5])]
)
def test_drafts_are_accepted_up_to_the_first_wrong_one_and_one_more_token_follows(drafts, tokens):
    sequence = Sequence("r", [1], 9)
    chunk = Chunk(sequence, 1)
    chunk.add_drafts(drafts)
    logits = torch.eye(10)[5 : 6 + len(drafts)]
    assert [one.token_id for one in BatchSampler().sample([chunk], logits)[sequence]] == tokens


def test_a_failure_after_an_accepted_draft_leaves_the_tokens_before_it():
    for accepted in (2, 0):
        sequence = Sequence("r", [1], 9, features=(FailingAt(accepted + 1),))
        chunk = Chunk(sequence, 1)
        chunk.add_drafts([0, 1, 2])
        sampled = BatchSampler().sample([chunk], torch.eye(4))[sequence]
        assert [type(choice) for choice in sampled] == [SampledToken] * accepted + [RuntimeError]


class FailingAt(Feature):
    """Fails when a token is chosen after this many tokens."""

    is_last = False

    def __init__(self, failing):
        self.failing = failing

    def logits_rule(self, sequence):
        return self

    def allows(self, token_ids, next_id):
        return None

    def change(self, token_ids, scores):
        if len(token_ids) == self.failing:
            raise RuntimeError("on purpose")


# --- n-grams ----------------------------------------------------------------------------------------------------------


def followers(text: list[int], k: int) -> list[int]:
    """Return the drafts for a text by searching all of it."""
    for size in range(min(3, len(text) - 1), 0, -1):
        for start in reversed(range(len(text) - size)):
            if text[start : start + size] == text[-size:]:
                drafts = list(text)
                for _ in range(k):
                    drafts.append(drafts[start + size + len(drafts) - len(text)])
                return drafts[len(text) :]
    return []


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), k=st.integers(1, 6))
def test_n_grams_of_a_growing_text_give_what_a_search_of_all_of_it_gives(text, k):
    proposer, context = NgramProposer(), Context()
    for token in text:
        context.append(token)
        expected = followers(list(context), k)
        assert proposer.propose(context, k) == expected == proposer.propose(list(context), k)


def test_a_lookup_reads_the_new_tokens_only():
    draw = random.Random(0)
    context = Context(draw.randrange(50) for _ in range(5000))
    proposer = NgramProposer()
    proposer.propose(context, 4)
    index = context.notes[proposer]
    reads = []
    index.followers = type("Spy", (dict,), {"__setitem__": lambda *pair: reads.append(pair)})(index.followers)
    context.append(3)
    proposer.propose(context, 4)
    assert len(reads) == 3


# --- how many ---------------------------------------------------------------------------------------------------------


def simulate(
    proposer, rows: int, max_tokens: int, k: int = 4, next_token=lambda token_ids: len(token_ids) % 7, **config
):
    """Return the engine after `rows` requests at once, in which a token depends on its place."""
    config = EngineConfig(max_batch_size=rows, speculative=proposer, num_speculative_tokens=k, **config)
    engine = Simulator(config, next_token=next_token)
    engine.generate([[9, row] for row in range(rows)], SamplingParams(max_tokens))
    return engine


class Right:
    """Proposes what the simulated model generates."""

    def propose(self, token_ids, k):
        return [(len(token_ids) + place) % 7 for place in range(k)]


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_right_drafts_save_as_many_passes_as_there_are_of_them(rows, always_drafts):
    engine = simulate(Right(), rows, max_tokens=41)
    assert engine.trace.output_tokens == 41 * rows
    assert engine.trace.forward_passes == 1 + 40 / 5
    assert engine.trace.accepted_tokens == engine.trace.drafted_tokens == 41 * rows - engine.trace.forward_passes * rows
    assert engine.trace.acceptance == 1.0


@pytest.mark.parametrize(("rows", "share"), [(1, 0.15), (16, 0.03)])
def test_where_nothing_is_accepted_hardly_any_drafts_are_computed(rows, share):
    proposer = Fixed(8)  # never generated
    engine = simulate(proposer, rows, max_tokens=400)
    assert engine.trace.accepted_tokens == 0 and engine.trace.acceptance == 0.0
    assert 0 < engine.trace.drafted_tokens < share * engine.trace.output_tokens
    assert engine.trace.forward_passes == 400


def test_drafts_use_what_decodes_and_prefills_leave_of_the_token_budget(always_drafts):
    engine = Simulator(
        EngineConfig(max_batch_size=3, max_tokens_per_step=6, speculative=Right(), num_speculative_tokens=8),
        next_token=lambda token_ids: len(token_ids) % 7,
    )
    for row in range(2):
        engine.add_request([9, row], SamplingParams(30))
    engine.step()
    engine.add_request([9] * 13, SamplingParams(2))
    tokens = []
    for _ in range(6):
        engine.step()
        tokens.append(sorted((row.work, row.tokens) for row in engine.trace.passes[-1].row_steps if row.tokens))
    assert tokens[:3] == [[("decode", 1), ("decode", 1), ("prefill", 4)]] * 3, "a draft delayed a prefill"
    assert all(sum(count for _, count in row_steps) == 6 for row_steps in tokens)
    assert tokens[3] == [("decode", 2), ("decode", 3), ("prefill", 1)]


def test_nothing_is_drafted_after_eos_unless_it_is_ignored(always_drafts):
    passes = []
    for ignore_eos in (False, True):
        runner = SimulatedRunner(8, 4, next_token=lambda token_ids: len(token_ids) % 7)
        config = EngineConfig(speculative=Right(), num_speculative_tokens=6)
        engine = BaseEngine(runner, load_model()[1], ModelInfo(100, None, frozenset([6])), config)
        (output,) = engine.generate([[9, 9]], SamplingParams(10, ignore_eos=ignore_eos))
        assert output.token_ids == ([2, 3, 4, 5, 6] if not ignore_eos else [2, 3, 4, 5, 6, 0, 1, 2, 3, 4])
        passes.append([row.tokens for one in engine.trace.passes for row in one.row_steps if row.tokens])
    assert passes == [[2, 4], [2, 7, 2]]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_drafts_take_free_blocks_only_and_give_back_those_of_rejected_tokens():
    blocks = BlockManager(5, block_size=2)
    old = Sequence("old", [1, 2, 3, 4, 5], 4)
    blocks.allocate(old, 5)
    old.computed = 4
    blocks.free(old)  # two of its blocks stay cached
    one = Sequence("one", [6, 7], 20)
    blocks.allocate(one, 2)
    one.computed = 2
    one.token_ids.append(8)
    blocks.allocate(one, 1)
    assert blocks.available == 3 and blocks.cached == 2
    assert blocks.allocate_drafts(one, 9) == 3, "1 slot beside the newest token, and 1 free block of 2"
    assert blocks.cached == 2, "drafts evicted a cached block"
    one.computed = 3
    blocks.trim(one)
    assert len(blocks.block_table(one)) == 2 and blocks.available == 3
    one.computed = 0
    blocks.free(one)
    assert blocks.used == 0


# --- proposers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposal", "reason"),
    [
        ([1, 2, 3, 4, 5, 6], "6 ids, although at most"),
        ([1, -1], "-1 is not a token id from 0 to 2147483647"),
        ([2**31], "2147483648 is not a token id"),
        (["a"], "'a' is not a token id"),
        ([0.5], "0.5 is not a token id"),
        (None, "TypeError"),
        (RuntimeError("on purpose"), "RuntimeError: on purpose"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_a_proposer_that_fails_costs_no_tokens_and_warns_once(proposal, reason, batch):
    class Failing:
        def propose(self, token_ids, k):
            if isinstance(proposal, Exception):
                raise proposal
            return proposal

    if batch:
        Failing.propose_batch = lambda self, contexts, counts: [self.propose(one, 4) for one in contexts]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = simulate(Failing(), 3, max_tokens=30)
    assert engine.trace.output_tokens == 90 and engine.trace.drafted_tokens == 0
    (message,) = [str(one.message) for one in caught]
    assert "The proposer Failing made no usable proposal" in message and reason in message


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match='speculative must be "ngram", "draft", an object with a method'):
        EngineConfig(speculative="medusa")
    with pytest.raises(ValueError, match="num_speculative_tokens must be an integer of at least 1, not 0"):
        EngineConfig(num_speculative_tokens=0)
    with pytest.raises(ValueError, match='A draft_model has no effect unless speculative is "draft"'):
        EngineConfig(draft_model="folder")
    with pytest.raises(ValueError, match="runs a draft model: use"):
        Simulator(EngineConfig(speculative="draft"))


@pytest.mark.parametrize("speculative", ["ngram", "draft"])
def test_padded_execution_is_refused_with_the_reason(speculative):
    reason = r'requires ragged execution, .* but the configuration says execution="padded"'
    with pytest.raises(ValueError, match=reason):
        Engine(config=EngineConfig(execution="padded", speculative=speculative))


# --- the draft model --------------------------------------------------------------------------------------------------


def test_the_embedded_draft_model_has_at_most_1_mb_and_the_embedded_model_s_tokenizer():
    assert sum(path.stat().st_size for path in EMBEDDED_DRAFT.iterdir()) <= 1e6
    assert (EMBEDDED_DRAFT / "tokenizer.json").read_bytes() == (EMBEDDED / "tokenizer.json").read_bytes()


def test_the_draft_model_proposes_its_own_best_tokens():
    engine = Engine(config=EngineConfig(speculative="draft", max_batch_size=3, linear_backend="pytorch"))
    proposer = speculation_of(engine).proposer
    draft, tokenizer = load_model(EMBEDDED_DRAFT)
    for prompt in PROMPTS[:5] * 2:  # more than it keeps
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        expected = draft.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None)
        assert proposer.propose(ids[0].tolist(), 6) == expected[0, ids.size(1) :].tolist()
    assert len(proposer._kept) == 3


def test_the_draft_model_computes_only_what_is_new_and_follows_what_was_accepted():
    engine = Engine(config=EngineConfig(speculative="draft", max_batch_size=2, linear_backend="pytorch"))
    proposer = speculation_of(engine).proposer
    tokens = []
    forward = proposer.runner.forward
    proposer.runner.forward = lambda plan: (tokens.append([one.tokens for one in plan.chunks]), forward(plan))[1]
    contexts = [Context(engine.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS[:2]]
    lengths = [len(context) for context in contexts]
    first = proposer.propose_batch(contexts, [3, 2])
    assert tokens == [lengths, [1, 1], [1]]
    tokens.clear()
    contexts[0] += [*first[0], 7]  # all accepted, and a token that it has not seen
    contexts[1] += [first[1][0], first[1][1] ^ 1]  # one accepted
    second = proposer.propose_batch(contexts, [2, 2])
    assert tokens == [[2, 1], [1, 1]]
    assert second == [proposer.propose(list(context), 2) for context in contexts]


def test_the_draft_model_stops_at_the_end_of_its_context_and_of_its_memory():
    model, tokenizer = random_pair("gpt2")
    config = EngineConfig(speculative="draft", draft_model=model, max_batch_size=2, max_tokens_per_step=50)
    proposer = speculation_of(Engine(model, tokenizer, config)).proposer
    context = Context([5] * 126)
    assert proposer.propose(context, 4) == [], "a long prompt takes several passes"
    assert proposer.propose(context, 4) == []
    assert len(proposer.propose(context, 4)) == 3, "128 positions: of 126 tokens and two drafts"
    proposer.blocks = BlockManager(8, proposer.runner.block_size, prefix_caching=False)
    proposer._kept.clear()
    long, short = Context([5] * 120), Context([6] * 9)
    for _ in range(3):
        proposer.propose(long, 1)
    assert len(proposer.propose(short, 2)) == 2, "the other sequence makes room"


def test_a_draft_model_changes_no_token_and_saves_passes():
    engine, plain = (Engine(config=EngineConfig(max_batch_size=16, speculative=one)) for one in ("draft", None))
    params = [SamplingParams(30, temperature=0.8 * (row % 2), seed=2) for row in range(len(PROMPTS))]
    outputs, expected = engine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert engine.trace.forward_passes < plain.trace.forward_passes


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="The embedded draft model has another tokenizer than the model"):
        Engine(*random_pair("gpt2"), EngineConfig(speculative="draft"))
    model, tokenizer = random_pair("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"The draft model .* has another tokenizer than the model"):
        Engine(config=EngineConfig(speculative="draft", draft_model=tmp_path))
    Engine(model, tokenizer, EngineConfig(speculative="draft", draft_model=str(tmp_path)))


def test_a_draft_model_that_failed_starts_again():
    engine = Engine(config=EngineConfig(speculative="draft", max_batch_size=2, linear_backend="pytorch"))
    proposer, context = speculation_of(engine).proposer, Context([5, 6, 7])
    expected = proposer.propose(context, 4)
    context.append(8)
    with failing(proposer.runner.model, 0), pytest.raises(ForwardFailed):
        proposer.propose(context, 4)
    assert proposer.propose(Context([5, 6, 7]), 4) == expected
    assert proposer.propose(context, 4) == proposer.propose([5, 6, 7, 8], 4)
