"""A server under faults: every request that fails gets its reason, no other request is affected, nothing is left over.

Seconds say little on a machine with other work. So the engine waits at a gate in the middle of its forward passes, and
the tests count iterations. One test of each kind is fast enough for every run; the rest are marked slow. The end of a
server is test_server_shutdown.py.
"""

import httpx
import pytest

from tests.support.serving import (
    FOX,
    MILLER,
    OWL,
    PATIENCE,
    RawConnection,
    body,
    error_of,
    expected,
    gated,
    post,
    send_in_order,
    text_of_chunks,
    text_of_response,
    wait_until,
)
from tests.tools import soak

slow = pytest.mark.slow
streamed_or_slow = pytest.mark.parametrize("stream", [True, pytest.param(False, marks=slow)])


def computed_in_last_pass(server) -> list[str]:
    """Return the requests that the engine's last forward pass computed."""
    row_steps = server.engine.trace.passes[-1].row_steps
    return [row.request_id for row in row_steps if row.work in ("prefill", "decode")]


def wait_for_streams(server, number: int) -> None:
    """Wait until the server has noticed which clients have left, and has told the engine."""
    wait_until(lambda: len(server.streams()) == number, "the server did not notice that a client left")


# --- a bounded queue ------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_before_any_header_of_a_stream():
    with gated(max_queue=3) as (server, gate):
        requests = send_in_order(server, *[body(OWL, 6, stream=n % 2 == 1) for n in range(4)])  # 2 run, 2 wait
        assert post(server, **body([OWL, OWL], 6)).status_code == 429, "there is room for one sequence only"
        requests += send_in_order(server, body(OWL, 6))
        passes = gate.passes
        for stream in (False, True):
            response = post(server, **body(OWL, 6, stream=stream))
            assert response.headers["content-type"] == "application/json"
            assert response.headers["retry-after"] == "1"
            error = error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        chat = {"messages": [{"role": "user", "content": OWL}], "stream": True}
        assert post(server, "/v1/chat/completions", **chat).status_code == 429
        assert server.num_in_flight() == 5 and gate.passes == passes, "a refused request costs nothing"
        gate.open()
        assert [request.text for request in requests] == [expected(OWL, 6).text] * 5
        assert post(server, **body(OWL, 6)).status_code == 200, "there is room again"
        server.assert_empty()


@slow
def test_the_priority_decides_which_request_leaves_the_queue_first():
    with gated(config={"policy": "priority", "max_batch_size": 1}) as (server, gate):
        first, late, soon = send_in_order(server, body(OWL, 1), body(FOX, 3, priority=9), body(MILLER, 3, priority=1))
        wait_until(lambda: gate.passes == 1)
        gate.allow()  # the first one ends, and the next pass begins
        assert first.outcome[0] == 200
        gate.allow(3)
        assert soon.text == expected(MILLER, 3).text and late.response is None
        gate.open()
        assert late.text == expected(FOX, 3).text


# --- a client that disconnects --------------------------------------------------------------------------------------


@streamed_or_slow
def test_a_client_that_disconnects_frees_its_row_and_blocks_within_one_iteration(stream):
    with gated() as (server, gate):
        tasks = server.num_tasks()
        leaving = RawConnection.posting(server, body(MILLER, 100, stream=stream))
        wait_until(lambda: server.num_in_flight() == 1 and gate.passes == 1)
        stays, waits = send_in_order(server, body(OWL, 9), body(FOX, 4))
        gate.allow(2)  # both rows have a token, and the gate holds the third iteration
        if stream:
            assert leaving.read_until(b"data: ").startswith(b"HTTP/1.1 200")
        left, stayed = server.engine.running
        assert computed_in_last_pass(server) == [left, stayed]
        leaving.close()
        wait_for_streams(server, 2)
        gate.allow()  # ends the iteration that had begun; the next one has begun
        assert computed_in_last_pass(server) == [left, stayed]
        assert server.engine.running == [stayed, server.streams()[1]]
        gate.allow()
        computed = computed_in_last_pass(server)
        assert left not in computed and len(computed) == 2, "the waiting request has the row"
        tables = server.engine.block_manager.tables
        assert {sequence.label for sequence in tables} == set(server.engine.running)
        gate.open()
        assert stays.text == expected(OWL, 9).text and waits.text == expected(FOX, 4).text
        server.assert_empty()
        wait_until(lambda: server.num_tasks() <= tasks, "tasks are left over")
        metrics = httpx.get(server.url + "/metrics").text
        assert 'engine_sequences_finished_total{reason="abort"} 1.0' in metrics
        assert stream or 'engine_requests_total{status="499"} 1.0' in metrics


