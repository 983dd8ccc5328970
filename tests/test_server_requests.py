"""Which requests are accepted, and how every other one is refused: by the name of its parameter, with what to do.

The requests go to a server on a thread of this process.
"""

import functools

import httpx
import openai
import pytest

from helpers import Engine, SamplingParams
from helpers.server.protocol import ChatRequest, CompletionRequest
from tests.support.serving import FOX, OWL, body, embedded_engine, error_of, expected, post, serving, text_of_response

HOT = {"temperature": 1.5, "seed": 1}
OWL_TOKEN = expected(OWL, 16).token_ids[6]


@pytest.fixture(scope="module")
def server():
    """The embedded model on four rows. An iteration computes few tokens, so prompts are computed in chunks."""
    with serving(embedded_engine(max_batch_size=4, max_tokens_per_step=16), max_queue=200) as server:
        yield server
        server.assert_empty()


# --- every accepted parameter works ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({}, {"max_tokens": 16}),
        ({"stop": ["the", "named"]}, {"stop": ["the", "named"]}),
        ({"prompt": FOX, "ignore_eos": True, "max_tokens": 30}, {"ignore_eos": True, "max_tokens": 30}),
        ({"repetition_penalty": 2.0}, {"repetition_penalty": 2.0}),
        ({"temperature": 2, "seed": 3}, {"temperature": 2, "seed": 3}),
        ({"temperature": None, "seed": 4}, {"temperature": 1.0, "seed": 4}),
        ({"temperature": 1.5, "seed": 2, "top_p": 0.4}, {"temperature": 1.5, "seed": 2, "top_p": 0.4}),
        ({"temperature": 1.5, "seed": 2, "top_k": 2}, {"temperature": 1.5, "seed": 2, "top_k": 2}),
        ({"temperature": 1.5, "seed": 2, "min_p": 0.3}, {"temperature": 1.5, "seed": 2, "min_p": 0.3}),
        ({"temperature": 1.0, "seed": 3, "n": 2}, {"temperature": 1.0, "seed": 3, "n": 2}),
        ({"presence_penalty": -2}, {"presence_penalty": -2}),
        (HOT | {"frequency_penalty": 2}, HOT | {"frequency_penalty": 2}),
        ({"logit_bias": {"300": 100, "301": 99.5}}, {"logit_bias": {300: 100, 301: 99.5}}),
        ({"stop_token_ids": [OWL_TOKEN]}, {"stop_token_ids": [OWL_TOKEN]}),
        ({"prompt": FOX, "min_tokens": 15}, {"min_tokens": 15}),
        ({"allowed_token_ids": [*range(400, 900)]}, {"allowed_token_ids": range(400, 900)}),
        ({"bad_words": ["owl", "was"]}, {"bad_words": ["owl", "was"]}),
    ],
    ids=str,
)
def test_a_parameter_does_what_it_does_in_the_engine(server, embedded, settings, params):
    sent = {"prompt": OWL, "temperature": 0} | settings
    response = post(server, **sent).raise_for_status().json()
    outputs = Engine(*embedded).generate(sent["prompt"], SamplingParams(**{"max_tokens": 16} | params))
    assert [choice["text"] for choice in response["choices"]] == [output.text for output in outputs]
    # The same in a chat, where max_tokens has another default.
    chat = {"messages": [{"role": "user", "content": sent.pop("prompt")}], "max_tokens": 16} | sent
    response = post(server, "/v1/chat/completions", **chat).raise_for_status().json()
    assert [choice["message"]["content"] for choice in response["choices"]] == [output.text for output in outputs]


NEUTRAL = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me",
    "stop_token_ids": [], "min_tokens": 0, "allowed_token_ids": None, "bad_words": [],
    "stop": [], "stream": False, "n": 1, "top_k": 0, "min_p": 0, "priority": 3, "deadline": 60,
    "model": "tiny-model", "seed": None, "logprobs": None, "stream_options": None,
}  # fmt: skip


def test_values_that_change_nothing_are_accepted(server):
    for name, value in NEUTRAL.items():
        response = post(server, **body(OWL, 5, **{name: value})).raise_for_status()
        assert text_of_response(response.json()) == expected(OWL, 5).text
    chat = {"messages": [{"role": "user", "content": OWL}], "max_tokens": 5, "temperature": 0, "top_logprobs": None}
    response = post(server, "/v1/chat/completions", **chat | NEUTRAL).raise_for_status()
    assert response.json()["choices"][0]["message"]["content"] == expected(OWL, 5).text


def test_a_message_of_a_response_can_be_sent_again_as_a_dictionary(server):
    said = {"role": "user", "content": OWL}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        create = functools.partial(client.chat.completions.create, model="tiny-model", max_tokens=5)
        message = create(messages=[said]).choices[0].message
        for again in (message, message.to_dict(), message.model_dump()):
            assert create(messages=[said, again, said]).choices[0].message.content


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("max_token", 5), ("a[0].b", 1), ("", 1), ("höhe", 1)])
def test_an_unsupported_parameter_is_refused_by_name(server, name, value):
    requests = {
        "/v1/completions": body(),
        "/v1/chat/completions": {"messages": [{"role": "user", "content": OWL}], "max_tokens": 1},
    }
    for path, request in requests.items():
        error = error_of(post(server, path, **request | {name: value}), 400)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == name and ascii(name).strip("'") in error["message"]


