"""What OpenAI's clients get: the engine's own tokens, in OpenAI's formats; and who asks wrongly is told which part.

Everything here asks a server in a process of its own, mostly with the official client. What goes wrong on the way is
test_server_faults.py.
"""

import asyncio
import itertools
import json
import re
import socket
import warnings

import httpx
import openai
import psutil
import pytest
from conftest import PROMPTS, alone, random_pair

from helpers import Engine, EngineConfig, SamplingParams
from helpers.server import __main__ as command
from helpers.server import launch
from helpers.server.answers import ChatFormat, CompletionFormat
from tests.serving import body, embedded_engine, events_of, expected, serving, text_of_chunks

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 4
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('the user begins') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPOKEN = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Once upon "}, {"type": "text", "text": "a time"}]},
]


@pytest.fixture(scope="module")
def server():
    """The embedded model on four rows; few tokens an iteration, so that prompts are read in pieces."""
    with launch("--rows", str(ROWS), "--tokens-per-step", "16", "--max-queue", "200") as launched:
        yield launched


@pytest.fixture(scope="module")
def ask(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a chat template, in a folder."""
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = random_pair("llama")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def keyed(folder):
    """Somebody else's model, behind a key."""
    with launch("--model", str(folder), "--name", "mine", "--api-key", "schlüssel", "--rows", "3") as launched:
        yield launched


KEY = {"Authorization": "Bearer schlüssel".encode()}


def greedy(ask, prompt, max_tokens=20, **settings):
    return ask.completions.create(model="tiny-model", prompt=prompt, max_tokens=max_tokens, temperature=0, **settings)


def refused(ask, **settings) -> dict:
    with pytest.raises(openai.BadRequestError) as caught:
        ask.completions.create(**{"model": "tiny-model", "prompt": "The fox", "max_tokens": 2} | settings)
    assert caught.value.body.keys() == {"message", "type", "param", "code"}
    assert caught.value.body["type"] == "invalid_request_error"
    return caught.value.body


# --- the engine's own tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS[:5])
def test_an_answer_is_what_the_model_says_alone(ask, embedded, prompt):
    answer = greedy(ask, prompt, 40)
    tokens = alone(*embedded, prompt, 40)
    assert answer.choices[0].text == expected(prompt, 40).text
    assert answer.choices[0].finish_reason == expected(prompt, 40).finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(embedded[1](prompt)["input_ids"]),
        len(tokens),
        len(embedded[1](prompt)["input_ids"]) + len(tokens),
    )
    assert (answer.object, answer.model) == ("text_completion", "tiny-model") and answer.id.startswith("cmpl-")


def test_everybody_gets_their_own_tokens_in_any_company(server):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(number):
                prompt, most, stream = PROMPTS[number % len(PROMPTS)], 1 + 7 * number % 31, number % 2 == 1
                answer = await client.completions.create(
                    model="tiny-model", prompt=prompt, max_tokens=most, temperature=0, stream=stream
                )
                pieces = [chunk.choices[0].text async for chunk in answer] if stream else [answer.choices[0].text]
                assert "".join(pieces) == expected(prompt, most).text, (prompt, most, stream)

            await asyncio.gather(*map(one, range(4 * ROWS * 2)))

    asyncio.run(all_at_once())


def test_a_stream_has_a_chunk_for_every_token_and_joins_to_the_whole_text(ask):
    for prompt in PROMPTS[:4]:
        whole = expected(prompt, 30)
        chunks = list(greedy(ask, prompt, 30, stream=True))
        assert len(chunks) == len(whole.token_ids)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
            whole.finish_reason
        ]
        assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
        assert all(chunk.usage is None for chunk in chunks)


def test_the_last_chunk_counts_tokens_if_it_is_asked_to(ask):
    *chunks, last = greedy(ask, PROMPTS[0], 9, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens, last.usage.prompt_tokens) == ([], len(chunks), 4)
    without = list(greedy(ask, PROMPTS[0], 9, stream=True, stream_options={"include_usage": False}))
    assert len(without) == len(chunks) and without[-1].choices


