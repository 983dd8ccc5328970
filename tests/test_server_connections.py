"""Clients that send slowly or never read: they cost no other client its response, and end within a time limit."""

import contextlib
import json
import signal
import socket
import sys
import time

import h11
import httpx
import pytest

from helpers.server import connections, launch
from helpers.server.connections import NUM_OTHER_DESCRIPTORS, ConnectionLimits, GuardedConnection, OneWriteConnection
from tests.support.serving import (
    FOX,
    OWL,
    PATIENCE,
    RawConnection,
    body,
    error_of,
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


def response_of(connection: RawConnection) -> tuple[int, dict]:
    """Read a whole response, up to the end of the connection."""
    data = b""
    while piece := connection.socket.recv(2**16):
        data += piece
    head, _, content = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("headers", [[], [("Content-Length", "29")], [("Transfer-Encoding", "chunked")]], ids=str)
def test_responses_have_the_bytes_of_h11_one_after_another_on_a_connection(version, headers):
    own, plain = OneWriteConnection(), h11.Connection(h11.SERVER)
    parts = [b"ab", b"", b"cde" * 9]  # sizes of one and two digits
    streamed = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=part) for part in parts)]
    short = [h11.Response(status_code=200, headers=[("Content-Length", "2")]), h11.Data(data=b"no")]
    for events in (streamed, short) if version == "1.1" else (streamed,):
        sent: dict[h11.Connection, list[bytes]] = {own: [], plain: []}
        for connection in sent:
            connection.receive_data(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
            while type(connection.next_event()) is not h11.EndOfMessage:
                pass
            sent[connection] += [connection.send(event) for event in (*events, h11.EndOfMessage())]
        assert b"".join(sent[own]) == b"".join(sent[plain])
        if events is streamed and headers[:1] != [("Content-Length", "29")]:
            assert sent[own] == sent[plain], "each part by itself"
        if version == "1.1":
            own.start_next_cycle(), plain.start_next_cycle()


# --- slow senders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [HEAD, HEAD + b"Content-Length: 99\r\n\r\n", HEAD + b'Content-Length: 99\r\n\r\n{"prompt": "a'],
    ids=["head", "no body", "body"],
)
def test_an_incomplete_request_is_408_once_the_server_has_waited_too_long(data):
    with serving(limits=SHORT) as server:
        connection = RawConnection(server, data)
        error = error_of(response_of(connection), 408)
        assert error["code"] == "client_timeout" and "not complete after 0.3 s" in error["message"]
        wait_until(lambda: num_connections(server) == 0)
        assert post(server, **body(OWL, 2)).status_code == 200
        server.assert_empty()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("responds_first", [False, True])
def test_an_invalid_chunk_ends_the_connection_without_a_traceback(caplog, method, responds_first):
    head = method + b" /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving() as server:
        connection = RawConnection(server, head if responds_first else head + b"zz\r\n")
        if responds_first:
            connection.read_until(b"}" if method == b"GET" else b"\r\n\r\n")
            connection.socket.sendall(b"zz\r\n")
        rest = b""
        while piece := connection.socket.recv(2**16):  # until the end of the connection
            rest += piece
        assert rest.startswith(b"" if responds_first else b"HTTP/1.1 400 ")
        assert (b"error" in rest) == (method == b"GET" and not responds_first)
    assert "Traceback" not in caplog.text


def test_a_body_of_too_many_chunks_is_refused():
    """Each of them costs the event loop as much as a kilobyte."""
    with serving() as server:
        for number, status in ((connections.MAX_CHUNKS, 200), (connections.MAX_CHUNKS + 1, 400)):
            content = json.dumps(body(OWL, 2)).encode()
            chunks = b"1\r\n \r\n" * (number - 1) + b"%x\r\n%b\r\n" % (len(content), content)
            head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            assert response_of(RawConnection(server, head + chunks + b"0\r\n\r\n"))[0] == status
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


