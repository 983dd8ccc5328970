"""Adapters as models of the server: chosen by `model`, loaded and unloaded while it runs, from one folder only."""

import os

import httpx
import pytest

from helpers import Engine, SamplingParams, load_model
from helpers.command_line import parse
from helpers.server.__main__ import _load_engine, command
from tests.support.adapters import merged, write_adapter
from tests.support.serving import OWL, BackgroundRequest, body, embedded_engine, error_of, gated, post, serving
from tests.support.serving import text_of_response as text_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of adapters, beside one to which it must not lead."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("inside/a", "inside/b", "inside/deep/c", "outside/d")):
        write_adapter(folder / name, load_model()[0], ["c_attn", "c_fc"], seed, scale=1.0)
    os.symlink(folder / "outside/d", folder / "inside/link")
    linked = folder / "inside/linked files"
    linked.mkdir()
    for file in (folder / "outside/d").iterdir():
        os.symlink(file, linked / file.name)
    os.symlink("circle", folder / "inside/circle")
    (folder / "inside/empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def texts(root) -> dict:
    """What the model, and the model with each adapter merged, write."""
    model, tokenizer = load_model()
    models = {None: model} | {name: merged(model, root / "inside" / name) for name in ("a", "b")}
    return {name: Engine(own, tokenizer).generate(OWL, SamplingParams(12))[0].text for name, own in models.items()}


@pytest.fixture(scope="module")
def running(root):
    engine = embedded_engine(max_batch_size=4)
    engine.load_adapter("a", root / "inside/a")
    with serving(engine, adapter_folder=str(root / "inside")) as server:
        yield server


@pytest.fixture
def server(running):
    """A server with one adapter, which each test leaves as it was."""
    yield running
    running.assert_empty()
    assert names(running) == ["tiny-model", "a"]


def names(server) -> list[str]:
    return [card["id"] for card in httpx.get(server.url + "/v1/models").json()["data"]]


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


def test_an_adapter_is_loaded_used_and_unloaded_while_the_server_runs(server, texts):
    assert post(server, **body(OWL, 12, model="x")).status_code == 404
    for folder in ("b", "./b", "deep/../b"):
        response = post(server, LOAD, lora_name="x", lora_path=folder)
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert names(server) == ["tiny-model", "a", "x"]
        assert text_of(post(server, **body(OWL, 12, model="x")).json()) == texts["b"]
        response = post(server, UNLOAD, lora_name="x")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
        assert names(server) == ["tiny-model", "a"]
    error_of(post(server, UNLOAD, lora_name="x"), 404)


@pytest.mark.parametrize("path", ["../outside/d", "/", "link", "linked files", "circle", "a\0b", "x" * 5000], ids=ascii)
def test_a_path_that_leads_out_of_the_folder_is_refused_whatever_is_there(server, root, path):
    for given in (path, str(root / "outside/d")):
        message = error_of(post(server, LOAD, lora_name="x", lora_path=given), 400)["message"]
        assert message == "lora_path must be a folder below the server's folder of adapters, without links out of it."


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "empty", "There is no file empty/adapter_config.json"),
        ("a", "b", "An adapter 'a' is loaded already"),
        ("tiny-model", "b", "The model itself is called 'tiny-model'"),
        ("x" * 257, "b", "must be a text of 1 to 256 printable characters"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_400_without_the_servers_own_path(server, root, name, path, message):
    found = error_of(post(server, LOAD, lora_name=name, lora_path=path), 400)["message"]
    assert message in found and str(root) not in found


def test_without_a_folder_nobody_loads_or_unloads(root):
    engine = embedded_engine()
    engine.load_adapter("a", root / "inside/a")
    with serving(engine) as server:
        assert post(server, LOAD, lora_name="x", lora_path="b").status_code == 404
        assert post(server, UNLOAD, lora_name="a").status_code == 404
        assert names(server) == ["tiny-model", "a"]


def test_a_request_that_runs_finishes_with_an_unloaded_adapter(root, texts):
    with gated(shut=False, adapter_folder=str(root / "inside")) as (server, gate):
        assert post(server, LOAD, lora_name="x", lora_path="a").status_code == 200  # a trial needs passes
        gate._shut = True
        running = BackgroundRequest(server, **body(OWL, 12, model="x"))
        gate.allow(3)
        unloading = BackgroundRequest(server, UNLOAD, lora_name="x")
        gate.open()
        assert text_of(running.wait().response.json()) == texts["a"]
        assert unloading.wait().response.status_code == 200
        assert post(server, **body(OWL, 12, model="x")).status_code == 404


# --- the command line -------------------------------------------------------------------------------------------------


def test_adapters_are_loaded_at_the_start(root, texts):
    arguments = ["--adapters", f"a={root}/inside/a", f"b={root}/inside/b", "--adapter-folder", str(root)]
    options = parse(command, arguments)
    assert options.app_options["adapter_folder"] == str(root)
    outputs = _load_engine(options).generate([OWL] * 3, SamplingParams(12), adapter=["a", None, "b"])
    assert [output.text for output in outputs] == [texts[name] for name in ("a", None, "b")]