def test_a_stream_on_the_wire(server):
    with httpx.stream("POST", server.url + "/v1/completions", json=body(max_tokens=3, stream=True)) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert re.fullmatch(r"(data: \{.*\}\n\n){3}data: \[DONE\]\n\n", text)


def test_half_characters_and_stop_strings_are_not_shown_in_pieces(keyed):
    """A random model of bytes says half characters all the time."""
    engine, shown = Engine(*random_pair("llama")), ""
    for prompt in PROMPTS[:6]:
        (whole,) = engine.generate(prompt, SamplingParams(30, ignore_eos=True))
        stop = whole.text[3:5]
        for settings in ({}, {"stop": stop}):
            (alone,) = engine.generate(prompt, SamplingParams(30, ignore_eos=True, **settings))
            asked = body(prompt, 30, ignore_eos=True, stream=True, **settings)
            with httpx.stream("POST", keyed.url + "/v1/completions", json=asked, headers=KEY) as response:
                chunks = list(events_of(response.iter_lines()))
            assert text_of_chunks(chunks) == alone.text
            assert chunks[-2]["choices"][0]["finish_reason"] == alone.finish_reason
            shown += alone.text
            assert not settings or alone.text == whole.text[: whole.text.find(stop)]
    assert "\ufffd" in shown and any(0x7F < ord(character) < 0xFFFD for character in shown)


