"""Whatever is sent: no status of 500 and above, every error in OpenAI's format, and nothing left over.

Schemathesis reads the server's own description and sends what fits it and what does not; Hypothesis sends what is not
even a request. Neither knows what a right answer would be: that is test_server.py.
"""

import json
import string
from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from helpers.server.engine_thread import EngineThread
from helpers.server.protocol import ChatRequest, CompletionRequest
from tests.serving import Wire, body, embedded_engine, expected, post, serving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
JSON = {"Content-Type": "application/json"}
POSTS = ("/v1/completions", "/v1/chat/completions", "/pace")


class Unhurried(EngineThread):
    """Slow motion is asked for many times here, and would take hours."""

    pace = property(lambda self: 0.0, lambda self, seconds: None)


@pytest.fixture(scope="module")
def server(one_thread):
    """Answers of at most three tokens, so that there is time for many."""
    with serving(embedded_engine(max_batch_size=8, max_output_tokens=3)) as server:
        server.thread.__class__ = Unhurried
        yield server
        server.settled()
        assert post(server, **body(max_tokens=3)).json()["choices"][0]["text"] == expected("Once upon a time", 3).text


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def checked(response: httpx.Response) -> None:
    """It is an answer, or an error of the client's in OpenAI's format."""
    if response.status_code != 200:
        assert 400 <= response.status_code < 500 or response.status_code == 504, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, response.text
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") or '"deadline_passed"' in response.text
        assert "engine_failed" not in response.text
    else:
        response.json()


# --- by its own description -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def description(server):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


OPERATIONS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/{name}"),
    ("GET", "/health"), ("GET", "/metrics"), ("POST", "/pace"),
]  # fmt: skip
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


def test_the_description_has_these_operations(description):
    found = {(one.ok().method.upper(), one.ok().path) for one in description.get_all_operations()}
    assert found == set(OPERATIONS)


def tamed(wanted: dict) -> dict:
    """A request that fits the description, with the values changed that could not run all the same."""
    wanted = {name: value for name, value in wanted.items() if name not in ("model", "max_tokens", "top_logprobs")}
    if isinstance(prompt := wanted.get("prompt"), list):
        lists = [prompt] if isinstance(prompt[0], int) else prompt
        lists = [[id % 1864 for id in one[:9]] if isinstance(one, list) else one for one in lists[:2]]
        wanted["prompt"] = lists[0] if isinstance(prompt[0], int) else lists
    if wanted.get("max_completion_tokens"):
        wanted["max_completion_tokens"] = 2
    if not wanted.get("stream"):
        wanted.pop("stream_options", None)
    many = {"n": min(wanted.get("n") or 1, 3), "best_of": None, "temperature": max(wanted.get("temperature") or 1, 0.1)}
    return wanted | (many if "prompt" in wanted else many | {"best_of": 0}) | {"max_tokens": 2, "deadline": 60}


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*one, GenerationMode.POSITIVE) for one in OPERATIONS]
    + [(*one, GenerationMode.NEGATIVE) for one in OPERATIONS if one[0] == "POST"],
)
def test_whatever_fits_the_description_or_does_not_is_answered_as_described(description, method, path, mode):
    statuses = Counter()

    @given(case=description[path][method].as_strategy(generation_mode=mode), tame=st.booleans())
    @settings(quick, max_examples=80 if method == "POST" else 10)
    def asked(case, tame):
        if tame and mode == GenerationMode.POSITIVE and "/completions" in path.replace("chat", ""):
            case.body = tamed(case.body)
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or (response.status_code == 504 and case.body["deadline"] < 60)
        if response.status_code >= 400:
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}

    asked()
    if mode == GenerationMode.POSITIVE:
        assert statuses[200] >= (10 if method == "POST" else 1) or "{name}" in path, f"too few could run: {statuses}"


# --- what is no request ---------------------------------------------------------------------------------------------


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([10**400, -(10**30), 2**63])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)
names = st.sampled_from([*CompletionRequest.model_fields, *ChatRequest.model_fields, "seconds", "tools"])


@given(path=st.sampled_from(POSTS), wanted=st.dictionaries(names | st.text(), anything, max_size=6))
@settings(quick, max_examples=200)
def test_any_object(client, path, wanted):
    checked(
        client.post(path, content=json.dumps(wanted).encode(), headers=JSON)
    )  # NaN and Infinity as Python writes them


# What is right but for one or two parameters comes further than what is all wrong.
plausible = {
    "prompt": st.text(max_size=20)
    | st.lists(st.integers(0, 2000), max_size=5)
    | st.lists(st.text(max_size=9), max_size=3)
    | st.lists(st.lists(st.integers(0, 1863), max_size=3), max_size=3),
    "max_tokens": st.integers(0, 4) | st.none(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(0, 10**20),
    "n": st.integers(0, 9),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=2), max_size=3),
    "seed": st.integers(0, 2**63),
    "stream": st.booleans(),
    "repetition_penalty": st.floats(0, 101),
    "ignore_eos": st.booleans(),
    "priority": st.integers(),
    "logprobs": st.integers(0, 21),
    "deadline": st.floats(0, 10),
}


