"""Structured outputs: every text matches what its request asks for, and no request beside it changes.

The judges are independent: `jsonschema` for schemas, `re` for regular expressions, and for masks the package `regex`,
which knows whether a text can still be continued to a match.
"""

import functools
import gc
import itertools
import json
import random
import re
import time

import jsonschema
import pytest
import regex
import torch
from conftest import PROMPTS, byte_tokenizer, letters, random_pair, wrapped  # noqa: F401
from test_detokenizer import sentencepiece_tokenizer
from test_speculation import WrongAtTheEnd
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import Engine, EngineConfig, SamplingParams, StructuredOutputs
from helpers.engine import ModelInfo
from helpers.features.structured_outputs.description import MAX_CHOICE, MAX_LENGTH, RULE
from helpers.features.structured_outputs.grammar import GrammarCompiler
from helpers.features.structured_outputs.grammar_state import GrammarState
from tests.support.families import CountingScheduler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}
NESTED = 'start: "(" start ")" | "x"'
PHONE = r"\+[1-9][0-9]{1,2} [0-9]{3,5}|(none|no[a-z]*)"


def structured(max_tokens=None, temperature=1.0, **others):
    """Return parameters for a structured output."""
    given = {name: others.pop(name) for name in ("json", "regex", "choice", "grammar") if name in others}
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, structured_outputs=StructuredOutputs(**given), **others
    )


@functools.cache
def random_llama(tokenizer_of):
    """Return a Llama with random weights and this tokenizer, and room for 400 tokens."""
    tokenizer = tokenizer_of()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=400, initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture(params=["embedded", "bytes", "sentencepiece"])
def pair(request):
    """A model and tokenizer of each kind: byte-level BPE, single bytes, sentencepiece with byte tokens."""
    if request.param == "embedded":
        return request.getfixturevalue("embedded")
    return random_llama(byte_tokenizer if request.param == "bytes" else sentencepiece_tokenizer)


# --- the text matches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1, 5])
def test_texts_match_a_regular_expression_one_of_the_choices_and_a_grammar(pair, temperature):
    choices = ["yes", "no", 'perhaps "so"\n', "öffnen", "yes, sir"]
    n = 1 if temperature == 0 else 4
    settings = {"temperature": temperature, "n": n, "max_tokens": 120}
    if temperature:
        settings["seed"] = 3
    params = [structured(regex=PHONE, **settings), structured(choice=choices, **settings)]
    params += [structured(grammar=NESTED, **settings), structured(grammar='root ::= "a" [0-9]? "ü" | "b"', **settings)]
    outputs = iter(Engine(*pair).generate([PROMPTS[6]] * 4, params))
    for matches in (
        lambda text: re.fullmatch(PHONE, text),
        lambda text: text in choices,
        lambda text: text == "(" * text.count("(") + "x" + ")" * text.count("("),
        lambda text: re.fullmatch("a[0-9]?ü|b", text),
    ):
        for output in [next(outputs) for _ in range(n)]:
            assert (
                output.finish_reason == "stop"
                or output.text.startswith("(" * 30)
                or re.match("no[a-z]{50}", output.text)
            )
            assert output.finish_reason == "length" or matches(output.text), output.text


def test_a_schema_may_refer_to_itself(embedded):
    outputs = Engine(*embedded).generate(PROMPTS[0], structured(150, json=TREE, n=6, seed=0))
    texts = [output.text for output in outputs if output.finish_reason == "stop"]
    assert any("below" in text for text in texts)
    for text in texts:
        jsonschema.validate(json.loads(text), TREE)


# --- the mask ---------------------------------------------------------------------------------------------------------


def compiled(tokenizer, vocab_size=None, **given):
    info = ModelInfo(vocab_size or len(tokenizer), 1000, frozenset({tokenizer.eos_token_id}))
    return GrammarCompiler(tokenizer, info).compile(StructuredOutputs(**given))


def allowed(state: GrammarState, token_ids: list[int], scores: torch.Tensor) -> list[int]:
    """Return the tokens that the mask leaves of these scores."""
    state.change(token_ids, scores := scores.clone())
    return scores.isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("text", ["", "+4", "+49 12", "+49 1234", "no", "none", "nox"])