def test_several_prompts_as_text_or_ids_are_answered_in_their_order(ask, embedded):
    prompts = PROMPTS[:5]
    ids = [embedded[1](prompt)["input_ids"] for prompt in prompts]
    wanted = [expected(prompt, 12).text for prompt in prompts]
    for several in (prompts, ids):
        answer = greedy(ask, several, 12)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(wanted))
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        texts = [""] * len(prompts)
        for chunk in greedy(ask, several, 12, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == wanted
    assert greedy(ask, ids[0], 12).choices[0].text == wanted[0], "one list of ids is one prompt"
    assert greedy(ask, [prompts[0]], 12).choices[0].text == wanted[0]


def test_several_answers_to_several_prompts(ask, embedded):
    settings = {"seed": 11, "n": 3, "temperature": 1.0, "max_tokens": 8}
    outputs = Engine(*embedded).generate(PROMPTS[:2], SamplingParams(**settings))
    answer = ask.completions.create(model="tiny-model", prompt=PROMPTS[:2], **settings)
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(output.text for output in outputs))
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    assert answer.usage.prompt_tokens == 4 + 5
    texts = [""] * 6
    for chunk in ask.completions.create(model="tiny-model", prompt=PROMPTS[:2], stream=True, **settings):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_a_seed_repeats_and_no_seed_does_not(ask):
    def texts(**settings):
        create = ask.completions.create
        return [create(model="tiny-model", prompt="Once", max_tokens=12, **settings).choices[0].text for _ in range(3)]

    assert len(set(texts(seed=5))) == 1
    assert len(set(texts())) > 1, "OpenAI's temperature is 1 if none is given"
    assert texts(seed=5)[0] != texts(seed=6)[0]


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_of_a_completion(ask, embedded):
    tokenizer = embedded[1]
    output = expected("Once upon a time", 10, logprobs=3)
    choice = greedy(ask, "Once upon a time", 10, logprobs=3).choices[0]
    spelled = [tokenizer.decode([token]) for token in output.token_ids]
    assert choice.logprobs.tokens == spelled
    chosen = [known[token] for token, known in zip(output.token_ids, output.logprobs, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
    for token, top in zip(spelled, choice.logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and max(top, key=top.get) == token  # greedy
    none_best = greedy(ask, "Once upon a time", 3, logprobs=0).choices[0].logprobs
    assert [[token] for token in none_best.tokens] == [list(top) for top in none_best.top_logprobs]
    assert greedy(ask, "Once upon a time", 3).choices[0].logprobs is None

    pieces = [chunk.choices[0].logprobs for chunk in greedy(ask, "Once upon a time", 10, logprobs=3, stream=True)]
    assert [piece.tokens for piece in pieces] == [[token] for token in spelled]
    assert [piece.token_logprobs[0] for piece in pieces] == pytest.approx(chosen, abs=1e-4)


def test_the_token_itself_is_among_the_best_ones_of_a_completion_and_parts_of_characters_keep_apart(ask, embedded):
    tokenizer = embedded[1]
    drawn = ask.completions.create(
        model="tiny-model",
        prompt="é☃",
        max_tokens=60,
        logprobs=1,
        temperature=2,
        seed=5,
        extra_body={"ignore_eos": True},
    )
    said = drawn.choices[0].logprobs
    assert all(token in top and len(top) <= 2 for token, top in zip(said.tokens, said.top_logprobs, strict=True))
    assert {len(top) for top in said.top_logprobs} == {1, 2}, "some are the best, some are not"
    parts = [id for id in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([id])]
    shape = CompletionFormat("id", "model", tokenizer)
    assert len(parts) > 100 and len({shape._spelled(id) for id in parts}) == len(parts)
    assert ChatFormat("id", "model", tokenizer)._token(parts[0], -1.0)["bytes"] is None


def test_logprobs_of_a_chat(ask):
    said = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 10, "temperature": 0}
    output = expected("Once upon a time", 10, logprobs=2)
    choice = ask.chat.completions.create(model="tiny-model", logprobs=True, top_logprobs=2, **said).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content == output.text
    for token, id, known in zip(tokens, output.token_ids, output.logprobs, strict=True):
        assert token.logprob == pytest.approx(known[id], abs=1e-4)
        assert bytes(token.bytes).decode() == token.token
        assert token.top_logprobs[0].token == token.token and len(token.top_logprobs) == 2
    bare = ask.chat.completions.create(model="tiny-model", logprobs=True, **said).choices[0]
    assert [token.top_logprobs for token in bare.logprobs.content] == [[]] * 10
    assert ask.chat.completions.create(model="tiny-model", **said).choices[0].logprobs is None
    stream = ask.chat.completions.create(model="tiny-model", logprobs=True, top_logprobs=2, stream=True, **said)
    assert [chunk.choices[0].logprobs.content[0].token for chunk in stream] == [token.token for token in tokens]


# --- chat -----------------------------------------------------------------------------------------------------------


def test_without_a_template_a_chat_is_its_texts_line_by_line(ask):
    answer = ask.chat.completions.create(model="tiny-model", messages=SPOKEN, max_completion_tokens=15, temperature=0)
    assert answer.choices[0].message.content == expected("Be kind.\nOnce upon a time", 15).text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    chunks = list(
        ask.chat.completions.create(model="tiny-model", messages=SPOKEN, max_tokens=15, temperature=0, stream=True)
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content for delta in deltas) == answer.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_without_a_limit_goes_on_to_its_end(ask, embedded):
    answer = ask.chat.completions.create(
        model="tiny-model", messages=[{"role": "user", "content": "Once upon"}], temperature=0
    )
    (output,) = Engine(*embedded).generate("Once upon")
    assert answer.choices[0].message.content == output.text
    assert answer.usage.completion_tokens == len(output.token_ids) > 16


def test_a_models_own_template_is_used(keyed, folder):
    prompt = "<system>Be kind.<user>Once upon a time<assistant>"
    (wanted,) = Engine(*random_pair("llama")).generate(prompt, SamplingParams(20))
    asked = {"messages": SPOKEN, "max_tokens": 20, "temperature": 0, "model": "mine"}
    answer = httpx.post(keyed.url + "/v1/chat/completions", json=asked, headers=KEY).json()
    assert answer["choices"][0]["message"]["content"] == wanted.text
    assert answer["usage"]["prompt_tokens"] == len(prompt) and answer["model"] == "mine"
    reversed = {"messages": [{"role": "assistant", "content": "I"}]}
    response = httpx.post(keyed.url + "/v1/chat/completions", json=reversed, headers=KEY)
    assert response.status_code == 400 and "the user begins" in response.json()["error"]["message"]


# --- every accepted parameter works ---------------------------------------------------------------------------------


FOX, OWL = "The quick brown fox", "Once upon a time"  # the first ends soon, the second goes on for long


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({}, {"max_tokens": 16}),
        ({"stop": "owl"}, {"stop": "owl"}),
        ({"stop": ["the", "named"]}, {"stop": ["the", "named"]}),
        ({"prompt": FOX, "ignore_eos": True, "max_tokens": 30}, {"ignore_eos": True, "max_tokens": 30}),
        ({"repetition_penalty": 2.0}, {"repetition_penalty": 2.0}),
        ({"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 3}),
        ({"temperature": 2, "seed": 3}, {"temperature": 2, "seed": 3}),
        ({"temperature": None, "seed": 4}, {"temperature": 1.0, "seed": 4}),
        ({"temperature": 1.5, "seed": 3, "top_p": 0.4}, {"temperature": 1.5, "seed": 3, "top_p": 0.4}),
        ({"temperature": 1.5, "seed": 3, "top_k": 2}, {"temperature": 1.5, "seed": 3, "top_k": 2}),
        ({"temperature": 1.5, "seed": 3, "min_p": 0.3}, {"temperature": 1.5, "seed": 3, "min_p": 0.3}),
        ({"temperature": 1.0, "seed": 3, "n": 2}, {"temperature": 1.0, "seed": 3, "n": 2}),
    ],
    ids=str,
)
def test_a_parameter_does_what_it_does_in_the_engine(server, embedded, settings, params):
    sent = {"prompt": OWL, "temperature": 0} | settings
    answer = httpx.post(server.url + "/v1/completions", json=sent).raise_for_status().json()
    outputs = Engine(*embedded).generate(sent["prompt"], SamplingParams(**{"max_tokens": 16} | params))
    assert [choice["text"] for choice in answer["choices"]] == [output.text for output in outputs]
    # In a chat, too; there, max_tokens has another default.
    said = {"messages": [{"role": "user", "content": sent.pop("prompt")}], "max_tokens": 16} | sent
    answer = httpx.post(server.url + "/v1/chat/completions", json=said).raise_for_status().json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [output.text for output in outputs]


def test_the_settings_of_the_test_above_make_a_difference():
    """Else that test would say nothing."""
    settings = [{}, {"stop": ("owl",)}, {"stop": ("the", "named")}, {"repetition_penalty": 2.0}]
    settings += [{"temperature": 1.5, "seed": 3} | one for one in ({}, {"top_p": 0.4}, {"top_k": 2}, {"min_p": 0.3})]
    assert len({expected(OWL, 16, **one).text for one in settings}) == len(settings)
    assert len(expected(FOX, 30, ignore_eos=True).token_ids) == 30 > len(expected(FOX, 30).token_ids)


NEUTRAL = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "echo": False, "suffix": None,
    "best_of": 1, "stop": [], "stream": False, "n": 1, "top_k": 0, "min_p": 0, "priority": 3, "deadline": 60,
    "model": "tiny-model", "seed": None, "logprobs": None, "stream_options": None,
}  # fmt: skip


def test_values_that_change_nothing_are_accepted(server):
    for name, value in NEUTRAL.items():
        response = httpx.post(server.url + "/v1/completions", json=body(OWL, 5, **{name: value}))
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == expected(OWL, 5).text
    both = {"best_of": 2, "n": 2, "temperature": 1}
    assert httpx.post(server.url + "/v1/completions", json=body(OWL, 5) | both).status_code == 200
    said = {"messages": [{"role": "user", "content": OWL}], "max_tokens": 5, "temperature": 0, "top_logprobs": None}
    only_completions = ("echo", "suffix", "best_of")
    neutral = {name: value for name, value in NEUTRAL.items() if name not in only_completions}
    answer = httpx.post(server.url + "/v1/chat/completions", json=said | neutral)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == expected(OWL, 5).text


UNSUPPORTED = [
    ("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"5": 1}), ("echo", True),
    ("suffix", "the end"), ("best_of", 2), ("tools", []), ("tool_choice", "none"), 
    ("response_format", {"type": "text"}),
    ("functions", []), ("store", False), ("metadata", {}), ("service_tier", "auto"), ("reasoning_effort", "low"),
    ("audio", {}), ("modalities", ["text"]), ("prediction", {}), ("parallel_tool_calls", True), ("max_token", 5),
    ("best", 1), ("a[0].b", 1), ("Temperature", 1), ("", 1), ("höhe", 1), ("use_beam_search", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(server, name, value):
    requests = {
        "/v1/completions": body(),
        "/v1/chat/completions": {"messages": [{"role": "user", "content": OWL}], "max_tokens": 1},
    }
    for path, request in requests.items():
        response = httpx.post(server.url + path, json=request | {name: value})
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error"
        assert error["param"] == name and ascii(name).strip("'") in error["message"]


WRONG = [
    ("prompt", ""), ("prompt", []), ("prompt", [""]), ("prompt", [[]]), ("prompt", None), ("prompt", 5),
    ("prompt", ["a", 5]), ("prompt", [1, "a"]), ("prompt", [[1], "a"]), ("prompt", [-1]), ("prompt", [1.5]),
    ("prompt", {"text": "a"}), ("prompt", [True]),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", True), ("temperature", [1]),
    ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2), ("top_k", -1), ("top_k", 0.5), ("n", 0), ("n", "2"),
    ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300),
    ("seed", -1), ("seed", 2**63), ("seed", "x"), ("stop", ""), ("stop", [""]), ("stop", 5), ("stop", ["x"] * 17),
    ("stream", "yes"), ("stream", 1), ("stream_options", {"other": 1}), ("stream_options", []),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("ignore_eos", "no"), ("ignore_eos", 1),
    ("priority", "high"), ("priority", 1.5), ("deadline", 0), ("deadline", -1), ("deadline", 1e9), ("model", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_the_name_of_its_parameter(server, name, value):
    response = httpx.post(server.url + "/v1/completions", json=body(stream=True) | {name: value})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 2}, "2 greedy answers would all be the same"),
        ({"max_tokens": 600}, "3 prompt tokens and max_tokens 600, 603 in all, but the model's context is 512"),
        ({"prompt": "a fox " * 600}, "context is 512: shorten the prompt"),
        ({"prompt": [5, 10**6]}, "Token ids are whole numbers from 0 to"),
        ({"n": 500, "temperature": 1}, "asks for 500 answers, and this server works on 204 at most"),
        ({"prompt": ["a"] * 300}, "asks for 300 answers"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
    ],
)
def test_what_can_never_run_is_refused_with_what_to_do(server, settings, message):
    for stream in (False, True):
        extra = {} if "stream_options" in settings else {"stream": stream}
        response = httpx.post(server.url + "/v1/completions", json=body("Once upon a") | extra | settings)
        assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_what_is_wrong_with_a_chat(ask):
    for settings, param, message in (
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "'system', 'developer', 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages", "'messages.0.name'"),
        ({"messages": [{"role": "user"}]}, "messages", "missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages",
            "'messages.0.content.0.image_url'",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 3}, None, "give one of them"),
        ({"top_logprobs": 3}, None, "set logprobs to true"),
        ({"messages": [{"role": "user", "content": ""}]}, None, "has no tokens"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"prompt": "x"}, "prompt", "does not know the parameter 'prompt'"),
    ):
        sent = {"messages": [{"role": "user", "content": "x"}]} | settings
        with pytest.raises(openai.BadRequestError) as caught:
            ask.chat.completions.create(model="tiny-model", messages=sent.pop("messages"), extra_body=sent)
        assert caught.value.body["param"] == param and message in caught.value.body["message"]


