"""What OpenAI's clients get: the engine's own tokens, in OpenAI's formats.

Most requests here come from the official client, and go to a server in its own process. Which requests are accepted
is test_server_requests.py; what happens under load and faults is test_server_faults.py.
"""

import asyncio
import copy
import functools

import openai
import psutil
import pytest
from conftest import PROMPTS, alone, random_pair

from helpers import Engine, EngineConfig, SamplingParams
from helpers.server import launch
from helpers.server.formats import ChatFormatter, CompletionFormatter
from tests.support.serving import embedded_engine, expected, post, serving

ROWS = 4
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('the user begins') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Once upon "}, {"type": "text", "text": "a time"}]},
]


@pytest.fixture(scope="module")
def server():
    """The embedded model on four rows. An iteration computes few tokens, so prompts are computed in chunks."""
    with launch("--rows", str(ROWS), "--tokens-per-step", "16", "--max-queue", "200") as launched:
        yield launched


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def untemplated():
    """A client of the embedded model without its chat template."""
    with serving(embedded_engine()) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        yield client


def greedy(client, prompt, max_tokens=20, **settings):
    settings = {"model": "tiny-model", "temperature": 0} | settings
    return client.completions.create(prompt=prompt, max_tokens=max_tokens, **settings)


# --- the engine's own tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_a_completion_is_what_the_model_generates_alone_and_a_stream_has_a_chunk_for_each_token(
    client, embedded, prompt
):
    completion, output = greedy(client, prompt, 40), expected(prompt, 40)
    num_prompt, num_tokens, usage = len(embedded[1](prompt)["input_ids"]), len(output.token_ids), completion.usage
    assert output.token_ids == alone(*embedded, prompt, 40)
    assert (completion.choices[0].text, completion.choices[0].finish_reason) == (output.text, output.finish_reason)
    counts = usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
    assert counts == (num_prompt, num_tokens, num_prompt + num_tokens)
    assert (completion.object, completion.model) == ("text_completion", "tiny-model")
    assert completion.id.startswith("cmpl-")
    chunks = list(greedy(client, prompt, 40, stream=True))
    assert len(chunks) == num_tokens
    assert "".join(chunk.choices[0].text for chunk in chunks) == output.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (num_tokens - 1) + [output.finish_reason]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_every_request_gets_its_own_tokens_whichever_others_run(server):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def send(number):
                prompt, max_tokens, stream = PROMPTS[number % len(PROMPTS)], 1 + 7 * number % 31, number % 2 == 1
                completion = await greedy(client, prompt, max_tokens, stream=stream)
                if stream:
                    text = "".join([chunk.choices[0].text async for chunk in completion])
                else:
                    text = completion.choices[0].text
                assert text == expected(prompt, max_tokens).text, (prompt, max_tokens, stream)

            await asyncio.gather(*map(send, range(4 * ROWS * 2)))

    asyncio.run(all_at_once())