def test_a_token_is_allowed_if_and_only_if_a_matching_text_begins_with_it(embedded, text):
    tokenizer = embedded[1]
    pieces = [tokenizer.decode([id]) for id in range(len(tokenizer))]
    begun = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    state, scores = GrammarState(compiled(tokenizer, regex=PHONE), 2), torch.zeros(len(tokenizer) + 3)
    assert tokenizer.decode(begun) == text
    eos = tokenizer.eos_token_id
    expected = [
        id for id in range(len(pieces)) if id != eos and regex.fullmatch(PHONE, text + pieces[id], partial=True)
    ]
    if re.fullmatch(PHONE, text):
        expected.append(eos)
    assert allowed(state, [7, 7, *begun], scores) == sorted(expected), "logits beyond the vocabulary are excluded, too"
    one_by_one = [id for id in range(len(tokenizer)) if GrammarState(state.grammar, 2).allows([7, 7, *begun], id)]
    assert one_by_one == sorted(expected)


def test_a_state_follows_the_tokens_forth_and_back():
    tokenizer, draw, scores = byte_tokenizer(), random.Random(0), torch.zeros(264)
    ids = tokenizer('{"name": "Ada", "age": -36}')["input_ids"]
    grammar = compiled(tokenizer, json=PERSON)
    state = GrammarState(grammar, 3)
    for length in draw.choices(range(20), k=60):
        token_ids = [5, 5, 5, *ids[:length]]
        state.allows(token_ids, draw.choice([*ids, 0]))
        assert allowed(state, token_ids, scores) == allowed(GrammarState(grammar, 3), token_ids, scores)


def test_a_complete_text_ends_even_if_other_parameters_exclude_eos():
    tokenizer = byte_tokenizer()
    state = GrammarState(compiled(tokenizer, regex="ab?"), 0)
    a, b = tokenizer("ab")["input_ids"]
    scores = torch.zeros(264)
    scores[0] = -torch.inf  # as before min_tokens
    assert allowed(state, [a], scores) == [b]
    assert allowed(state, [a, b], scores) == [0]


def test_a_text_that_has_left_its_grammar_fails_alone(embedded):
    engine, ended = Engine(*embedded), {}
    (expected,) = engine.generate(PROMPTS[0], SamplingParams(8))
    beside = engine.add_request(PROMPTS[0], SamplingParams(8))
    letters_only = embedded[1]("abc", add_special_tokens=False)["input_ids"]
    left_it = engine.add_request(PROMPTS[1], structured(9, 0, regex="[0-9]+"), generated={0: letters_only})
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step()}
    assert ended[left_it].finish_reason == "error" and "cannot be continued" in ended[left_it].error
    assert (ended[beside].token_ids, ended[beside].error) == (expected.token_ids, None)


# --- in company -------------------------------------------------------------------------------------------------------

REQUESTS = [
    (PROMPTS[0], structured(60, json=PERSON, seed=1, n=2)),
    (PROMPTS[1], SamplingParams(30)),
    (PROMPTS[2], structured(40, temperature=0, regex="([a-z]+ ){3,8}end")),
    (PROMPTS[3], structured(60, json=TREE, seed=2, n=3, top_k=30)),
    (PROMPTS[4], SamplingParams(25, temperature=1, seed=3)),
    (PROMPTS[5], structured(60, grammar=NESTED, seed=4, logprobs=1, stop=["))", "d"])),
    (PROMPTS[0], structured(60, json=PERSON, seed=6, repetition_penalty=1.3)),
]


@functools.cache
def alone_in_an_engine(pair):
    engine = Engine(*pair)
    outputs = [engine.generate(prompt, params) for prompt, params in REQUESTS]
    return [(output.token_ids, output.text, output.finish_reason) for several in outputs for output in several]