def test_a_missing_prompt_and_a_missing_body(server):
    post = server.url + "/v1/completions"
    error = httpx.post(post, json={"max_tokens": 3}).json()["error"]
    assert (error["param"], error["message"]) == ("prompt", "The parameter 'prompt' is missing.")
    for sent in ({}, {"json": []}, {"json": "prompt"}, {"content": '{"prompt": "a"}'}, {"data": {"prompt": "a"}}):
        response = httpx.post(post, **sent)
        assert response.status_code == 400 and "Send a JSON object" in response.json()["error"]["message"]
    response = httpx.post(post, content='{"prompt": ', headers={"Content-Type": "application/json"})
    assert response.json()["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip
    assert "no JSON" in response.json()["error"]["message"]


# --- models, addresses, keys ----------------------------------------------------------------------------------------


def test_there_is_one_model(ask):
    assert [model.id for model in ask.models.list()] == ["tiny-model"]
    assert ask.models.retrieve("tiny-model").object == "model"
    for wrong in (
        lambda: ask.models.retrieve("gpt-5/mini"),
        lambda: ask.completions.create(model="gpt-5", prompt="x"),
        lambda: ask.chat.completions.create(model="gpt-5", messages=SPOKEN),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            wrong()
        assert caught.value.body["code"] == "model_not_found" and caught.value.body["param"] == "model"
        assert "there is 'tiny-model'" in caught.value.body["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 405),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/page/nothing.js", 404),
        ("GET", "/page/%2e%2e/app.py", 404),
        ("GET", "/docs", 404),
    ],
)
def test_unknown_addresses_and_methods_are_errors_in_openais_format(server, method, path, status):
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "allow" in response.headers or status != 405


