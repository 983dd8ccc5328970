"""Clients that send slowly or never read: they cost no other client its response, and end within a time limit."""

import contextlib
import json
import signal
import time

import h11
import httpx
import pytest

from helpers.server import connections, launch
from helpers.server.connections import ConnectionLimits, GuardedConnection
from tests.support.serving import (
    OWL,
    PATIENCE,
    RawConnection,
    body,
    expected,
    gated,
    post,
    serving,
    text_of_response,
    wait_until,
)

slow = pytest.mark.slow
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SHORT = ConnectionLimits(client_timeout=0.3)
# Long enough for the buffers of both ends, which hold a few kilobytes, to be full.
LONG = body(OWL, 300, n=2, temperature=1, seed=1, logprobs=5, ignore_eos=True)


def connections_of(server) -> list[GuardedConnection]:
    return server.evaluate(lambda: list(server.server.server_state.connections))


def num_connections(server) -> int:
    return len(connections_of(server))


# --- slow senders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", HEAD, HEAD + b'Content-Length: 99\r\n\r\n{"prompt": "a'])
def test_an_incomplete_request_ends_once_the_server_has_waited_too_long(data):
    with serving(limits=SHORT) as server:
        connection = RawConnection(server, data)
        with contextlib.suppress(ConnectionError):
            assert connection.socket.recv(1) == b""
        wait_until(lambda: num_connections(server) == 0)
        assert post(server, **body(OWL, 2)).status_code == 200
        server.assert_empty()


