"""Beam search finds what transformers' finds, whatever runs beside it, and computes a prompt once for all beams.

Most tests need no model: a runner reads each beam's tokens back from its blocks, and scores next tokens by them. A beam
with a wrong block has a wrong context, so its scores and its successors are wrong.
"""

import itertools
import math
from random import Random

import pytest
from conftest import PROMPTS, alone, random_pair
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_interrupts import disturb

from helpers import Engine, EngineConfig, SamplingParams, load_model
from helpers.engine import POLICIES, SampledToken
from helpers.features.beam_search import BeamRules, beam_search
from tests.support.context_runner import Caller, ContextRunner, check_nothing_is_left, check_outputs, check_state
from tests.support.engine_machine import failing

RULES = list(itertools.product([1.0, 0.0, -1.0, 2.0], [False, True, "never"]))  # length_penalty, early_stopping


# --- on models: transformers' outputs -------------------------------------------------------------------------------


def by_transformers(model, tokenizer, prompt, width, max_tokens, length_penalty=1.0, early_stopping=False, **settings):
    """Return transformers' beams as lists of token ids, texts and scores; for one beam, None instead of scores."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    rules = {"length_penalty": length_penalty, "early_stopping": early_stopping} if width > 1 else {}
    output = model.generate(
        **inputs,
        **rules,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    eos, rows = tokenizer.eos_token_id, output.sequences[:, inputs["input_ids"].size(1) :].tolist()
    token_ids = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    return token_ids, texts, output.sequences_scores.tolist() if width > 1 else None


def check_beams(outputs, expected):
    token_ids, texts, scores = expected
    assert [output.token_ids for output in outputs] == token_ids
    assert [output.text for output in outputs] == texts
    if scores is not None:
        assert [output.score for output in outputs] == pytest.approx(scores, rel=1e-4)


@pytest.mark.parametrize("width", range(1, 9))
def test_outputs_their_order_and_their_scores_are_transformers(random_pairs, width):
    engine = Engine(*random_pairs)
    for number, (length_penalty, early_stopping) in enumerate(RULES[width % 6 :: 6] if width > 1 else RULES[:1]):
        prompt = PROMPTS[(width + number) % len(PROMPTS)]
        outputs = engine.beam_search(prompt, width, 12, length_penalty, early_stopping)
        check_beams(outputs, by_transformers(*random_pairs, prompt, width, 12, length_penalty, early_stopping))


@pytest.mark.parametrize(
    ("family", "prompt_index", "width", "length_penalty"), [("gpt2", 8, 2, 2.0), ("embedded", 9, 4, -0.3)]
)
def test_a_search_stops_when_transformers_stops(family, prompt_index, width, length_penalty):
    model, tokenizer = load_model() if family == "embedded" else random_pair(family)
    engine, prompt, found = Engine(model, tokenizer), PROMPTS[prompt_index], {}
    for early_stopping in [False, True, "never"]:
        found[early_stopping] = engine.beam_search(prompt, width, 30, length_penalty, early_stopping)
        expected = by_transformers(model, tokenizer, prompt, width, 30, length_penalty, early_stopping)
        check_beams(found[early_stopping], expected)
    if length_penalty > 0:
        sooner, later = ([output.token_ids for output in found[when]] for when in (False, "never"))
        assert sooner != later, "this prompt no longer shows the difference: choose another one"


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", {"max_batch_size": 5, "max_tokens_per_step": 7, "num_blocks": 30, "block_size": 4}),
        ("llama", {"max_batch_size": 6, "execution": "padded"}),
    ],
    ids=str,
)
def test_beams_and_other_requests_do_not_change_each_other(family, config):
    pair = random_pair(family)
    engine, others = Engine(*pair, EngineConfig(**config)), PROMPTS[2:6]
    for prompt in others:
        engine.add_request(prompt, SamplingParams(25), request_id=prompt)
    outputs = engine.step() + engine.step()
    beams = engine.beam_search(PROMPTS[0], 4, 10, early_stopping=True)
    check_beams(beams, by_transformers(*pair, PROMPTS[0], 4, 10, early_stopping=True))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ended = {output.request_id: output.token_ids for output in outputs if output.finish_reason}
    assert ended == {prompt: alone(*pair, prompt, 25) for prompt in others}


# --- without a model ------------------------------------------------------------------------------------------------


def logprobs_after(context: list[int]) -> dict[int, float]:
    """Return the log-probabilities of ten tokens after a context, which every token of it decides, best first."""
    draw = Random(str(context))
    logits = {token_id: draw.gauss(0, 2) for token_id in range(10)}
    total = math.log(sum(math.exp(logit) for logit in logits.values()))
    return {token_id: logits[token_id] - total for token_id in sorted(logits, key=logits.get, reverse=True)}


class ScoringRunner(ContextRunner):
    """Gives requests that ask for log-probabilities those of the context that it finds in their blocks."""

    def sample(self, chunk):
        num_logprobs = chunk.sequence.params.logprobs
        if num_logprobs is None:
            return super().sample(chunk)
        best = list(logprobs_after(self.context(chunk)).items())[:num_logprobs]
        return [SampledToken(best[0][0], dict(best))]


def caller_of(num_blocks: int | None = None, block_size: int = 2, **config) -> Caller:
    caller = Caller(num_blocks, block_size, **config)
    caller.engine.runner = ScoringRunner(num_blocks, block_size)
    return caller


def found_alone(prompt: list[int], width: int, max_tokens: int, length_penalty=1.0, early_stopping=False):
    """Return (score, token ids) of the beams that the same rules find without an engine."""
    rules, beams = BeamRules(width, max_tokens, length_penalty, early_stopping, frozenset([0])), [[]]
    while extensions := rules.extend(beams, [logprobs_after(prompt + beam) for beam in beams]):
        beams = [[*beams[beam], token_id] for beam, token_id in extensions]
    return rules.finished


def search(caller: Caller, prompt: list[int], width: int, max_tokens: int, *rules) -> None:
    outputs = beam_search(caller.engine, prompt, width, max_tokens, *rules)
    assert [(output.score, output.token_ids) for output in outputs] == found_alone(prompt, width, max_tokens, *rules)
    assert outputs[0].text == "".join(" abcdefghi"[token_id] for token_id in outputs[0].token_ids if token_id)


TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@settings(max_examples=80, phases=[Phase.generate])
@given(data=st.data())
def test_beams_are_those_found_alone_whatever_the_rows_the_memory_and_the_company(data):
    draw = data.draw
    rows, chunked = draw(st.integers(1, 9)), draw(st.booleans())
    caller = caller_of(
        draw(st.sampled_from([None, 10, 12, 20, 60])),
        max_batch_size=rows,
        max_tokens_per_step=draw(st.integers(rows, 20)) if chunked else 20,
        chunked_prefill=chunked,
        mixed_batches=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(sorted(POLICIES))),
    )
    for name, (prompt, max_tokens) in enumerate(draw(st.lists(st.tuples(TOKENS, st.integers(1, 9)), max_size=6))):
        caller.add(str(name), prompt, max_tokens, n=1 + name % 2)
        for _ in range(draw(st.integers(0, 2))):
            caller.step()
    for _ in range(2):
        prompt, rules = draw(TOKENS), draw(st.sampled_from(RULES))
        search(caller, prompt, draw(st.integers(1, 8)), draw(st.integers(1, 9)), *rules)
        check_state(caller.engine)
    caller.finish()
    check_outputs(caller)
    check_nothing_is_left(caller.engine)


def test_a_prompt_is_computed_once_and_every_beam_computes_one_token_per_round():
    caller, prompt, width = caller_of(40, max_batch_size=8, prefix_caching=False), [3, 1, 4, 1, 5], 6
    search(caller, prompt, width, 9, 0.0, "never")
    trace = caller.engine.trace
    assert trace.prompt_tokens == len(prompt)
    assert [forward_pass.tokens for forward_pass in trace.passes] == [len(prompt)] + [width] * (len(trace.passes) - 1)


def test_without_max_tokens_beams_run_until_eos_or_the_end_of_the_context():
    outputs = beam_search(caller_of(200).engine, [3, 1, 4], 2)
    assert [(output.score, output.token_ids) for output in outputs] == found_alone([3, 1, 4], 2, 97)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_an_interrupted_search_leaves_nothing_behind_and_loses_no_output_of_others():
    for number in range(4):
        caller = caller_of(20)
        caller.add("other", [1, 2], 5)
        disturb(caller.engine.runner, "run", number)
        with pytest.raises(KeyboardInterrupt):
            search(caller, [3, 4, 1, 2, 5], 3, 6, 1.0, "never")
        check_state(caller.engine)
        assert set(caller.engine.scheduler.requests) <= {"other"} and not caller.engine.outputs._subscribers
        search(caller, [3, 4], 2, 2)
        caller.finish()
        check_outputs(caller)
        check_nothing_is_left(caller.engine)


def test_a_failed_pass_ends_the_search_and_no_request_outside_of_that_pass(random_pairs):
    engine = Engine(*random_pairs, EngineConfig(max_batch_size=4))
    error = "The beam search failed: ForwardFailed: on purpose"
    with failing(engine.runner.model, 3), pytest.raises(RuntimeError, match=error):
        engine.beam_search(PROMPTS[0], 3, 10)
    assert not engine.has_unfinished_requests() and engine.block_manager.used == 0
    check_beams(engine.beam_search(PROMPTS[0], 3, 10), by_transformers(*random_pairs, PROMPTS[0], 3, 10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer of at least 1, not 0"),
        ({"beam_width": 10}, "beam_width is 10, but the model has only 9 tokens beside EOS"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": 99}, "the model's context is 100"),
        ({"length_penalty": math.nan}, "length_penalty must be a number from -10 to 10, not nan"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or \"never\", not 'always'"),
        ({"prompt": []}, "has no tokens"),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing_behind(arguments, message):
    caller = caller_of(60)
    with pytest.raises(ValueError, match=message):
        beam_search(caller.engine, **({"prompt": [3, 4]} | arguments))
    check_nothing_is_left(caller.engine)


def test_a_search_that_could_never_recompute_a_beam_is_refused():
    caller = caller_of(chunked_prefill=False, max_tokens_per_step=8)
    search(caller, [3, 4, 5, 6], 2, 5)
    with pytest.raises(ValueError, match="compute 9 tokens at once, but an iteration computes at most 8"):
        beam_search(caller.engine, [3, 4, 5, 6], 2, 6)
    check_nothing_is_left(caller.engine)
