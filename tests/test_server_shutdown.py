"""The end of a server: accepted requests finish, others are refused, and what takes too long ends with its reason."""

import signal
import sys
import threading

import httpx
import pytest

from helpers.server import __main__ as command
from helpers.server import launch
from tests.support.serving import (
    MILLER,
    OWL,
    PATIENCE,
    BackgroundRequest,
    body,
    error_of,
    expected,
    post,
    serving,
    wait_until,
)

slow = pytest.mark.slow


def iterations(server) -> float:
    return float(httpx.get(server.url + "/metrics").text.split("\nengine_iterations_total ")[1].split("\n")[0])


def send_and_begin(server, *bodies: dict) -> list[BackgroundRequest]:
    """Send requests in this order to a launched server, and wait until it has begun with the first ones."""
    requests = []
    for number, settings in enumerate(bodies, 1):
        requests.append(BackgroundRequest(server, **settings))
        line = f"engine_sequences_unfinished {number}.0"
        wait_until(lambda line=line: line in httpx.get(server.url + "/metrics").text)
    wait_until(lambda: iterations(server) >= 2)
    return requests


def test_an_idle_server_ends_at_once():
    with serving() as server:
        assert post(server, **body(OWL, 2)).status_code == 200
        with httpx.Client(base_url=server.url) as idle:
            idle.get("/health")
            server.end()
        assert not server.thread.alive and not server.thread._worker._thread.is_alive()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenizer")]


@slow
def test_accepted_requests_finish_before_the_end_and_no_other_is_accepted():
    with launch("--rows", "2", "--pace", "0.05", "--grace", "60") as server:
        bodies = [body(OWL, 20), body(MILLER, 20, stream=True), body(OWL, 15, stream=True), body(MILLER, 15)]
        requests = send_and_begin(server, *bodies)  # two of them wait for a row
        watching = BackgroundRequest(server, "/events", "GET")
        server.process.send_signal(signal.SIGTERM)
        refused = 0
        while server.process.poll() is None and refused < 3:  # new connections, or new requests on old ones
            try:
                refused += httpx.get(server.url + "/health").status_code == 503
            except httpx.TransportError:
                refused += 1
        assert refused == 3
        for request, settings in zip(requests, bodies, strict=True):
            assert request.text == expected(settings["prompt"], settings["max_tokens"]).text
            assert not settings.get("stream") or request.chunks[-1] == "[DONE]"
        watching.wait()
        server.process.wait(PATIENCE)


ENDLESS = [body(OWL, 400, ignore_eos=True, stream=stream) for stream in (False, True, False, True)]


def assert_shut_down(requests: list[BackgroundRequest]) -> None:
    """Check that the endless requests, of which the second had begun to stream, ended because of the shutdown."""
    for number, request in enumerate(requests):
        status, content = request.outcome
        if number == 1:  # its headers had been sent
            assert status == 200 and content[-1]["error"]["code"] == "shutting_down" and len(content) > 1
        else:
            assert error_of((status, content), 503)["code"] == "shutting_down"
            assert request.response.headers["retry-after"] == "1"


@slow
@pytest.mark.parametrize("grace", ["0", "1"])
def test_a_request_that_cannot_finish_in_time_ends_with_the_reason(grace):
    """A server also ends when its launcher's process ends, which ends its standard input."""
    with launch("--rows", "2", "--pace", "0.2", "--grace", grace, "--max-queue", "9") as server:
        requests = send_and_begin(server, *ENDLESS)  # the last two wait for a row
        wait_until(lambda: requests[1].chunks, "the stream has not begun")
        if grace == "0":
            server.process.stdin.close()
        else:
            server.process.send_signal(signal.SIGTERM)
        assert_shut_down(requests)
        server.process.wait(PATIENCE)


@slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_finishes_the_accepted_requests_and_a_second_one_stops_at_once():
    with launch("--rows", "2", "--pace", "0.2", "--max-queue", "9") as server:
        requests = send_and_begin(server, *ENDLESS)
        wait_until(lambda: requests[1].chunks, "the stream has not begun")
        server.process.send_signal(signal.SIGINT)
        before = len(requests[1].chunks)
        wait_until(lambda: len(requests[1].chunks) > before + 3, "the stream has not continued")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert_shut_down(requests)
        assert server.process.wait(PATIENCE) == 0


def test_ctrl_c_while_the_model_is_loaded_ends_the_program_without_a_traceback(monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit) as caught:
        command.main(["--port", "0"])
    assert caught.value.code == 130