def test_an_invalid_chunk_ends_the_connection_without_a_traceback(caplog):
    with serving() as server:
        connection = RawConnection(
            server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.read_until(b"}")
        connection.socket.sendall(b"zz\r\n")
        assert connection.socket.recv(2**16) == b"", "the connection ends"
    assert "Traceback" not in caplog.text


def test_a_body_of_too_many_chunks_is_refused():
    """Each of them costs the event loop as much as a kilobyte."""
    with serving() as server:
        for number, status in ((connections.MAX_CHUNKS, 200), (connections.MAX_CHUNKS + 1, 400)):
            content = json.dumps(body(OWL, 2)).encode()
            chunks = b"1\r\n \r\n" * (number - 1) + b"%x\r\n%b\r\n" % (len(content), content)
            head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            assert b" %d " % status in RawConnection(server, head + chunks + b"0\r\n\r\n").read_until(b"\r\n")
        wait_until(lambda: num_connections(server) == 0)
        server.assert_empty()


def test_a_request_that_arrives_byte_by_byte_has_no_longer_than_one_that_stops():
    with serving(limits=SHORT) as server:
        connection = RawConnection(server, b"POST /")
        with contextlib.suppress(OSError):
            for _ in range(600):  # seconds, if nothing ends it
                connection.socket.sendall(b"x")
                time.sleep(0.05)
                if num_connections(server) == 0:
                    break
        assert num_connections(server) == 0


def test_after_a_response_the_next_request_has_its_time_anew():
    """On the same connection: a library would open another one."""
    with serving(limits=ConnectionLimits(client_timeout=0.6)) as server:
        connection = RawConnection(server, b"")
        for _ in range(5):
            connection.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.read_until(b"}")
            time.sleep(0.2)


def test_a_request_that_takes_longer_than_the_limit_is_not_a_slow_client():
    with serving(limits=SHORT, pace=0.2) as server:
        assert text_of_response(post(server, **body(OWL, 3)).json()) == expected(OWL, 3).text
        with httpx.stream("POST", server.url + "/v1/completions", json=body(OWL, 3, stream=True)) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"


# --- clients that do not read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_disconnected_and_its_request_cancelled(stream):
    with serving(limits=ConnectionLimits(client_timeout=0.3, send_buffer=4096)) as server:
        tasks = server.num_tasks()
        deaf = RawConnection.posting(server, LONG | {"stream": stream}, receive_buffer=4096)
        wait_until(lambda: server.num_in_flight() == 2)
        wait_until(lambda: num_connections(server) == 0)
        server.assert_empty()
        wait_until(lambda: server.num_tasks() <= tasks)
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := deaf.socket.recv(2**16):
                data += piece
        assert not data.endswith((b"0\r\n\r\n", b"}}")), "HTTP shows that it is incomplete"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_slowly_but_steadily_gets_everything(stream):
    with serving(limits=ConnectionLimits(client_timeout=0.3, send_buffer=4096)) as server:
        whole = post(server, **LONG).json()
        slow_reader = RawConnection.posting(server, LONG | {"stream": stream}, receive_buffer=4096)
        http, content, began = h11.Connection(h11.CLIENT), b"", time.monotonic()
        http.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
        http.send(h11.EndOfMessage())
        while type(event := http.next_event()) is not h11.EndOfMessage:
            if event is h11.NEED_DATA:
                http.receive_data(slow_reader.socket.recv(2**12))
                time.sleep(0.01)
            elif type(event) is h11.Data:
                content += event.data
        assert time.monotonic() - began > 0.4, "longer than the limit, so that it would have passed"
        *events, end = content.decode().split("\n\n") if stream else (content, b"")
        choices = [c for event in events if event != "data: [DONE]" for c in json.loads(event[6 * stream :])["choices"]]
        for index in range(2):
            offsets = [n for c in choices if c["index"] == index for n in c["logprobs"]["text_offset"]]
            assert offsets == whole["choices"][index]["logprobs"]["text_offset"] and len(offsets) == 300 and not end
        slow_reader.close()
        server.assert_empty()


def test_nothing_is_made_to_be_sent_at_once_to_a_client_that_has_yet_to_read():
    with serving() as server:
        waiting = RawConnection(server, HEAD)
        wait_until(lambda: num_connections(server) == 1)
        (connection,) = connections_of(server)
        connection.flow.write_paused = True
        assert not connection.send_at_once(lambda: 1 / 0)
        waiting.close()


@pytest.mark.parametrize("sent", ["a long body", "another request"])
def test_a_client_that_leaves_is_noticed_whatever_it_has_sent(sent):
    content = json.dumps(body(OWL, 40, user="x" * (100_000 if sent == "a long body" else 1))).encode()
    with gated() as (server, gate):
        leaver = RawConnection(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(content))
        time.sleep(0.05)
        leaver.socket.sendall(content)
        wait_until(lambda: server.num_in_flight() == 1)
        if sent == "another request":
            leaver.socket.sendall(HEAD)
            time.sleep(0.05)
        leaver.close()
        wait_until(lambda: num_connections(server) == 0)
        gate.open()
        server.assert_empty()


@slow
def test_the_server_ends_within_its_grace_period_whether_or_not_its_clients_read():
    with launch("--grace", "3", "--client-timeout", "600") as server:
        large = LONG | {"max_tokens": 450, "logprobs": 20}  # larger than the system's buffers
        connections = [
            RawConnection.posting(server, large | {"stream": stream}, receive_buffer=4096) for stream in (False, True)
        ]
        connections += [RawConnection(server, data) for data in (HEAD, HEAD + b"Content-Length: 99\r\n\r\n")]
        wait_until(lambda: "engine_generated_tokens_total 1800" in httpx.get(server.url + "/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)  # a fifth of the clients' time limit


# --- a limit of connections -----------------------------------------------------------------------------------------


def test_a_request_on_a_connection_beyond_the_limit_is_503_until_there_is_room():
    with serving(limits=ConnectionLimits(max_connections=2)) as server:
        others = [RawConnection(server, HEAD) for _ in range(2)]
        wait_until(lambda: num_connections(server) == 2)
        assert httpx.get(server.url + "/health").status_code == 503
        others.pop().close()
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 200)


def test_beyond_twice_the_limit_a_connection_is_closed_at_once():
    with serving(limits=ConnectionLimits(max_connections=2)) as server:
        others = [RawConnection(server, HEAD) for _ in range(4)]
        wait_until(lambda: num_connections(server) == 4)
        with contextlib.suppress(ConnectionError):
            assert RawConnection(server, b"").socket.recv(1) == b""
        assert num_connections(server) == len(others)