GUARDED = [
    ("GET", "/v1/models"), ("GET", "/v1/models/mine"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"), ("GET", "/events"), ("POST", "/pace"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_without_the_key_there_is_nothing(keyed, method, path):
    sent = {"json": {"prompt": "x", "seconds": 0}} if method == "POST" else {}
    for header in (
        None,
        "",
        "Bearer",
        "Bearer schlussel",
        "schlüssel",
        "Bearer schlüssel ?",
        "Basic x",
        "ÿ",
    ):
        headers = {} if header is None else {"Authorization": header.encode()}
        response = httpx.request(method, keyed.url + path, headers=headers, **sent)
        assert response.status_code == 401, header
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_with_the_key_there_is_everything(keyed):
    with httpx.Client(base_url=keyed.url, headers=KEY) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert client.post("/v1/completions", json=body(max_tokens=2)).status_code == 200
        assert client.get("/metrics").status_code == 200
    assert httpx.get(keyed.url + "/health").json() == {"status": "ok"}, "whoever looks after it needs no key"
    assert httpx.get(keyed.url + "/").status_code == 200


def test_the_official_client_shows_its_key_and_it_is_compared_in_constant_time(monkeypatch):
    import hmac

    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both))
    with serving(api_key="sk-right") as own:
        for key, wrong in (("sk-right", False), ("sk-wrong", True)):
            with openai.OpenAI(base_url=own.url + "/v1", api_key=key, max_retries=0) as client:
                if wrong:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()
                else:
                    assert client.models.list().data
    assert compared == [(b"sk-right", b"sk-right"), (b"sk-wrong", b"sk-right")]


