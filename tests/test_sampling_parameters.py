"""Penalties, biases, allowed and forbidden tokens: transformers' processors and written-out formulas are the judges."""

import functools

import pytest
import torch
from conftest import PROMPTS, CountingModel, byte_tokenizer, letter_tokenizer, random_pair
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from helpers import Engine, EngineConfig, SamplingParams
from helpers.engine import ModelInfo
from helpers.features.token_rules import TokenRules, TokenRulesMaker
from helpers.features.token_rules.logits import TokenScores

VOCABULARY = 12
LETTER_A = byte_tokenizer()("a")["input_ids"]


class BadWordsOfOutput(NoBadWordsLogitsProcessor):
    """transformers' processor without the prompt, from which it would also take the beginning of a word."""

    def __init__(self, words, prompt_tokens):
        super().__init__([list(word) for word in words])
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids, scores):
        no_word = torch.full((1, 8), 10**6)  # before version 5, short contexts are not searched
        return super().__call__(torch.cat([no_word, input_ids[:, self.prompt_tokens :]], dim=1), scores)


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's formula, written out: logit[j] - count[j] * frequency - (count[j] > 0) * presence."""

    def __init__(self, frequency, presence, prompt_tokens):
        self.frequency, self.presence, self.prompt_tokens = frequency, presence, prompt_tokens

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        generated = input_ids[0, self.prompt_tokens :].tolist()
        for token in set(generated):
            scores[0, token] -= generated.count(token) * self.frequency + self.presence
        return scores


def reference(params, prompt_tokens, rules, vocabulary):
    """Return transformers' processors for all parameters, in vLLM's order."""
    processors = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        processors.append(SuppressTokensLogitsProcessor(set(range(vocabulary)) - set(params.allowed_token_ids)))
    if rules.bad_words:
        processors.append(BadWordsOfOutput(rules.bad_words, prompt_tokens))
    ends = sorted(rules.eos_token_ids | rules.stop_token_ids)
    if ends:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, params.min_tokens, ends))
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[id], bias] for id, bias in params.logit_bias.items()]))
    processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(OpenAIPenalties(params.frequency_penalty, params.presence_penalty, prompt_tokens))
    return processors


ids = st.integers(0, VOCABULARY - 1)
penalties = st.floats(-2, 2, width=16)
some_params = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=16)),
    stop_token_ids=st.lists(ids, max_size=2),
    min_tokens=st.integers(0, 5),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1),
)
bad_words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(
    some_params, bad_words, st.lists(ids, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=6), st.data()
)
def test_processors_change_random_logits_as_those_of_transformers_do(params, bad_words, prompt, generated, data):
    rules = TokenRules(frozenset({11}), frozenset(params.stop_token_ids), bad_words)
    row = data.draw(st.lists(st.floats(-8, 8, width=16), min_size=VOCABULARY, max_size=VOCABULARY))
    judge, rule = reference(params, len(prompt), rules, VOCABULARY), TokenScores(params, len(prompt), rules)
    ends = data.draw(st.lists(st.integers(0, len(generated)), max_size=4))  # tokens come, and are taken back
    for end in [*ends, len(generated)]:
        token_ids, changed = prompt + generated[:end], torch.tensor(row)
        rule.change(token_ids, changed)
        torch.testing.assert_close(changed[None], judge(torch.tensor([token_ids]), torch.tensor([row])))


SETTINGS = [
    {},
    {"repetition_penalty": 1.5},
    {"presence_penalty": -2.0, "frequency_penalty": 0.3},
    {"logit_bias": {65: 6.0, 66: 6.5, 0: -100}},
    {"stop_token_ids": range(60, 110)},
    {"min_tokens": 9, "stop_token_ids": range(200)},
    {"allowed_token_ids": range(40, 120, 2)},
    {"bad_words": ["a"], "frequency_penalty": 1.0, "min_tokens": 5, "logit_bias": {70: 3}},
]


@functools.cache
def tokens_of_transformers(model, tokenizer, number, prompt):
    params = SamplingParams(18, **SETTINGS[number])
    rules = TokenRulesMaker(tokenizer, ModelInfo(len(tokenizer), 128, frozenset({0}))).make(params)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].size(1)
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        logits_processor=reference(params, length, rules, len(tokenizer)),
        eos_token_id=sorted(rules.end_token_ids),
        pad_token_id=0,
    )
    return output[0, length:].tolist()