WRONG = [
    ("prompt", ""), ("prompt", []), ("prompt", [""]), ("prompt", [[]]), ("prompt", None), ("prompt", ["a", 5]),
    ("prompt", [-1]), ("prompt", [True]), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("min_p", 2),
    ("top_k", -1), ("n", 0), ("repetition_penalty", 0), ("repetition_penalty", 1e300), ("seed", -1), ("seed", 2**63),
    ("stop", ""), ("stop", ["x"] * 17), ("stop", "x" * 257), ("stream", "yes"), ("stream_options", {"other": 1}),
    ("presence_penalty", -2.1), ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("stop_token_ids", [-1]),
    ("min_tokens", -1), ("allowed_token_ids", []), ("bad_words", ["a"] * 1001), ("bad_words", ["x" * 257]),
    ("ignore_eos", "no"), ("logprobs", 21), ("priority", "high"), ("deadline", 0), ("model", 5), ("echo", "yes"),
    ("prompt_logprobs", 21),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_the_name_of_its_parameter(server, name, value):
    error = error_of(post(server, **body(stream=True) | {name: value}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 2}, "2 greedy outputs would all be the same"),
        ({"max_tokens": 600}, "3 prompt tokens and max_tokens 600, 603 in all, but the model's context is 512"),
        ({"prompt": "a fox " * 600}, "context is 512: shorten the prompt"),
        ({"prompt": [5, 10**6]}, "Token ids must be integers from 0 to"),
        ({"max_tokens": 0}, "set max_tokens to at least 1, or prompt_logprobs to score the prompt"),
        ({"min_tokens": 9}, "min_tokens is 9, more than max_tokens, 8"),
        ({"allowed_token_ids": [10**9]}, "token ids in allowed_token_ids must be from 0 to 1863"),
        ({"n": 500, "temperature": 1}, "asks for 500 sequences, but this server holds at most 204"),
        ({"stream_options": {"include_usage": True}}, "stream_options requires a stream"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_what_to_do(server, settings, message):
    for stream in (False, True):
        extra = {} if "stream_options" in settings else {"stream": stream}
        assert message in error_of(post(server, **body("Once upon a") | extra | settings), 400)["message"]


def test_a_wrong_chat_is_refused_with_the_name_of_its_parameter(server):
    for settings, param, message in (
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "'developer', 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": "x", "names": "Ann"}]}, "messages", "'messages.0.names'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages",
            "messages: Only text content is supported, not 'image_url'.",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 3}, None, "give one of them"),
        ({"top_logprobs": 3}, None, "set logprobs to true"),
        ({"prompt": "x"}, "prompt", "does not know the parameter 'prompt'"),
    ):
        sent = {"messages": [{"role": "user", "content": "x"}]} | settings
        with (
            openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.BadRequestError) as caught,
        ):
            client.chat.completions.create(model="tiny-model", messages=sent.pop("messages"), extra_body=sent)
        assert caught.value.body["param"] == param and message in caught.value.body["message"]


def test_a_missing_prompt_and_a_missing_body(server):
    url = server.url + "/v1/completions"
    error = error_of(post(server, max_tokens=3), 400)
    assert (error["param"], error["message"]) == ("prompt", "The parameter 'prompt' is missing.")
    for sent in ({}, {"json": []}, {"json": "prompt"}, {"content": '{"prompt": "a"}'}, {"data": {"prompt": "a"}}):
        assert "Content-Type: application/json" in error_of(httpx.post(url, **sent), 400)["message"]
    error = error_of(httpx.post(url, content='{"prompt": ', headers={"Content-Type": "application/json"}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", None) and "not valid JSON" in error["message"]


def test_a_body_of_many_mistakes_is_refused_at_once():
    """An error for each of them would keep the event loop busy for seconds."""
    many = 20_000
    wrong = [(CompletionRequest, {"prompt": prompt}) for prompt in ([-1] * many, [[]] * many, [{"text": "x"}] * many)]
    wrong += [(CompletionRequest, {"prompt": "a"} | {str(number): 1 for number in range(many)})]
    wrong += [(CompletionRequest, {"prompt": "a", "logit_bias": {str(number): "x" for number in range(many)}})]
    wrong += [(CompletionRequest, {"prompt": "a", "stop": [""] * many})]
    wrong += [(ChatRequest, {"messages": [{"role": 1}] * many})]
    wrong += [(ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * many}]})]
    for kind, request in wrong:
        with pytest.raises(ValueError) as caught:
            kind.model_validate(request)
        assert 1 <= caught.value.error_count() <= 20
