"""Scoring through the server: echo, prompt log-probabilities and offsets, in OpenAI's and vLLM's formats.

lm-evaluation-harness compares texts by such requests (its model `local-completions`); transformers is the judge.
"""

import pytest
import torch

from helpers.server.text_offsets import EchoedPrompt
from tests.conftest import byte_tokenizer
from tests.support.serving import FOX, MILLER, OWL, embedded_engine, events_of, expected, post, serving
from tests.test_detokenizer import sentencepiece_tokenizer


@pytest.fixture(scope="module")
def server():
    with serving(embedded_engine(max_batch_size=4, max_tokens_per_step=16), max_queue=50) as server:
        yield server
        server.assert_empty()


def complete(server, **settings) -> list[dict]:
    response = post(server, temperature=0, **settings)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def logprobs_of(pair, ids):
    """Return the log-probability of each token but the first, and of the best one in its place, by transformers."""
    with torch.no_grad():
        rows = pair[0](torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist(), rows.max(dim=1).values.tolist()


def test_the_harness_gets_the_log_likelihoods_that_transformers_computes(server, embedded):
    """The requests of lm-evaluation-harness 0.4: token ids in batches, echo, one token, one log-probability, a seed."""
    tokenizer = embedded[1]
    pairs = [(FOX, " jumped over the lazy dog."), (FOX, " sat down."), (OWL, " there was a mouse"), (MILLER, " he")]
    contexts = [tokenizer(context)["input_ids"] for context, _ in pairs]
    prompts = [ids + tokenizer(target)["input_ids"] for ids, (_, target) in zip(contexts, pairs, strict=True)]
    for max_tokens in (1, 0):
        sent = {"model": "tiny-model", "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
        choices = complete(server, prompt=prompts, **sent)
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        greedy = []
        for choice, context, ids in zip(choices, contexts, prompts, strict=True):
            end = -1 if max_tokens else None
            own = choice["logprobs"]["token_logprobs"][len(context) : end]
            top = [max(scores.values()) for scores in choice["logprobs"]["top_logprobs"][len(context) : end]]
            expected_own, expected_top = logprobs_of(embedded, ids)
            assert own == pytest.approx(expected_own[len(context) - 1 :], abs=1e-4)
            assert top == pytest.approx(expected_top[len(context) - 1 :], abs=1e-4)
            greedy.append(own == top)  # the harness compares them as they are
        assert greedy == [True, False, False, True]


def test_an_echo_begins_with_the_prompt_and_its_tokens(server, embedded):
    tokenizer = embedded[1]
    ids = tokenizer(OWL)["input_ids"]
    output = expected(OWL, 6, logprobs=2, prompt_logprobs=2)
    (choice,) = complete(server, prompt=OWL, max_tokens=6, echo=True, logprobs=2)
    assert choice["text"] == OWL + output.text and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"] == [tokenizer.decode([id]) for id in ids + output.token_ids]
    all_known = output.prompt_logprobs + output.logprobs
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for own, top, known in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], all_known[1:], strict=True
    ):
        assert own == pytest.approx(next(iter(known.values())), abs=1e-4)
        assert top == pytest.approx({tokenizer.decode([id]): value for id, value in known.items()}, abs=1e-4)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    # Without an echo, offsets begin at 0, the beginning of the text.
    (bare,) = complete(server, prompt=OWL, max_tokens=6, logprobs=2)
    assert bare["text"] == output.text
    assert bare["logprobs"]["text_offset"] == [offset - len(OWL) for offset in logprobs["text_offset"][len(ids) :]]


def test_only_to_score_costs_no_tokens_and_needs_no_log_probabilities(server):
    response = post(server, prompt=[OWL, FOX], max_tokens=0, echo=True).json()
    assert [choice["text"] for choice in response["choices"]] == [OWL, FOX]
    assert {choice["finish_reason"] for choice in response["choices"]} == {"length"}
    assert [choice["logprobs"] for choice in response["choices"]] == [None, None]
    prompt_tokens = response["usage"]["prompt_tokens"]
    assert response["usage"] == {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}


def test_prompt_log_probabilities_come_in_the_format_of_vllm(server, embedded):
    tokenizer = embedded[1]
    ids = tokenizer(OWL)["input_ids"]
    (choice,) = complete(server, prompt=OWL, max_tokens=0, prompt_logprobs=2)
    assert (choice["text"], choice["logprobs"]) == ("", None)
    known = expected(OWL, 1, prompt_logprobs=2).prompt_logprobs
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(ids)
    for given, wanted in zip(choice["prompt_logprobs"][1:], known[1:], strict=True):
        assert list(given) == [str(id) for id in wanted]
        for id, value in wanted.items():
            assert given[str(id)]["logprob"] == pytest.approx(value, abs=1e-4)
            assert given[str(id)]["decoded_token"] == tokenizer.decode([id])
    assert "prompt_logprobs" not in complete(server, prompt=OWL, max_tokens=1)[0]


def test_a_stream_begins_each_choice_with_its_prompt(server):
    sent = {"prompt": [OWL, FOX], "max_tokens": 4, "echo": True, "logprobs": 1, "temperature": 0.7, "seed": 5, "n": 2}
    whole = post(server, **sent).json()
    lines = post(server, **sent, stream=True, stream_options={"include_usage": True}).text.splitlines()
    *chunks, usage, done = events_of(iter(lines))
    assert done == "[DONE]" and usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[0]["text"].startswith(OWL if choice["index"] < 2 else FOX)
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
    *chunks, done = events_of(iter(post(server, prompt=OWL, max_tokens=0, echo=True, stream=True).text.splitlines()))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [OWL]


# --- where tokens begin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["text", "ids"])
@pytest.mark.parametrize("text", [" two  spaces ", "häuser, ☃ and 🦉!", "a<|endoftext|>b"])
def test_offsets_say_where_each_token_begins_also_within_characters(embedded, text, given):
    for tokenizer in (embedded[1], byte_tokenizer()):
        ids = tokenizer(text)["input_ids"]
        echo = EchoedPrompt(text if given == "text" else ids, ids, tokenizer)
        assert echo.text == text
        for index, offset in enumerate(echo.offsets):
            before = tokenizer.decode(ids[:index]).rstrip("\ufffd")
            assert echo.text[:offset] == before, "all complete characters before a token, and no more"


def test_the_spaces_between_sentencepiece_words_are_echoed():
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer("the owl is the owl", add_special_tokens=False)["input_ids"]
    echo = EchoedPrompt(ids, ids, tokenizer)
    assert echo.text == tokenizer.decode(ids)
    assert [echo.text[:offset].strip() for offset in echo.offsets] == [
        tokenizer.decode(ids[:index]).strip() for index in range(len(ids))
    ]