@pytest.mark.parametrize(("family", "execution"), [("gpt2", "padded"), ("llama", "auto")])
def test_greedy_tokens_equal_those_of_generate_with_the_same_processors(family, execution):
    """All settings share the batches of one engine."""
    pair = random_pair(family)
    requests = [(number, prompt) for prompt in (PROMPTS[2], PROMPTS[7]) for number in range(len(SETTINGS))]
    expected = [tokens_of_transformers(*pair, *request) for request in requests]
    engine = Engine(*pair, EngineConfig(max_batch_size=8, max_tokens_per_step=40, execution=execution))
    params = [SamplingParams(18, **SETTINGS[number]) for number, _ in requests]
    outputs = engine.generate([prompt for _, prompt in requests], params)
    assert [output.token_ids for output in outputs] == expected
    plain = dict(zip((PROMPTS[2], PROMPTS[7]), (expected[0], expected[len(SETTINGS)]), strict=True))
    for number, setting in enumerate(SETTINGS[1:], start=1):
        changed = [ids != plain[prompt] for (n, prompt), ids in zip(requests, expected, strict=True) if n == number]
        assert any(changed), f"{setting} changes nothing, so it proves nothing"


# --- where an output ends -------------------------------------------------------------------------------------------


def letters_engine(**config):
    return Engine(CountingModel(40), letter_tokenizer(), EngineConfig(**config))


def test_a_stop_token_ends_an_output_and_is_not_part_of_its_text():
    engine = letters_engine()
    stopped, ended = engine.generate(["ab", "fg"], SamplingParams(20, stop_token_ids=[5, 6]))
    assert (stopped.token_ids, stopped.text, stopped.finish_reason) == ([3, 4, 5], "cd", "stop")
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([8, 9, 0], "hi", "stop")
    # EOS can be ignored and still be one of the stop tokens.
    (output,) = engine.generate("g", SamplingParams(20, ignore_eos=True, stop_token_ids=[0]))
    assert (output.token_ids, output.text, output.finish_reason) == ([8, 9, 0], "hi", "stop")
    pieces = [output.new_text for output in engine.stream("ab", SamplingParams(20, stop_token_ids=[5]))]
    assert pieces == ["c", "d", ""]


def test_before_min_tokens_neither_eos_nor_a_stop_token_is_chosen_and_stop_strings_are_ignored():
    engine = letters_engine()
    # All logits but that of the next letter are equal, so once it is excluded, the first other token is chosen.
    (output,) = engine.generate("fg", SamplingParams(8, min_tokens=4))
    assert (output.token_ids, output.finish_reason) == ([8, 9, 1, 2, 3, 4, 5, 6], "length")
    (output,) = engine.generate("ab", SamplingParams(20, min_tokens=3, stop_token_ids=[5]))
    assert output.token_ids[:2] == [3, 4]
    assert 5 not in output.token_ids[:3] and 0 not in output.token_ids[:3]
    texts = []
    for min_tokens in range(6):
        (output,) = engine.generate("a", SamplingParams(20, min_tokens=min_tokens, stop=["cd", "e"]))
        texts.append((output.text, len(output.token_ids), output.finish_reason))
    assert texts[:3] == [("b", 3, "stop")] * 3
    assert texts[3] == ("bcd", 4, "stop")  # "cd" is complete with the third token, "e" with the fourth
    assert texts[4:] == [("bcdefghi", 9, "stop")] * 2


# --- bad words ------------------------------------------------------------------------------------------------------