def test_the_choices_of_several_prompts_as_text_or_ids_come_in_their_order(client, embedded):
    prompts = PROMPTS[:5]
    ids = [embedded[1](prompt)["input_ids"] for prompt in prompts]
    wanted = [expected(prompt, 12).text for prompt in prompts]
    for several in (prompts, ids):
        response = greedy(client, several, 12)
        assert [(choice.index, choice.text) for choice in response.choices] == list(enumerate(wanted))
        assert response.usage.prompt_tokens == sum(map(len, ids))
        texts = [""] * len(prompts)
        for chunk in greedy(client, several, 12, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == wanted
    assert greedy(client, ids[0], 12).choices[0].text == wanted[0], "one list of ids is one prompt"


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_a_completion_reports_each_token_among_the_best_ones_and_tells_parts_of_characters_apart(client, embedded):
    tokenizer = embedded[1]
    none_best = greedy(client, "Once upon a time", 3, logprobs=0).choices[0].logprobs
    assert [[token] for token in none_best.tokens] == [list(top) for top in none_best.top_logprobs]
    drawn = greedy(client, "é☃", 60, logprobs=1, temperature=2, seed=5, extra_body={"ignore_eos": True})
    reported = drawn.choices[0].logprobs
    pairs = zip(reported.tokens, reported.top_logprobs, strict=True)
    assert all(token in top and len(top) <= 2 for token, top in pairs)
    assert {len(top) for top in reported.top_logprobs} == {1, 2}, "some tokens are the best, some are not"
    parts = [id for id in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([id])]
    formatter = CompletionFormatter("id", "model", tokenizer)
    assert len(parts) > 100 and len({formatter.token_text(id) for id in parts}) == len(parts)
    assert ChatFormatter("id", "model", tokenizer).token_entry(parts[0], -1.0)["bytes"] is None


def test_logprobs_of_a_chat(untemplated):
    chat = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 10, "temperature": 0}
    create = functools.partial(untemplated.chat.completions.create, model="tiny-model", **chat)
    output, choice = expected("Once upon a time", 10, logprobs=2), create(logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content == output.text
    for token, id, known in zip(tokens, output.token_ids, output.logprobs, strict=True):
        assert token.logprob == pytest.approx(known[id], abs=1e-4)
        assert bytes(token.bytes).decode() == token.token
        assert token.top_logprobs[0].token == token.token and len(token.top_logprobs) == 2
    assert [token.top_logprobs for token in create(logprobs=True).choices[0].logprobs.content] == [[]] * 10
    assert create().choices[0].logprobs is None
    stream = create(logprobs=True, top_logprobs=2, stream=True)
    assert [chunk.choices[0].logprobs.content[0].token for chunk in stream] == [token.token for token in tokens]


# --- chat -----------------------------------------------------------------------------------------------------------


def test_without_a_template_the_prompt_of_a_chat_is_its_texts_one_per_line(untemplated):
    create = functools.partial(
        untemplated.chat.completions.create, model="tiny-model", messages=MESSAGES, temperature=0
    )
    response, chunks = create(max_completion_tokens=15), list(create(max_tokens=15, stream=True))
    assert response.choices[0].message.content == expected("Be kind.\nOnce upon a time", 15).text
    assert response.choices[0].message.role == "assistant"
    assert response.object == "chat.completion" and response.id.startswith("chatcmpl-")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content for delta in deltas) == response.choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_without_a_limit_continues_to_its_end(untemplated, embedded):
    response = untemplated.chat.completions.create(
        model="tiny-model", messages=[{"role": "user", "content": "Once upon"}], temperature=0
    )
    (output,) = Engine(*embedded).generate("Once upon")
    assert response.choices[0].message.content == output.text
    assert response.usage.completion_tokens == len(output.token_ids) > 16


def test_the_models_own_template_is_used():
    model, tokenizer = random_pair("llama")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    prompt = "<system>Be kind.<user>Once upon a time<assistant>"
    (wanted,) = Engine(model, tokenizer).generate(prompt, SamplingParams(20))
    with serving(Engine(model, tokenizer, EngineConfig(trace_length=1000)), model_name="mine") as own:
        response = post(own, "/v1/chat/completions", messages=MESSAGES, max_tokens=20, temperature=0).json()
        assert response["choices"][0]["message"]["content"] == wanted.text
        assert response["usage"]["prompt_tokens"] == len(prompt) and response["model"] == "mine"
        response = post(own, "/v1/chat/completions", messages=[{"role": "assistant", "content": "I"}])
        assert response.status_code == 400 and "the user begins" in response.json()["error"]["message"]


# --- the process ----------------------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_only(server):
    connections = psutil.Process(server.process.pid).net_connections()
    addresses = {connection.laddr.ip for connection in connections if connection.status == "LISTEN"}
    assert addresses == {"127.0.0.1"} and server.url.startswith("http://127.0.0.1:")
