"""Who may use the server, and how little a refused request costs: most are refused before their body is read."""

import itertools
import json

import httpx
import pytest

from helpers.command_line import parse
from helpers.server import __main__ as command
from helpers.server.options import allowed_hosts, name_of
from tests.support.serving import OWL, RawConnection, body, error_of, post, serving

KEY = "a key"
LOOPBACK = allowed_hosts("127.0.0.1", None)


@pytest.fixture(scope="module")
def server():
    with serving(max_body=10_000, api_key=KEY, allowed_hosts=LOOPBACK) as server:
        yield server
        server.assert_empty()


def status_before_any_body(server, host="127.0.0.1", key=KEY, length=5000, path="/v1/completions") -> int:
    """Send a request without its body, and return the status of the response."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    connection = RawConnection(server, f"{head}Authorization: Bearer {key}\r\n\r\n".encode())
    try:
        return int(connection.read_until(b"\r\n\r\n").split()[1])
    finally:
        connection.close()


# --- before the body is read ----------------------------------------------------------------------------------------


def test_host_key_and_length_are_checked_before_the_body_is_read_in_this_order(server):
    wrong = {"host": "evil.example", "key": "wrong", "length": 10**9}
    assert status_before_any_body(server, **wrong) == 400
    assert status_before_any_body(server, **wrong | {"host": "localhost"}) == 401
    assert status_before_any_body(server, length=10**9) == 413
    assert status_before_any_body(server, key="wrong", path="/no/such/address") == 401


def test_only_this_machines_own_names_are_allowed_so_dns_rebinding_reads_nothing(server):
    for host in ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:80", "127.0.0.1:1"):
        assert httpx.get(server.url + "/health", headers={"Host": host}).status_code == 200, host
    others = "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[", ""
    for host, path in itertools.product(others, ("/", "/health", "/v1/models", "/events", "/page/page.js")):
        response = httpx.get(server.url + path, headers={"Host": host, "Authorization": f"Bearer {KEY}"})
        assert (response.status_code, response.text) == (400, "Invalid host header")


def test_other_names_can_be_allowed():
    with serving(allowed_hosts=allowed_hosts("127.0.0.1", ["Inside.Example"])) as own:
        for host, status in (("inside.example:80", 200), ("localhost", 200), ("other.example", 400)):
            assert httpx.get(own.url + "/health", headers={"Host": host}).status_code == status
    assert allowed_hosts("127.0.0.1", ["*"]) is None
    assert allowed_hosts("0.0.0.0", None) is None, "its names are not known"
    assert "inside" in allowed_hosts("0.0.0.0", ["inside"])
    assert {"[::]", "[fd00::1]", "[fd00::2]"} <= {*allowed_hosts("::", ["fd00::1", "[fd00::2]"])}, "as URLs spell them"
    assert parse(command.command, ["--allowed-host", "a", "--allowed-host", "b"]).allowed_host == ["a", "b"]


# --- the name of the model, and the length of a body ------------------------------------------------------------------


def test_a_model_is_called_by_the_name_of_its_folder(tmp_path):
    assert name_of(str(tmp_path)) == name_of(f"{tmp_path}/") == tmp_path.name
    assert name_of("openai-community/gpt2") == "openai-community/gpt2", "a Hub id is a name"
    assert name_of(None) == name_of("") == "tiny-model"


def test_too_long_a_body_is_413_whatever_length_it_claims():
    with serving(max_body=10_000) as server:
        fits, long = json.dumps(body("x" * 5000, 600)), json.dumps(body("x" * 10_000))
        json_type = {"Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions", "/pace"):
            for content in (long.encode(), (long[start : start + 999].encode() for start in range(0, len(long), 999))):
                response = httpx.post(server.url + path, content=content, headers=json_type)
                assert "at most 10000 bytes" in error_of(response, 413)["message"]
        response = httpx.post(server.url + "/v1/completions", content=fits, headers=json_type)
        assert "context is 512" in error_of(response, 400)["message"]
        # A body without end is not read to its end.
        endless = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        connection = RawConnection(server, endless + b"1000000000000\r\n\r\n" + b"x" * 20_000)
        assert connection.read_until(b"\r\n").startswith(b"HTTP/1.1 413")
        connection.close()
        assert post(server, **body(OWL, 2)).status_code == 200
        server.assert_empty()