def test_a_bad_word_is_spelled_with_and_without_a_space_before_it(embedded):
    tokenizer = embedded[1]
    make = TokenRulesMaker(tokenizer, ModelInfo(len(tokenizer))).make
    (plain_word, spaced) = make(SamplingParams(bad_words=["fox"])).bad_words
    assert tokenizer.decode(list(plain_word)) == "fox" and tokenizer.decode(list(spaced)) == " fox"
    assert len(spaced) < len(plain_word), "the case that vLLM leaves out"
    assert make(SamplingParams(bad_words=["fox", " fox", "  fox"])).bad_words == (plain_word, spaced)
    # With one token per byte, the space is a token of its own, and the plain spelling matches behind it.
    bytes_ = byte_tokenizer()
    rules = TokenRulesMaker(bytes_, ModelInfo(len(bytes_))).make(SamplingParams(bad_words=["ab"]))
    assert [bytes_.decode(list(word)) for word in rules.bad_words] == ["ab"]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, 1.5, True, "3")),
        *(("temperature", value) for value in (-0.1, float("inf"), float("nan"), "1", None)),
        ("top_k", -1),
        *(("top_p", value) for value in (0, 1.1, float("nan"))),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("repetition_penalty", value) for value in (0, float("inf"))),
        *(("seed", value) for value in (-1, 2**63, "x")),
        *(("stop", value) for value in ("", [""], ["a", 3], 5, ["a"] * 17)),
        *(("n", value) for value in (0, 1.5, 2)),  # 2 greedy outputs would be the same
        ("ignore_eos", "no"),
        *(("presence_penalty", value) for value in (-2.1, "1", float("nan"))),
        *(("frequency_penalty", value) for value in (2.1, None)),
        *(("logit_bias", value) for value in ({5: 101}, {-1: 1}, {"x": 1})),
        *(("stop_token_ids", value) for value in (5, [-1], [1.5], ["5"])),
        *(("allowed_token_ids", value) for value in (5, [], [-1])),
        *(("bad_words", value) for value in ("", [""], ["a", 3], 5, ["a"] * 1001, ["x" * 257], ["x" * 256] * 65)),
        *(("min_tokens", value) for value in (-1, 1.5, None, True, 9)),  # 9 is more than max_tokens
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 0.5, True)),
    ],
)
def test_the_error_for_a_value_out_of_range_names_the_parameter(name, value):
    with pytest.raises(ValueError, match=name if name != "n" else "^n must be|greedy outputs.* leave n at 1"):
        SamplingParams(**{"max_tokens": 8, name: value})


def test_no_tokens_at_all_are_only_for_scoring_and_for_one_output():
    with pytest.raises(ValueError, match=r"max_tokens is 0.*prompt_logprobs to score the prompt"):
        SamplingParams(0)
    with pytest.raises(ValueError, match="all 2 outputs would be empty"):
        SamplingParams(0, prompt_logprobs=1, temperature=1.0, n=2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"logit_bias": {1: 1.0, 257: 1.0}}, "token ids in logit_bias must be from 0 to 256, not 257"),
        ({"stop_token_ids": [300]}, "token ids in stop_token_ids must be from 0 to 256, not 300"),
        ({"allowed_token_ids": [1, 10**12]}, "token ids in allowed_token_ids must be from 0 to 256, not 1000000000000"),
        ({"bad_words": ["fine", " "]}, "' ' in bad_words has no tokens"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "bad_words and min_tokens exclude all of allowed_token_ids"),
        ({"allowed_token_ids": LETTER_A, "bad_words": ["a"]}, "exclude all of allowed_token_ids"),
        ({"min_tokens": 128}, "min_tokens is 128, but an output after 3 prompt tokens can have at most 125"),
    ],
    ids=str,
)
def test_a_request_that_no_token_could_satisfy_is_refused_before_it_takes_a_row(setting, message):
    engine = Engine(*random_pair("llama"))
    TokenRulesMaker(engine.tokenizer, engine.model_info).make(
        SamplingParams(allowed_token_ids=LETTER_A)
    )  # each of the two alone is fine
    with pytest.raises(ValueError, match=message):
        engine.add_request("abc", SamplingParams(**setting))
    assert not engine.has_unfinished_requests()


def test_a_request_whose_tokens_are_all_excluded_on_the_way_fails_alone():
    engine = letters_engine()
    stuck = SamplingParams(6, allowed_token_ids=[2, 3], bad_words=["bc", "bb", "c"])
    with pytest.warns(UserWarning, match="exclude every token here"):
        outputs = engine.generate(["a", "ab"], [stuck, SamplingParams(4)])
    assert (outputs[0].token_ids, outputs[0].finish_reason) == ([2], "error")
    assert outputs[1].text == "cdef"
