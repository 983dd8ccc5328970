"""Adapters as models of the server: loaded at its start, and chosen by `model`."""

import httpx
import openai
import pytest

from helpers import Engine, SamplingParams, load_model
from helpers.command_line import parse
from helpers.server.__main__ import _load_engine, command
from tests.support.adapters import merged, write_adapter
from tests.support.serving import OWL, body, embedded_engine, error_of, post, serving
from tests.support.serving import text_of_response as text_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    model, _ = load_model()
    return {
        name: write_adapter(root / name, model, ["c_attn", "c_fc"], seed, scale=1.0) for seed, name in enumerate("ab")
    }


@pytest.fixture(scope="module")
def texts(folders) -> dict:
    """What the model, and the model with each adapter merged, write."""
    model, tokenizer = load_model()
    models = {None: model} | {name: merged(model, folder) for name, folder in folders.items()}
    return {name: Engine(one, tokenizer).generate(OWL, SamplingParams(12))[0].text for name, one in models.items()}


@pytest.fixture(scope="module")
def server(folders):
    engine = embedded_engine(max_batch_size=4)
    engine.load_adapter("a", folders["a"])
    with serving(engine) as server:
        yield server
        server.assert_empty()


def test_a_request_chooses_an_adapter_by_its_name_and_the_response_names_it(server, texts):
    assert len(set(texts.values())) == 3
    for given, adapter in ((None, None), ("tiny-model", None), ("a", "a")):
        response = post(server, **body(OWL, 12, model=given)).json()
        assert text_of(response) == texts[adapter] and response["model"] == (given or "tiny-model")


def test_the_list_of_models_says_whose_adapters_they_are(server):
    base, adapter = httpx.get(server.url + "/v1/models").json()["data"]
    assert base["id"] == "tiny-model" and "parent" not in base
    assert (adapter["id"], adapter["parent"], adapter["object"]) == ("a", "tiny-model", "model")
    assert httpx.get(server.url + "/v1/models/a").json() == adapter
    message = error_of(httpx.get(server.url + "/v1/models/b"), 404)["message"]
    assert message == "There is no model 'b'; this server runs 'tiny-model' and 'a'."


def test_openais_client_chats_with_an_adapter(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    settings = {"messages": [{"role": "user", "content": OWL}], "max_tokens": 8, "temperature": 0}
    chat, base = (client.chat.completions.create(model=name, **settings) for name in ("a", "tiny-model"))
    assert chat.model == "a" and chat.choices[0].message.content != base.choices[0].message.content


def test_adapters_are_loaded_at_the_start(folders, texts):
    options = parse(command, ["--adapters", *(f"{name}={folder}" for name, folder in folders.items())])
    outputs = _load_engine(options).generate([OWL] * 3, SamplingParams(12), adapter=["a", None, "b"])
    assert [output.text for output in outputs] == [texts[name] for name in ("a", None, "b")]