@pytest.mark.parametrize(
    "config",
    [
        {"max_batch_size": 16},
        {"max_batch_size": 6, "num_blocks": 12, "block_size": 8, "prefix_caching": True},  # preempts
        {"max_batch_size": 4, "execution": "padded"},
        # What the requests get alone, with a wrong last draft: grammars advance, and go back.
        {"max_batch_size": 8, "speculative": WrongAtTheEnd(), "num_blocks": 14, "block_size": 8},
    ],
    ids=str,
)
def test_a_structured_request_gets_the_tokens_that_it_gets_alone(embedded, config):
    (prompts, params), expected = zip(*REQUESTS, strict=True), alone_in_an_engine(embedded)
    texts = [embedded[1](prompt)["input_ids"] for prompt, sampling in REQUESTS for _ in range(sampling.n)]
    if isinstance(proposer := config.get("speculative"), WrongAtTheEnd):
        proposer.texts = [ids + tokens for ids, (tokens, *_) in zip(texts, expected, strict=True)]
    engine = Engine(*embedded, EngineConfig(scheduler_cls=CountingScheduler, **config))
    outputs = engine.generate(list(prompts), list(params), arrivals=[0, 0, 2, 3, 5, 5, 9])
    assert [(output.token_ids, output.text, output.finish_reason) for output in outputs] == expected
    assert bool(engine.scheduler.num_preempted) == ("num_blocks" in config)
    if isinstance(proposer, WrongAtTheEnd):
        assert engine.trace.accepted_tokens > 10, "drafts were accepted"


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "no kind": ({}, "Give exactly one of json, regex, choice and grammar"),
    "two kinds": ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
    "a schema that is not JSON": ({"json": "{"}, "json must be a JSON schema"),
    "a deep schema": ({"json": '{"items":' * 10**4 + "{}" + "}" * 10**4}, "nested too deeply|at most"),
    "a text as choices": ({"choice": "ab"}, "a list of texts"),
    "a long grammar": ({"grammar": "x" * 70000}, "at most 65536"),
    "a long choice": ({"choice": ["a", "b" * (MAX_CHOICE + 1)]}, "has 1025 characters, and at most 1024"),
}
IMPOSSIBLE = {
    "a wrong type": ({"json": {"type": "foo"}}, "json cannot be compiled: Invalid type: foo"),
    "another site's schema": ({"json": {"$ref": "http://127.0.0.1:9/x"}}, "does not fetch"),
    "an invalid expression": ({"regex": "(("}, "regex cannot be compiled: .*unclosed group"),
    "an expression that nothing matches": ({"regex": r"[^\s\S]"}, "No text of this model's tokens matches regex"),
    "a grammar without the rule": ({"grammar": "start: foo"}, "unknown name"),
    "a grammar without an end": ({"grammar": 'start: "a" start'}, "too complex"),
    "billions of states": ({"regex": "x((a{1000}){1000}){1000}"}, "too complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_description_is_refused_with_the_reason(name):
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**given)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_met_is_refused_before_it_takes_a_row(embedded, name):
    given, message = IMPOSSIBLE[name]
    engine = Engine(*embedded)
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPTS[0], structured(**given))
    assert not engine.has_unfinished_requests()


def test_structured_outputs_are_one_of_their_kind_and_end(embedded):
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputs"):
        Engine(*embedded).add_request("a", SamplingParams(structured_outputs="[0-9]+"))
    with pytest.raises(ValueError, match="ignore_eos"):
        structured(regex="a", ignore_eos=True)


def test_models_that_cannot_be_constrained_are_refused_with_the_reason(letters, embedded):  # noqa: F811
    with pytest.raises(ValueError, match="byte-level or has byte tokens"):
        Engine(*letters, EngineConfig(execution="padded")).add_request("a", structured(regex="b"))
    endless = GrammarCompiler(embedded[1], ModelInfo(len(embedded[1]), 100, frozenset()))
    with pytest.raises(ValueError, match="this model has none"):
        endless.compile(StructuredOutputs(regex="a"))


def test_without_the_library_the_error_says_what_to_install(embedded, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match="pip install llguidance"):
        Engine(*embedded).add_request(PROMPTS[0], structured(regex="a"))


def test_a_grammar_is_compiled_once_for_many_requests(embedded, monkeypatch):
    compiler = GrammarCompiler(embedded[1], ModelInfo(len(embedded[1]), 100, frozenset({0})))
    first = compiler.compile(StructuredOutputs(json=PERSON))
    assert compiler.compile(StructuredOutputs(json=json.dumps(PERSON))) is first
    for number in range(40):
        compiler.compile(StructuredOutputs(regex=f"a{number}"))
    assert len(compiler._cached) <= 16


# --- attacks ----------------------------------------------------------------------------------------------------------


def chain(rules: int, notation: str = "{}: {}\n") -> str:
    names = ["start" if notation[2] == ":" else "root", *(f"a{number}" for number in range(rules - 1)), '"x"']
    return "".join(notation.format(*pair) for pair in itertools.pairwise(names))


