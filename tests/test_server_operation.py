"""Operating the server: its addresses, keys, metrics, events, slow motion, and the command line."""

import itertools
import socket
import warnings

import httpx
import openai
import pytest
from conftest import PROMPTS, random_pair

from helpers import Engine, EngineConfig
from helpers.command_line import parse
from helpers.server import __main__ as command
from helpers.server import launch
from tests.support.serving import (
    FOX,
    OWL,
    body,
    embedded_engine,
    error_of,
    events_of,
    expected,
    post,
    serving,
    text_of_response,
)

ROWS = 4
MESSAGES = [{"role": "user", "content": OWL}]


@pytest.fixture(scope="module")
def server():
    """The embedded model on four rows. An iteration computes few tokens, so prompts are computed in chunks."""
    with serving(embedded_engine(max_batch_size=ROWS, max_tokens_per_step=16), max_queue=200) as server:
        yield server
        server.assert_empty()


@pytest.fixture(scope="module")
def keyed():
    """Another model, behind a key."""
    engine = Engine(*random_pair("llama"), EngineConfig(max_batch_size=3, trace_length=1000))
    with serving(engine, model_name="mine", api_key="schlüssel") as server:
        yield server


# --- models, addresses, keys ----------------------------------------------------------------------------------------


def test_there_is_one_model(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny-model"]
        assert client.models.retrieve("tiny-model").object == "model"
        for wrong in (
            lambda: client.models.retrieve("gpt-5/mini"),
            lambda: client.chat.completions.create(model="gpt-5", messages=MESSAGES),
        ):
            with pytest.raises(openai.NotFoundError, match="this server runs 'tiny-model'") as caught:
                wrong()
            assert caught.value.body["code"] == "model_not_found" and caught.value.body["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v1/nothing", 404, "Not found"),
        ("GET", "/v1/completions", 405, "send POST to this address"),
        ("GET", "/page/%2e%2e/app.py", 404, "Not found"),
    ],
)
def test_unknown_addresses_and_methods_are_errors_in_openais_format(server, method, path, status, message):
    response = httpx.request(method, server.url + path)
    assert message in error_of(response, status)["message"]
    assert "allow" in response.headers or status != 405


