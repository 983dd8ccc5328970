"""Tool calls and structured outputs over HTTP, with OpenAI's own client.

The embedded model gets chat templates that know tools. It was not trained for them and calls at random, but with a
grammar every call is valid.
"""

import copy
import json
import re

import httpx
import jsonschema
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import Engine, EngineConfig
from helpers.server.output_delta import OutputDelta
from helpers.server.tool_calls import ToolCallFormatter, ToolCallParser
from helpers.server.tools import CallNotation, Function, ToolUse, find_notation
from tests.support.serving import serving

HERMES = """\
{%- if tools %}<system>Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|endoftext|>{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '' if loop.first else '\\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|endoftext|>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
# As Llama 3.1: no tags, other names, and only one call.
LLAMA = """\
{%- if tools %}<system>Tools: {{ tools | tojson }}<|endoftext|>{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception("one call") }}{% endif %}
{%- set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}<|endoftext|>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
# As Llama 3.2's other notation.
FUNCTION = """\
{%- if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<function={{ call.function.name }}>{{ call.function.arguments | tojson }}
{{- '</function>' }}{% endfor %}<|endoftext|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
TEMPLATES = {"Hermes": HERMES, "Llama": LLAMA, "function": FUNCTION}
NOTATIONS = {
    "Hermes": CallNotation(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", '}\n</tool_call>\n<tool_call>\n{"name": "'
    ),
    "Llama": CallNotation('{"name": "', '", "parameters": ', "}", None),
    "function": CallNotation("<function=", ">", "</function>", "</function><function="),
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Żyrardów"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get-time"}},
]
SCHEMAS = {"get_weather": WEATHER, "get-time": {"type": "object", "additionalProperties": False}}
MESSAGES = [{"role": "user", "content": "What does the owl eat?"}]
CHAT = {"model": "tiny-model", "messages": MESSAGES, "max_tokens": 150, "temperature": 1}


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module", params=TEMPLATES)
def client(request, embedded):
    """A client of the embedded model with one of the templates."""
    model, tokenizer = embedded
    engine = Engine(model, with_template(tokenizer, TEMPLATES[request.param]), EngineConfig(8, trace_length=100))
    with serving(engine) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        client.template = request.param
        yield client
        server.assert_empty()


@pytest.fixture(scope="module")
def plain(embedded):
    """A server whose model has no chat template."""
    with serving(Engine(*embedded, EngineConfig(8, trace_length=100))) as server:
        yield server
        server.assert_empty()


# --- the notation of a template -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_itself_shows_how_its_model_writes_calls(embedded, name):
    assert find_notation(with_template(embedded[1], TEMPLATES[name])) == NOTATIONS[name]


def test_the_embedded_model_answers_questions_and_makes_the_call_that_is_required():
    engine = Engine(config=EngineConfig(2, trace_length=100))
    with serving(engine) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        question = [{"role": "user", "content": "How do you bake bread?"}]
        answer = client.chat.completions.create(model="tiny-model", messages=question, max_tokens=80)
        assert "flour" in answer.choices[0].message.content
        settings = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 150}
        (call,) = client.chat.completions.create(**CHAT | settings).choices[0].message.tool_calls[:1]
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "it has no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not know tools"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", "does not write calls as"),
        (
            "{{ tools }}{{ raise_exception('no tools!') if messages | length > 2 }}{{ messages[0].content }}",
            "no tools!",
        ),
        (HERMES.replace("<tool_call>", "<|endoftext|>"), "does not write calls|special token"),
    ],
)
def test_a_template_that_cannot_call_tools_is_refused_with_the_reason(embedded, template, reason):
    with pytest.raises(ValueError, match=f"This model cannot call tools: .*({reason})"):
        find_notation(with_template(embedded[1], template))


# --- calls ----------------------------------------------------------------------------------------------------------


def check_call(call) -> None:
    assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}", call.id)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_required_call_is_valid_whatever_the_model(client):
    response = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required", n=8, seed=1)
    names = set()
    for choice in response.choices:
        if choice.finish_reason == "length":  # so many calls that there was no room for another
            continue
        assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
        assert len(choice.message.tool_calls) == 1 or client.template != "Llama"
        names.update(call.function.name for call in choice.message.tool_calls)
        for call in choice.message.tool_calls:
            check_call(call)
    assert names == set(SCHEMAS)


def test_a_model_may_answer_or_call(client):
    response = client.chat.completions.create(**CHAT | {"max_tokens": 25}, tools=TOOLS, n=2, seed=4)
    for choice in response.choices:
        assert choice.message.content and choice.message.tool_calls is None
        assert choice.finish_reason in ("stop", "length")
    none = client.chat.completions.create(
        **CHAT | {"max_tokens": 25, "temperature": 0}, tools=TOOLS, tool_choice="none"
    )
    without = client.chat.completions.create(**CHAT | {"max_tokens": 25, "temperature": 0})
    assert none.choices[0].message.content == without.choices[0].message.content, "its prompt lists no tools"


def test_a_stream_has_the_calls_of_the_complete_response(client):
    settings = CHAT | {"tools": TOOLS, "tool_choice": "required", "n": 2, "seed": 5}
    whole = client.chat.completions.create(**settings)
    names, arguments, ids, reasons, roles = {}, {}, {}, {}, {}
    for chunk in client.chat.completions.create(**settings, stream=True):
        (choice,) = chunk.choices
        roles.setdefault(choice.index, choice.delta.role)
        for call in choice.delta.tool_calls or ():
            key = choice.index, call.index
            if call.id is not None:
                assert key not in ids and call.type == "function"
                ids[key], names[key] = call.id, call.function.name
            arguments[key] = arguments.get(key, "") + call.function.arguments
        reasons[choice.index] = choice.finish_reason
    expected = {
        (choice.index, number): (call.function.name, call.function.arguments)
        for choice in whole.choices
        for number, call in enumerate(choice.message.tool_calls)
    }
    assert {key: (names[key], arguments[key]) for key in names} == expected and len(set(ids.values())) == len(ids)
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert set(roles.values()) == {"assistant"}


def test_the_helper_of_the_client_runs_a_chat_with_calls_and_results(client):
    first = client.chat.completions.create(
        **CHAT, tools=TOOLS, tool_choice="required", seed=6, parallel_tool_calls=False
    )
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    chat = CHAT | {"messages": [*MESSAGES, message, result], "max_tokens": 5}
    second = client.chat.completions.create(**chat, tools=TOOLS)
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


# --- the parser -----------------------------------------------------------------------------------------------------

ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.recursive(st.text(max_size=5) | st.integers(), st.lists), max_size=3
)


@settings(max_examples=60)
@given(
    st.sampled_from(list(NOTATIONS)),
    st.text(max_size=12) | st.sampled_from(["", "<tool", "<", '{"na', "I see.\n", "<function", "<tool_call"]),
    st.lists(st.tuples(st.sampled_from(["get_weather", "f"]), ARGUMENTS), max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.booleans(),
)
def test_the_parser_finds_text_and_calls_however_the_text_is_cut(name, said, calls, sizes, is_auto):
    notation = NOTATIONS[name]
    calls = calls if notation.between else calls[:1]
    said = said if is_auto and notation.trigger not in said else ""
    is_auto = is_auto or not calls
    bodies = [f"{tool}{notation.middle}{json.dumps(arguments)}" for tool, arguments in calls]
    text = said + (notation.begin + (notation.between or "").join(bodies) + notation.end if calls else "")
    parser = ToolCallParser(ToolUse(notation, (), "auto" if is_auto else "required"))
    content, found, place = "", [], 0
    while place < len(text) or not text:
        size = sizes[place % len(sizes)]
        part, place = text[place : place + size], place + size
        delta = parser.push(part, is_last=place >= len(text))
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(found):
                found.append([call["function"]["name"], ""])
            found[call["index"]][1] += call["function"]["arguments"]
        if not text:
            break
    assert content == said
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls and parser.num_calls == len(calls)


def test_a_call_that_max_tokens_cuts_keeps_its_finish_reason():
    use = ToolUse(NOTATIONS["Hermes"], (), "auto")
    formatter = ToolCallFormatter("id", "model", None, use=use)
    text = 'So:<tool_call>\n{"name": "f", "arguments": {"a": "lo'
    entry = formatter._choice(0, OutputDelta("id", 0, text, [1], None, 1, "length"))
    assert entry["finish_reason"] == "length" and entry["message"]["content"] == "So:"
    assert entry["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "lo'}


# --- response formats -----------------------------------------------------------------------------------------------


NOTHING = {"type": "object", "additionalProperties": False}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=8)
    age: int


def test_the_client_parses_a_response_with_a_schema(plain):
    with openai.OpenAI(base_url=plain.url + "/v1", api_key="x", max_retries=0) as client:
        response = client.chat.completions.parse(**CHAT, response_format=Person, seed=1)
        assert isinstance(response.choices[0].message.parsed, Person)
        anything = client.chat.completions.create(
            **CHAT | {"max_tokens": 300}, response_format={"type": "json_object"}, seed=4, n=3
        )
        parsed = [json.loads(one.message.content) for one in anything.choices if one.finish_reason == "stop"]
        assert parsed and all(isinstance(one, dict) for one in parsed)
        greedy = CHAT | {"temperature": 0, "max_tokens": 10}
        texts = [
            client.chat.completions.create(**greedy, **more) for more in ({}, {"response_format": {"type": "text"}})
        ]
        assert texts[0].choices == texts[1].choices


@pytest.mark.parametrize(
    ("described", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
        ({"json": {"enum": [1, "x"]}}, '1|"x"'),
        ({"json": '{"enum": [1, "x"]}'}, '1|"x"'),
        ({"json": NOTHING}, "{}"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_structured_output_is_described_as_for_vllm(plain, path, described, pattern):
    given = {"prompt": "So"} if path == "completions" else {"messages": MESSAGES}
    sent = given | {"structured_outputs": described, "max_tokens": 60, "n": 3, "seed": 1}
    response = httpx.post(f"{plain.url}/v1/{path}", json=sent).raise_for_status().json()
    for choice in response["choices"]:
        assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])


BAD_TOOL = {"type": "function", "function": {"name": "no spaces"}}
REFUSED = [
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "not json and regex"),
    ({"structured_outputs": {"json": {}, "json_object": True}}, "not both"),
    ({"structured_outputs": {"regex": "(("}}, "unclosed group"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "not both"),
    ({"structured_outputs": {"guided": "a"}}, "structured_outputs.guided"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "json_schema' is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}}, "strin"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"tools": TOOLS}, "This model cannot call tools: it has no chat template"),
    ({"tools": [BAD_TOOL]}, "tools"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "same name"),
    ({"tool_choice": "auto"}, "tool_choice requires tools"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "not both"),
    ({"messages": [{"role": "tool", "content": "sunny"}]}, "tool_call_id"),
    ({"messages": [{"role": "tool", "content": "sunny", "tool_call_id": "a"}]}, "no chat template"),
    ({"messages": [{"role": "assistant"}]}, "needs content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "at least 1 item"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_what_cannot_be_met_is_400_with_the_reason(plain, changes, message):
    response = httpx.post(plain.url + "/v1/chat/completions", json=CHAT | changes)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_tools_that_cannot_be_called_are_400_with_the_reason(client):
    for changes, message in [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "not among the tools"),
        ({"tools": [{"type": "function", "function": {"name": "auto"}}],
          "tool_choice": {"type": "function", "function": {"name": "auto"}}}, "rename it"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, '"object"'),
        ({"tools": TOOLS, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]}, "are not JSON"),
    ]:  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**CHAT | changes)


def test_the_grammar_of_a_call_leaves_no_other_way_after_its_beginning(embedded):
    from tests.test_structured_outputs import compiled

    for name, notation in NOTATIONS.items():
        functions = tuple(Function(**tool["function"]) for tool in TOOLS)
        described = ToolUse(notation, functions, "auto").structured_outputs
        grammar = compiled(embedded[1], grammar=described.grammar).start
        opening = f"Let me see. {notation.begin}get"
        for text, is_possible in [("", True), ("_weather", True), ("-time", True), ("_other", False), (" the", False)]:
            matcher = grammar.deep_copy()
            ids = embedded[1](opening + text, add_special_tokens=False)["input_ids"]
            assert (matcher.try_consume_tokens(ids) == len(ids)) == is_possible, (name, text)
