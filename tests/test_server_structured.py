"""Structured outputs over HTTP, as OpenAI's client and as vLLM's clients describe them."""

import json
import re

import httpx
import openai
import pydantic
import pytest

from tests.support.serving import embedded_engine, serving

MESSAGES = [{"role": "user", "content": "What does the owl eat?"}]
CHAT = {"model": "tiny-model", "messages": MESSAGES, "max_tokens": 150, "temperature": 1}


@pytest.fixture(scope="module")
def plain():
    with serving(embedded_engine(max_batch_size=8)) as server:
        yield server
        server.assert_empty()


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
        parsed = [json.loads(choice.message.content) for choice in anything.choices if choice.finish_reason == "stop"]
        assert parsed and all(isinstance(value, dict) for value in parsed)


@pytest.mark.parametrize(
    ("described", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
        ({"json": {"enum": [1, "x"]}}, '1|"x"'),
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


REFUSED = [
    ({"structured_outputs": {"regex": "a", "json": {}}}, "not json and regex"),
    ({"structured_outputs": {"regex": "(("}}, "unclosed group"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "not both"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}}, "strin"),
    ({"tools": []}, "does not know the parameter 'tools'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_what_cannot_be_met_is_400_with_the_reason(plain, changes, message):
    response = httpx.post(plain.url + "/v1/chat/completions", json=CHAT | changes)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