@given(wanted=st.fixed_dictionaries({}, optional=plausible))
@example(wanted={"prompt": [*range(300)], "repetition_penalty": 1e-308})
@example(wanted={"prompt": [*range(300)], "repetition_penalty": 0.01, "temperature": 5e-324, "top_p": 5e-324})
@example(wanted={"prompt": "a", "repetition_penalty": 100, "min_p": 1.0, "logprobs": 20})
@example(wanted={"prompt": "a", "seed": 2**63 - 1, "n": 9})
@settings(quick, max_examples=200)
def test_nearly_right_requests(client, wanted):
    checked(client.post("/v1/completions", json={"prompt": "The fox", "max_tokens": 2} | wanted))


DEEP = 10_000
RAW = [
    b"", b" ", b"null", b"[]", b'"prompt"', b"5", b"{", b'{"prompt"', b'{"prompt": "a",}', b"{'prompt': 'a'}", b"\x00",
    b'{"prompt": "a"} {"prompt": "a"}', b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": ["\\udc00"]}', b'{"prompt": "a", "stop": "\\ud800"}',
    b'{"prompt": "a", "model": "\\ud800"}', b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udfff"}]}]}',
    b'{"messages": [{"role": "user", "\\udfff": 1}]}', b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "deadline": Infinity}', b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": NaN}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": [' + b"9" * 4000 + b"]}", b'{"prompt": "a", "n": ' + b"9" * 4000 + b"}",
    b'{"prompt": "a", "priority": -' + b"9" * 4000 + b', "max_tokens": 1}',
    b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", b'{"prompt": ' + b'{"a":' * DEEP, b"[" * DEEP,
    b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}",
    b'{"messages": ' + b'[{"content":' * 300 + b"0" + b"}]" * 300 + b"}",
    b'{"prompt": "a", "prompt": 5}', b'{"prompt": 5, "prompt": "a", "max_tokens": 1}', b'{"seconds": 1e-400}',
    '{"prompt": "a", "max_tokens": 1}'.encode("utf-16"), '{"prompt": "ä"}'.encode("latin-1"), b"\xef\xbb\xbf{}",
    b'{"prompt": "\\u0000", "max_tokens": 1}', '{"prompt": "🦉‮", "max_tokens": 1}'.encode(), b"x" * 2_000_000,
    b'{"prompt": "' + b"a " * 500_000 + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_requests(client, path):
    for raw in RAW:
        for kind in (JSON, {"Content-Type": "application/json; charset=latin-1"}):
            checked(client.post(path, content=raw, headers=kind))


@given(
    path=st.sampled_from(POSTS), raw=st.binary(max_size=60), kind=st.text(string.ascii_letters + "/;=+-", max_size=30)
)
@settings(quick, max_examples=100)
def test_bytes_of_any_kind(client, path, raw, kind):
    response = client.post(path, content=raw, headers={"Content-Type": kind})
    assert response.status_code in (400, 404, 413)
    checked(response)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "a/b;c"]
)
def test_a_web_page_of_somebody_elses_cannot_ask(client, kind):
    """A browser sends these kinds across sites without asking first; JSON it does not."""
    response = client.post("/v1/completions", content=json.dumps(body()), headers={"Content-Type": kind})
    assert response.status_code == 400 and "Content-Type: application/json" in response.json()["error"]["message"]
    assert client.post("/pace", content='{"seconds": 0}', headers={"Content-Type": kind}).status_code == 400


# --- headers and lines ----------------------------------------------------------------------------------------------


@given(key=st.binary(max_size=40).filter(lambda key: not set(key) & set(range(32)) and key == key.strip()))
@example(key=b"Bearer \xff")
@example(key="Bearer schlüssel".encode())
@settings(quick, max_examples=50)
def test_keys_of_any_bytes_are_wrong_keys(keyed, key):
    response = keyed.get("/v1/models", headers={"Authorization": key})
    assert response.status_code == (401 if b"\x7f" not in key else response.status_code)
    if response.status_code == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.fixture(scope="module")
def keyed(one_thread):
    with serving(api_key="right") as server, httpx.Client(base_url=server.url) as client:
        yield client


LINES = [
    b"GET / HTTP/one\r\n\r\n", b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /%ff%fe/\xc3 HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip


def test_what_is_not_even_http_costs_nothing_but_its_connection(server, client):
    for line in LINES:
        wire = Wire(server, line)
        answered = wire.socket.recv(2**16)
        assert answered == b"" or answered.startswith(b"HTTP/1.1 4"), answered
        wire.close()
    half = [Wire(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{") for _ in range(5)]
    assert client.get("/health").status_code == 200
    for wire in half:
        wire.close()


@given(path=st.text(max_size=20), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]))
@settings(quick, max_examples=50)
def test_any_address(client, path, method):
    address = "/v1/" + "".join(f"%{byte:02x}" for byte in path.encode("utf-8", "surrogatepass"))
    response = client.request(method, address)
    assert response.status_code in (200, 307, 400, 404, 405)
    if response.status_code >= 400:
        checked(response)