# --- figures, and what the page watches -----------------------------------------------------------------------------


def figures(server, **options) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics", **options).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_the_figures_add_up(server, ask):
    before = figures(server)
    tokens, prompt_tokens = 0, 0
    for number, prompt in enumerate(PROMPTS[:6]):
        usage = greedy(ask, prompt, 5 + number).usage
        tokens, prompt_tokens = tokens + usage.completion_tokens, prompt_tokens + usage.prompt_tokens
    refused(ask, n=0)
    after = figures(server)

    def more(name):
        return after[name] - before.get(name, 0)

    assert more("engine_generated_tokens_total") == tokens
    assert more("engine_prompt_tokens_total") == prompt_tokens
    assert more('engine_requests_total{status="200"}') == 6
    assert more('engine_requests_total{status="400"}') == 1
    ends = [name for name in after if name.startswith("engine_answers_total")]
    assert sum(map(more, ends)) == 6
    for name in ("time_to_first_token", "request_latency"):
        assert more(f"engine_{name}_seconds_count") == 6 and more(f"engine_{name}_seconds_sum") > 0
    assert more("engine_inter_token_latency_seconds_count") == tokens - 6
    # Alone, a request takes an iteration for each token, and the longer prompts one or two more to read them.
    assert tokens <= more("engine_iterations_total") <= tokens + 6
    assert after["engine_rows"] == ROWS
    for name in ("rows_used", "queue_length", "answers_unfinished", "blocks_used"):
        assert after[f"engine_{name}"] == 0
    assert 0 < after["engine_blocks_cached"] < after["engine_blocks"] == ROWS * 512 / 16