def test_a_connection_without_any_request_is_closed_without_a_response():
    with serving(limits=SHORT) as server:
        assert RawConnection(server, b"").socket.recv(1) == b""
        with httpx.Client(base_url=server.url) as client:  # after a response, the next request has its time anew
            for _ in range(4):
                assert client.get("/health").status_code == 200
                time.sleep(0.15)


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


def test_a_client_that_reads_slowly_but_steadily_gets_everything():
    with serving(limits=ConnectionLimits(client_timeout=0.3, send_buffer=4096)) as server:
        slow_reader = RawConnection.posting(server, LONG, receive_buffer=4096)
        http, content, began = h11.Connection(h11.CLIENT), b"", time.monotonic()
        http.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
        http.send(h11.EndOfMessage())
        most_unread = 0
        while type(event := http.next_event()) is not h11.EndOfMessage:
            if event is h11.NEED_DATA:
                http.receive_data(slow_reader.socket.recv(2**12))
                time.sleep(0.01)
                (connection,) = connections_of(server)
                most_unread = max(most_unread, connection.num_unread)
            elif type(event) is h11.Data:
                content += event.data
        assert time.monotonic() - began > 0.4, "longer than the limit, so that it would have passed"
        response = json.loads(content)
        assert response["usage"]["completion_tokens"] == 600
        assert [len(choice["logprobs"]["tokens"]) for choice in response["choices"]] == [300, 300]
        assert most_unread < 0.6 * len(content), "one choice at a time waits as text"
        slow_reader.close()
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


# --- writes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def writes(monkeypatch) -> list[bytes]:
    """What the server writes to sockets; clients call `sendall`, and the event loop wakes itself by a zero."""
    if sys.platform == "win32":
        pytest.skip("the event loop writes without `socket.send`")
    written, send = [], socket.socket.send

    def recording_send(self, data, *flags):
        if bytes(data) != b"\0":
            written.append(bytes(data))
        return send(self, data, *flags)

    monkeypatch.setattr(socket.socket, "send", recording_send)
    return written


@pytest.mark.parametrize(
    ("request_line", "status", "end"),
    [
        (b"POST /v1/completions", b"200", b"}}"),
        (b"HEAD /health", b"200", b"\r\n\r\n"),
        (b"GET /page/page.css", b"200", b"}\n"),
        (b"an invalid request", b"400", b"}}"),
    ],
)
def test_a_short_response_is_one_write(writes, request_line, status, end):
    data = json.dumps(body(OWL, 2)).encode() if request_line.startswith(b"POST") else b""
    with serving() as server:
        head = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        connection = RawConnection(server, request_line + head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        while connection.socket.recv(2**16):
            pass
        (write,) = writes
        assert write.startswith(b"HTTP/1.1 " + status) and write.endswith(end)


def test_the_head_of_a_stream_is_sent_before_its_first_event(writes):
    with serving() as server:
        RawConnection.posting(server, body(OWL, 2, stream=True)).read_until(b"[DONE]")
        assert writes[0].startswith(b"HTTP/1.1 200 ") and writes[0].endswith(b"\r\n\r\n")
        assert b"data: " in writes[1]


# --- a limit of connections -----------------------------------------------------------------------------------------


def test_at_the_limit_the_connection_that_was_awaited_for_longest_makes_room(monkeypatch):
    monkeypatch.setattr(connections, "SENDING", 0.0)
    with serving(limits=ConnectionLimits(max_connections=6)) as server:  # from 4 on, stalled ones make room
        slow_senders = []
        for number in range(12):
            slow_senders.append(RawConnection(server, HEAD))
            wait_until(lambda number=number: num_connections(server) >= min(number + 1, 4))
        assert httpx.get(server.url + "/health").json() == {"status": "ok"}
        assert text_of_response(post(server, **body(OWL, 3)).json()) == expected(OWL, 3).text
        for connection in slow_senders[:8]:
            error = error_of(response_of(connection), 503)
            assert error["code"] == "too_many_connections" and "of at most 6" in error["message"]
        wait_until(lambda: num_connections(server) <= 4)
        server.assert_empty()


def test_when_the_server_works_for_every_connection_a_new_one_is_503_and_none_is_lost():
    with gated(limits=ConnectionLimits(max_connections=2)) as (server, gate):
        working = [RawConnection.posting(server, body(prompt, 3)) for prompt in (OWL, FOX)]
        wait_until(lambda: server.num_in_flight() == 2)
        response = httpx.get(server.url + "/health")
        assert response.headers["retry-after"] == "1" and response.headers["connection"] == "close"
        assert error_of(response, 503)["code"] == "too_many_connections"
        gate.open()
        for connection, prompt in zip(working, (OWL, FOX), strict=True):
            assert json.dumps(expected(prompt, 3).text).encode() in connection.read_until(b"}}")
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 200, "their connections are idle")


