"""Whatever a client sends: no status of 500 and above, every error in OpenAI's format, and nothing left over.

Hypothesis sends requests that are nearly right, and bytes that are not even requests. It does not know the correct
response: that is test_server.py.
"""

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.serving import OWL, RawConnection, body, embedded_engine, expected, post, serving, text_of_response

pytestmark = pytest.mark.slow

quick = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
JSON = {"Content-Type": "application/json"}
POSTS = ("/v1/completions", "/v1/chat/completions", "/pace")


@pytest.fixture(scope="module")
def server():
    """At most three tokens per sequence, so that there is time for many requests."""
    engine = embedded_engine(max_batch_size=8)
    check_counts = engine.validator.check_counts
    engine.validator.check_counts = lambda prompt_tokens, params: min(3, check_counts(prompt_tokens, params))
    with serving(engine) as server:
        yield server
        server.assert_empty()
        assert text_of_response(post(server, **body(OWL, 3)).json()) == expected(OWL, 3).text


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def assert_valid(response: httpx.Response) -> None:
    """Check that this is a success, or an error of the client in OpenAI's format."""
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


# --- bodies that are not requests -----------------------------------------------------------------------------------


# A request with one or two wrong parameters gets further than one that is all wrong.
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
    "presence_penalty": st.floats(-2, 2.1),
    "frequency_penalty": st.floats(-2.1, 2),
    "logit_bias": st.dictionaries(st.integers(-1, 1864).map(str), st.floats(-100, 100), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 1864), max_size=3),
    "min_tokens": st.integers(0, 3),
    "allowed_token_ids": st.lists(st.integers(0, 1864), max_size=3),
    "bad_words": st.lists(st.text(max_size=3), max_size=3),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 21),
}


@given(content=st.fixed_dictionaries({}, optional=plausible))
@example(content={"prompt": [*range(300)], "repetition_penalty": 1e-308})
@example(content={"prompt": [*range(300)], "repetition_penalty": 0.01, "temperature": 5e-324, "top_p": 5e-324})
@example(content={"prompt": "a", "repetition_penalty": 100, "min_p": 1.0, "logprobs": 20})
@example(content={"prompt": "a", "seed": 2**63 - 1, "n": 9})
@example(content={"prompt": [*range(300)], "max_tokens": 0, "echo": True, "logprobs": 20, "stream": True})
@example(content={"prompt": "a", "logit_bias": {str(id): -100 for id in range(1864)}, "bad_words": ["a"] * 1000})
@example(content={"prompt": [[5] * 512, [300]], "max_tokens": 0, "prompt_logprobs": 20, "echo": True})
@settings(quick, max_examples=200)
def test_nearly_right_requests(client, content):
    assert_valid(client.post("/v1/completions", json={"prompt": "The fox", "max_tokens": 2} | content))
    chat = {name: value for name, value in content.items() if name not in ("prompt", "logprobs")}
    messages = [{"role": "user", "content": "The fox"}]
    assert_valid(client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2} | chat))


DEEP = 10_000
RAW = [
    b"", b"null", b"[]", b'"prompt"', b"{", b"{'prompt': 'a'}", b"\x00", b'{"prompt": "a"} {"prompt": "a"}',
    b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "stop": "\\ud800"}', b'{"prompt": "a", "model": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "deadline": Infinity}', b'{"prompt": NaN}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": [' + b"9" * 4000 + b"]}", b'{"prompt": "a", "priority": -' + b"9" * 4000 + b', "max_tokens": 1}',
    b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", b'{"prompt": ' + b'{"a":' * DEEP, b"[" * DEEP,
    b'{"messages": ' + b'[{"content":' * 300 + b"0" + b"}]" * 300 + b"}", b'{"prompt": "a", "prompt": 5}',
    '{"prompt": "a", "max_tokens": 1}'.encode("utf-16"), '{"prompt": "ä"}'.encode("latin-1"), b"\xef\xbb\xbf{}",
    b'{"prompt": "\\u0000", "max_tokens": 1}', b"x" * 2_000_000, b'{"prompt": "' + b"a " * 500_000 + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_not_requests(client, path):
    for raw in RAW:
        for kind in (JSON, {"Content-Type": "application/json; charset=latin-1"}):
            assert_valid(client.post(path, content=raw, headers=kind))


# --- headers and lines ----------------------------------------------------------------------------------------------


LINES = [
    b"GET / HTTP/one\r\n\r\n", b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /%ff%fe/\xc3 HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip


def test_bytes_that_are_not_http_cost_nothing_but_their_connection(server, client):
    for line in LINES:
        connection = RawConnection(server, line)
        response = connection.socket.recv(2**16)
        assert response == b"" or response.startswith(b"HTTP/1.1 4"), response
        connection.close()
    assert client.get("/health").status_code == 200