def test_everything_that_happens_is_told_without_gaps(server):
    """Also by which names: those of the answers, with the number of the choice behind them."""
    with httpx.stream("GET", server.url + "/events", timeout=60) as watched:
        assert watched.headers["content-type"].startswith("text/event-stream")
        messages = events_of(watched.iter_lines())
        heard = [next(messages)]
        asked = {"prompt": [OWL, FOX], "max_tokens": 15, "n": 2, "seed": 1}
        answer = httpx.post(server.url + "/v1/completions", json=asked).json()
        wanted = [answer["id"] + tail for tail in ("", "/1", "/2", "/3")]
        while not set(wanted) <= {end["id"] for message in heard for end in message["finished"]}:
            heard.append(next(messages))
        first = heard[0]
        assert first.keys() >= {"rows", "policy", "max_queue", "blocks", "waiting", "waiting_count", "running_count"}
        assert (first["rows"], first["policy"], first["max_queue"], first["pace"]) == (ROWS, "fcfs", 200, 0)
        assert first["blocks"].keys() == {"total", "used", "cached"} and first["tokens_per_second"] >= 0
        numbers = [one["n"] for message in heard for one in message["iterations"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        tokens = dict.fromkeys(wanted, 0)
        for one in itertools.chain.from_iterable(message["iterations"] for message in heard):
            assert one["seconds"] >= 0 and len(one["slots"]) == ROWS
            for slot in filter(None, one["slots"]):
                name, work, read, new = slot
                assert work in ("prefill", "decode", "stalled") and read >= new >= 0
                if name in tokens:
                    tokens[name] += new
        ends = {end["id"]: end for message in heard for end in message["finished"]}
        assert sum(tokens.values()) == answer["usage"]["completion_tokens"]
        for name, choice in zip(wanted, answer["choices"], strict=True):
            assert ends[name]["reason"] == choice["finish_reason"] and ends[name]["tokens"] == tokens[name]


def test_who_listens_hears_something_when_nothing_happens(server):
    with httpx.stream("GET", server.url + "/events", timeout=60) as watched:
        messages = events_of(watched.iter_lines())
        next(messages)
        quiet = next(messages)
    assert (quiet["iterations"], quiet["finished"], quiet["running_count"], quiet["waiting"]) == ([], [], 0, [])


def test_slow_motion(server):
    try:
        assert httpx.post(server.url + "/pace", json={"seconds": 0.1}).json() == {"seconds": 0.1}
        with httpx.stream("GET", server.url + "/events", timeout=60) as watched:
            messages = events_of(watched.iter_lines())
            assert next(messages)["pace"] == 0.1
        response = httpx.post(server.url + "/v1/completions", json=body(max_tokens=5))
        assert response.elapsed.total_seconds() >= 0.4, "the fifth iteration begins after four of at least 0.1 s"
        for wrong in (-1, 2.1, "fast", True, None):
            error = httpx.post(server.url + "/pace", json={"seconds": wrong})
            assert error.status_code == 400 and error.json()["error"]["param"] == "seconds"
        nan = httpx.post(server.url + "/pace", content='{"seconds": NaN}', headers={"Content-Type": "application/json"})
        assert nan.status_code == 400
    finally:
        httpx.post(server.url + "/pace", json={"seconds": 0}).raise_for_status()


# --- the command line -----------------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_only(server):
    addresses = {one.laddr.ip for one in psutil.Process(server.process.pid).net_connections() if one.status == "LISTEN"}
    assert addresses == {"127.0.0.1"} and server.url.startswith("http://127.0.0.1:")


def test_a_port_that_is_taken_is_found_out_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("loaded in vain"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SystemExit, match=f"127.0.0.1:{port} is not to be had .*: name another --port"):
            command.main(["--port", port])


def test_whoever_opens_it_to_others_without_a_key_is_warned(monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (_ for _ in ()).throw(ValueError("no model")))
    monkeypatch.delenv("COURSE_API_KEY", raising=False)
    for arguments in (["--host", "0.0.0.0"], ["--host", "::"], ["--host", "example.org"]):
        with pytest.warns(UserWarning, match="Whoever reaches .* can use this server"), pytest.raises(SystemExit):
            command.main(arguments)
    for arguments in (["--host", "0.0.0.0", "--api-key", "x"], [], ["--host", "localhost"], ["--host", "::1"]):
        with warnings.catch_warnings(), pytest.raises(SystemExit, match="no model"):
            warnings.simplefilter("error")
            command.main(arguments)


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("COURSE_API_KEY", "from outside")
    assert command._options([]).api_key == "from outside"
    assert command._options(["--api-key", "own"]).api_key == "own"


@pytest.mark.parametrize("wrong", [["--pace", "-1"], ["--deadline", "nan"], ["--grace", "inf"], ["--policy", "sjf"]])
def test_settings_without_a_meaning_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(wrong)
    assert caught.value.code == 2 and wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--rows", "0"], "max_batch_size"),
        (["--max-queue", "-1"], "max_queue is how many answers may wait"),
        (["--blocks", "0"], "num_blocks"),
        (["--model", "no/such/folder/anywhere"], "no/such/folder"),
    ],
)
def test_what_the_engine_refuses_ends_the_program_with_its_reason(wrong, message):
    with pytest.raises(SystemExit, match=message):
        command.main(wrong)


def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho starting\necho 'no torch here' >&2\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(RuntimeError, match=r"did not start:\nno torch here"), launch("--rows", "8"):
        pass


def test_the_page_and_its_openapi_description(server):
    page = httpx.get(server.url + "/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    described = httpx.get(server.url + "/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= described["paths"].keys()
    assert json.dumps(described).count('"422"') == 0


def test_models_without_blocks_are_served_too():
    engine = embedded_engine(execution="padded")
    with serving(engine) as own:
        answer = httpx.post(own.url + "/v1/completions", json=body(FOX, 9)).json()
        assert answer["choices"][0]["text"] == expected(FOX, 9).text
        assert "engine_blocks" not in httpx.get(own.url + "/metrics").text
        with httpx.stream("GET", own.url + "/events") as watched:
            assert next(events_of(watched.iter_lines()))["blocks"] is None
    assert EngineConfig().trace_length is None