def test_a_new_connection_costs_no_client_its_own_before_it_could_send_its_request(monkeypatch):
    monkeypatch.setattr(connections, "SENDING", PATIENCE)
    with serving(limits=ConnectionLimits(max_connections=20, client_timeout=2 * PATIENCE)) as server:
        early, flood = RawConnection(server, b""), []
        for number in range(22):  # not at once, which would overflow the queue of connections to accept
            wait_until(lambda number=number: num_connections(server) >= min(1 + number, 20))
            flood.append(RawConnection(server, HEAD))
        for refused in flood[19:]:  # its request, which is not read, does not discard the refusal
            assert error_of(response_of(refused), 503)["code"] == "too_many_connections"
        early.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert early.read_until(b"}").startswith(b"HTTP/1.1 200")


def test_a_request_that_a_late_event_loop_has_not_read_is_not_held_against_its_client(monkeypatch):
    monkeypatch.setattr(connections, "SENDING", 0.0)
    with serving() as server:
        client = RawConnection(server, b"GET /")
        wait_until(lambda: num_connections(server) == 1)
        (connection,) = connections_of(server)
        wait_until(lambda: server.evaluate(lambda: connection.may_make_room))

        def sends_while_the_event_loop_is_busy() -> bool:
            client.socket.sendall(b"health HTTP/1.1\r\n")
            return connection.may_make_room

        assert not server.evaluate(sends_while_the_event_loop_is_busy)


def test_a_client_that_has_only_paused_keeps_its_place_and_one_that_has_stalled_does_not():
    with serving(limits=ConnectionLimits(max_connections=1, send_buffer=4096)) as server:
        deaf = RawConnection.posting(server, LONG, receive_buffer=4096)
        wait_until(lambda: num_connections(server) == 1)
        (connection,) = connections_of(server)
        wait_until(lambda: isinstance(connection.awaited, int))
        server.evaluate(lambda: setattr(connection, "since", server.loop.time() + PATIENCE))  # it has just paused
        assert httpx.get(server.url + "/health").status_code == 503

        def is_admitted_once_the_other_has_stalled():  # on a slow machine, the other may just have read a little more
            server.evaluate(lambda: setattr(connection, "since", server.loop.time() - connections.READING))
            return httpx.get(server.url + "/health").status_code == 200

        wait_until(is_admitted_once_the_other_has_stalled)
        deaf.close()
        server.assert_empty()


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of descriptors")
@pytest.mark.parametrize(
    ("soft", "hard", "connections", "raised"),
    [
        (128, 128, 42, None),
        (1024, 1024, 640, None),
        (20, 20, 1, None),
        (1024, 4096, 2048, 3136),
        (1024, 2048, 1322, 2048),
        (1024, -1, 2048, 3136),
        (-1, -1, 2048, None),
    ],
)
def test_there_are_no_more_connections_than_descriptors_for_them(monkeypatch, soft, hard, connections, raised):
    changes = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: changes.append(limits))
    limits = ConnectionLimits(client_timeout=3).within_descriptors()
    assert limits == ConnectionLimits(connections, 3)
    assert changes == ([] if raised is None else [(raised, hard)])
    allowed = raised or soft
    assert allowed in (20, -1) or limits.max_connections + limits.backlog + NUM_OTHER_DESCRIPTORS <= allowed