# --- deadlines ------------------------------------------------------------------------------------------------------


@streamed_or_slow
def test_a_deadline_that_passes_in_the_queue_is_504(stream):
    with gated(deadline=PATIENCE) as (server, gate):
        first, second = send_in_order(server, body(OWL, 5), body(MILLER, 5))
        response = post(server, **body(FOX, 5, deadline=0.1, stream=stream))
        error = error_of(response, 504)
        assert error["code"] == "deadline_passed" and "0.1 s" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        wait_for_streams(server, 2)
        gate.open()
        assert first.text == expected(OWL, 5).text and second.text == expected(MILLER, 5).text
        server.assert_empty()
        assert 'status="504"} 1.0' in httpx.get(server.url + "/metrics").text


def test_a_deadline_that_passes_during_a_stream_is_its_last_event():
    with gated(deadline=2) as (server, gate):
        (request,) = send_in_order(server, body(OWL, 50, stream=True))
        gate.allow(2)
        status, chunks = request.outcome
        assert status == 200 and text_of_chunks(chunks[:-1]) == expected(OWL, 2).text
        assert chunks[-1]["error"]["code"] == "deadline_passed" and "[DONE]" not in chunks
        gate.open()
        server.assert_empty()


# --- faults of the engine -------------------------------------------------------------------------------------------


def test_a_failed_forward_pass_is_500_for_its_requests_and_no_other():
    with gated() as (server, gate):
        gate.faults = {2: RuntimeError("out of memory")}
        complete, streamed, waiting = send_in_order(server, body(OWL, 9), body(MILLER, 9, stream=True), body(FOX, 5))
        gate.open()
        error = error_of(complete.outcome, 500)
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert error["message"] == "RuntimeError: out of memory"
        status, chunks = streamed.outcome
        assert status == 200 and chunks[-1] == {"error": error}, "its headers had been sent, so it is an event"
        assert text_of_chunks(chunks[:-1]) == expected(MILLER, len(chunks) - 1).text
        assert waiting.text == expected(FOX, 5).text
        for prompt in (OWL, MILLER):  # the failed pass may have written half of their blocks
            assert text_of_response(post(server, **body(prompt, 12)).json()) == expected(prompt, 12).text
        assert httpx.get(server.url + "/health").status_code == 200
        server.assert_empty()
        assert 'engine_sequences_finished_total{reason="error"} 2.0' in httpx.get(server.url + "/metrics").text


def test_a_policy_that_fails_ends_all_requests_and_the_server_continues():
    with gated() as (server, gate):
        requests = send_in_order(server, *[body(OWL, 9, stream=n == 0) for n in range(4)])
        gate.allow(2)
        schedule = server.engine.scheduler.schedule

        def fail(*_):
            server.engine.scheduler.schedule = schedule
            raise LookupError("no plan")

        server.engine.scheduler.schedule = fail
        gate.open()
        status, chunks = requests[0].outcome
        assert status == 200 and chunks[-1]["error"]["message"] == "LookupError: no plan"
        for request in requests[1:]:
            assert error_of(request.outcome, 500)["message"] == "LookupError: no plan"
        server.assert_empty()
        assert text_of_response(post(server, **body(OWL, 9)).json()) == expected(OWL, 9).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_engine_ends_every_request():
    with gated() as (server, gate):
        gate.faults = {2: SystemExit("the end")}
        running, streamed, waiting = send_in_order(server, body(OWL, 9), body(MILLER, 9, stream=True), body(FOX, 5))
        gate.allow(2)
        wait_until(lambda: streamed.chunks, "the stream has not begun")
        gate.open()
        assert "The engine has stopped: SystemExit: the end" in error_of(running.outcome, 500)["message"]
        assert "The engine has stopped" in streamed.outcome[1][-1]["error"]["message"]
        assert "The engine has stopped" in error_of(waiting.outcome, 500)["message"]
        assert error_of(httpx.get(server.url + "/health"), 503)
        assert "must be restarted" in error_of(post(server, **body(OWL, 2, stream=True)), 500)["message"]
        assert httpx.get(server.url + "/metrics").status_code == 200
        assert server.num_in_flight() == 0


@slow
def test_a_small_soak():
    figures = soak.run(requests=400, times_capacity=3.0, seed=3, restarts=1)
    assert soak.broken_promises(figures) == []
    ends = figures["ends"]
    assert ends.keys() == set(soak.GOOD_ENDS) and ends.total() == 400 and min(ends.values()) > 3, ends
    assert figures["retried"] > 0