MULTIPLE = {"type": "integer", "multipleOf": 9999991}
ATTACKS = {
    "a chain of rules": ({"grammar": chain(2900)}, "2900 rules, and at most 500"),
    "a chain of rules of llama.cpp": ({"grammar": chain(2900, "{} ::= {}\n")}, "2900 rules, and at most 500"),
    "brackets": ({"grammar": "start: " + "(" * 3000 + '"x"' + ")" * 3000}, "nested too deeply"),
    "groups": ({"regex": "(" * 3000 + "x" + ")" * 3000}, "nested too deeply"),
    "a large divisor": ({"json": MULTIPLE}, "compiling it takes"),
    "a large divisor in a grammar": ({"grammar": f"start: %json {json.dumps(MULTIPLE)}"}, "compiling it takes"),
}


@pytest.mark.parametrize("text", ["\n", " ", " \n", "a \n", "a[", "a{", "[", "-", "?"])
def test_rules_are_counted_in_linear_time(text):
    """With time in proportion to the square of the length, the longest grammar would stop an event loop for minutes."""
    started = time.perf_counter()
    assert not RULE.search("a" + text * (MAX_LENGTH // len(text)))
    assert time.perf_counter() - started < 1


ENDLESS = "import time\ninput()\nprint('ready', flush=True)\ntime.sleep(10**6)\n"  # a worker that never answers


@pytest.fixture(scope="module")
def compiler():
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer, ModelInfo(len(tokenizer), 1000, frozenset({0})))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_compiler_is_refused_and_the_next_description_compiles(compiler, name):
    given, message = ATTACKS[name]
    with pytest.raises(ValueError, match=message):
        compiler.compile(StructuredOutputs(**given))
    compiler._cached.clear()
    assert compiler.compile(StructuredOutputs(json=PERSON))


def test_an_overflow_of_the_stack_ends_only_the_worker(compiler, monkeypatch):
    monkeypatch.setattr("helpers.features.structured_outputs.description.MAX_RULES", 10**4)
    with pytest.raises(ValueError, match="or the stack"):
        compiler.compile(StructuredOutputs(grammar=chain(2900)))


def test_the_worker_ends_with_its_compiler():
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, ModelInfo(len(tokenizer), 1000, frozenset({0})))
    compiler.compile(StructuredOutputs(json={"type": "string", "maxLength": 2}))
    process = compiler.worker._process
    assert process.poll() is None
    del compiler
    gc.collect()
    assert process.poll() is not None


def test_a_check_has_a_deadline_and_the_next_one_gets_a_new_worker(compiler, monkeypatch, tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    compiler.worker.end()
    with monkeypatch.context() as patch:
        patch.setattr("helpers.features.structured_outputs.worker.PROGRAM", str(tmp_path / "endless.py"))
        patch.setattr("helpers.features.structured_outputs.compilation.DEADLINE", 0.1)
        with pytest.raises(ValueError, match=r"more than 0\.1 seconds"):
            compiler.compile(StructuredOutputs(json={"type": "null"}))
    assert compiler.compile(StructuredOutputs(json={"type": "null"}))


def test_what_takes_long_is_given_up_after_a_moment_and_its_worker_goes_on(compiler):
    assert compiler.compile_quickly(StructuredOutputs(json={"type": "string", "maxLength": 31}))
    process, description = compiler.quick_worker._process, StructuredOutputs(json=MULTIPLE)
    for _ in range(5):
        assert not compiler.compile_quickly(description)
    assert process is compiler.quick_worker._process and process.poll() is None
    assert compiler.compile_quickly(StructuredOutputs(json={"type": "string", "maxLength": 32}))


def test_the_answer_to_an_interrupted_check_is_not_read_as_that_to_the_next(compiler, monkeypatch):
    compiler.compile(StructuredOutputs(json={"type": "null"}))
    stdin = compiler.worker._process.stdin
    flush = stdin.flush

    def interrupted():
        flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stdin, "flush", interrupted)
        compiler.compile(StructuredOutputs(json={"type": "unknown"}))
    assert compiler.compile(StructuredOutputs(json={"type": "string", "maxLength": 7}))


LONG = ["b" + "".join(chr(97 + index * number % 26) for index in range(MAX_CHOICE - 1)) for number in range(1, 60)]


def test_the_longest_choices_that_are_allowed_never_become_too_complex(compiler):
    grammar = compiler.compile(StructuredOutputs(choice=["a", *LONG]))
    for choice in (LONG[0], LONG[-1]):
        state, text = GrammarState(grammar, 0), []
        for character in choice:
            scores = torch.zeros(compiler.model.vocab_size)
            state.change(text, scores)
            text.append(compiler.tokenizer(character)["input_ids"][0])
            assert scores[text[-1]] == 0
        assert state.allows(text, 0)
