"""Where drafts come from, how many there are, and what a proposer that fails costs."""

import warnings

import pytest
from conftest import PROMPTS, random_pair
from hypothesis import given
from hypothesis import strategies as st

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.features.speculation import Context, NgramProposer
from helpers.features.speculation.draft_model import EMBEDDED_DRAFT
from helpers.models import EMBEDDED
from helpers.simulator import Simulator


class Fixed:
    """Proposes the same ids for every sequence."""

    def __init__(self, *proposals):
        self.proposals = proposals

    def propose(self, token_ids, k):
        return list(self.proposals)[:k]


def speculation_of(engine):
    return next(feature for feature in engine.validator.features if feature.name == "speculation")


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


# --- how many ---------------------------------------------------------------------------------------------------------


def simulate(
    proposer, rows: int, max_tokens: int, k: int = 4, next_token=lambda token_ids: len(token_ids) % 7, **config
):
    """Return the engine after `rows` requests at once, in which a token depends on its position."""
    config = EngineConfig(max_batch_size=rows, speculative=proposer, num_speculative_tokens=k, **config)
    engine = Simulator(config, next_token=next_token)
    engine.generate([[9, row] for row in range(rows)], SamplingParams(max_tokens))
    return engine


class Right:
    """Proposes what the simulated model generates."""

    def propose(self, token_ids, k):
        return [(len(token_ids) + position) % 7 for position in range(k)]


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


# --- proposers that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposal", "reason"),
    [
        ([1, 2, 3, 4, 5, 6], "6 ids, although at most"),
        ([1, -1], "-1 is not a token id from 0 to 2147483647"),
        (["a"], "'a' is not a token id"),
        (None, "TypeError"),
        (RuntimeError("on purpose"), "RuntimeError: on purpose"),
    ],
)
def test_a_proposer_that_fails_costs_no_tokens_and_warns_once(proposal, reason):
    class Failing:
        def propose(self, token_ids, k):
            if isinstance(proposal, Exception):
                raise proposal
            return proposal

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = simulate(Failing(), 3, max_tokens=30)
    assert engine.trace.output_tokens == 90 and engine.trace.drafted_tokens == 0
    (message,) = [str(warning.message) for warning in caught]
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


def test_the_draft_model_stops_at_the_end_of_its_context():
    model, tokenizer = random_pair("gpt2")
    config = EngineConfig(speculative="draft", draft_model=model, max_batch_size=2, max_tokens_per_step=50)
    proposer = speculation_of(Engine(model, tokenizer, config)).proposer
    context = Context([5] * 126)
    assert proposer.propose(context, 4) == [], "a long prompt takes several passes"
    assert proposer.propose(context, 4) == []
    assert len(proposer.propose(context, 4)) == 3, "128 positions: of 126 tokens and two drafts"


def test_a_draft_model_changes_no_token_and_saves_passes():
    engine, plain = (Engine(config=EngineConfig(max_batch_size=16, speculative=draft)) for draft in ("draft", None))
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