GUARDED = [
    ("GET", "/v1/models"), ("GET", "/v1/models/mine"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"), ("GET", "/events"), ("POST", "/pace"),
    ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
]  # fmt: skip


def test_without_the_key_every_guarded_address_is_401(keyed):
    for method, path in GUARDED:
        assert error_of(httpx.request(method, keyed.url + path), 401)["code"] == "invalid_api_key", path
    for wrong in ("", "Bearer", "Bearer schlussel", "schlüssel", "Bearer schlüssel ?", "Basic schlüssel", "ÿ"):
        headers = {"Authorization": wrong.encode()}
        assert httpx.get(keyed.url + "/v1/models", headers=headers).status_code == 401, wrong


# --- metrics, and the events of the page ------------------------------------------------------------------------------


def metrics_of(server) -> dict[str, float]:
    page = httpx.get(server.url + "/metrics").text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_the_metrics_add_up(server):
    before = metrics_of(server)
    tokens, prompt_tokens = 0, 0
    for number, prompt in enumerate(PROMPTS[:6]):
        usage = post(server, **body(prompt, 5 + number)).raise_for_status().json()["usage"]
        tokens, prompt_tokens = tokens + usage["completion_tokens"], prompt_tokens + usage["prompt_tokens"]
    assert post(server, **body(FOX, 2, n=0)).status_code == 400
    after = metrics_of(server)

    def increase(name):
        return after[name] - before.get(name, 0)

    assert increase("engine_generated_tokens_total") == tokens
    assert increase("engine_prompt_tokens_total") == prompt_tokens
    assert increase('engine_requests_total{status="200"}') == 6
    assert increase('engine_requests_total{status="400"}') == 1
    assert increase("engine_time_to_first_token_seconds_count") == 6 == increase("engine_request_latency_seconds_count")
    assert increase("engine_inter_token_latency_seconds_count") == tokens - 6
    assert tokens <= increase("engine_iterations_total") <= tokens + 6
    assert after["engine_rows"] == ROWS
    assert after["engine_rows_used"] == after["engine_queue_length"] == after["engine_blocks_used"] == 0
    assert 0 < after["engine_blocks_cached"] < after["engine_blocks"] == ROWS * 512 / 16


def test_drafts_are_counted_in_the_metrics():
    with serving(embedded_engine(speculative="draft")) as server:
        post(server, **body(FOX, 40, ignore_eos=True)).raise_for_status()
        metrics, trace = metrics_of(server), server.thread.engine.trace
        assert metrics["engine_drafted_tokens_total"] == trace.drafted_tokens > trace.accepted_tokens > 0
        assert metrics["engine_accepted_tokens_total"] == trace.accepted_tokens
        assert metrics["engine_inter_token_latency_seconds_count"] == 39, "drafts are tokens, too"


def test_the_events_have_every_token_of_every_choice(server):
    """They name the choices: by the id of the response, and behind it the number of the choice."""
    with httpx.stream("GET", server.url + "/events") as watched:
        assert watched.headers["content-type"].startswith("text/event-stream")
        messages = events_of(watched.iter_lines())
        received = [next(messages)]
        response = post(server, prompt=[OWL, FOX], max_tokens=15, n=2, seed=1).json()
        names = [response["id"] + tail for tail in ("", "/1", "/2", "/3")]
        while not set(names) <= {end["id"] for message in received for end in message["finished"]}:
            received.append(next(messages))
        first = received[0]
        assert (first["rows"], first["policy"], first["max_queue"], first["pace"]) == (ROWS, "fcfs", 200, 0)
        tokens = dict.fromkeys(names, 0)
        for iteration in itertools.chain.from_iterable(message["iterations"] for message in received):
            for name, work, computed, new in filter(None, iteration["slots"]):
                assert work in ("prefill", "decode", "stalled") and computed >= new >= 0
                if name in tokens:
                    tokens[name] += new
        ends = {end["id"]: end for message in received for end in message["finished"]}
        assert sum(tokens.values()) == response["usage"]["completion_tokens"]
        for name, choice in zip(names, response["choices"], strict=True):
            assert ends[name]["reason"] == choice["finish_reason"] and ends[name]["tokens"] == tokens[name]


def test_slow_motion(server):
    try:
        assert httpx.post(server.url + "/pace", json={"seconds": 0.1}).json() == {"seconds": 0.1}
        response = httpx.post(server.url + "/v1/completions", json=body(max_tokens=5))
        assert response.elapsed.total_seconds() >= 0.4, "four iterations of at least 0.1 s come before the fifth"
        for wrong in (-1, 2.1, "fast", None):
            assert error_of(post(server, "/pace", seconds=wrong), 400)["param"] == "seconds"
        # A browser sends no JSON across sites without asking first, but it may send this content type.
        text = httpx.post(server.url + "/pace", content='{"seconds": 0}', headers={"Content-Type": "text/plain"})
        assert "Content-Type: application/json" in error_of(text, 400)["message"]
    finally:
        httpx.post(server.url + "/pace", json={"seconds": 0}).raise_for_status()


# --- the command line -----------------------------------------------------------------------------------------------


def test_a_taken_port_is_noticed_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("loaded in vain"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SystemExit, match=f"cannot listen on 127.0.0.1:{port} .* Choose another --port"):
            command.main(["--port", port])


def test_listening_to_other_machines_without_a_key_is_a_warning(monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (_ for _ in ()).throw(ValueError("no model")))
    monkeypatch.delenv("COURSE_API_KEY", raising=False)
    with pytest.warns(UserWarning, match="Anyone who can reach .* can use this server"), pytest.raises(SystemExit):
        command.main(["--host", "0.0.0.0"])
    for arguments in (["--host", "0.0.0.0", "--api-key", "x"], [], ["--host", "localhost"]):
        with warnings.catch_warnings(), pytest.raises(SystemExit, match="no model"):
            warnings.simplefilter("error")
            command.main(arguments)


def test_the_key_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("COURSE_API_KEY", "from the environment")
    assert parse(command.command, []).api_key == "from the environment"
    assert parse(command.command, ["--api-key", "own"]).api_key == "own"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--pace", "-1"], "--pace must be from 0 to 2 seconds, not -1.0"),
        (["--deadline", "nan"], "--deadline must be a number of seconds, not nan"),
        (["--rows", "0"], "--rows must be an integer of at least 1, not 0"),
        (["--client-timeout", "0"], "--client-timeout must be a positive number of seconds, not 0"),
        (["--adapters", "a"], "--adapters takes names and folders, as in story=path/to/folder, not 'a'"),
        (["--adapters", "tiny-model=b"], "'tiny-model' is taken"),
        (["--adapter-folder", "/no/such/folder"], "--adapter-folder /no/such/folder is no folder"),
    ],
)
def test_options_outside_their_range_are_refused_in_one_line_before_a_model_is_loaded(
    monkeypatch, capsys, wrong, message
):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit) as caught:
        command.main(wrong)
    (error,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and error.startswith("python -m helpers.server: ") and message in error


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match=r"did not start:\n.*--rows must be an integer"), launch("--rows", "0"):
        pass


def test_models_without_blocks_are_served_too():
    engine = embedded_engine(execution="padded")
    with serving(engine) as own:
        assert text_of_response(post(own, **body(FOX, 9)).json()) == expected(FOX, 9).text
        assert "engine_blocks" not in httpx.get(own.url + "/metrics").text
