"""A server under load: large bodies, slow clients and long prompts delay no other request, and leave nothing over."""

import json
import threading

import httpx
import pytest

from helpers.server.connections import ConnectionLimits
from helpers.server.protocol import ChatRequest, CompletionRequest
from tests import soak
from tests.serving import (
    FOX,
    MILLER,
    OWL,
    PATIENCE,
    BackgroundRequest,
    RawConnection,
    body,
    embedded_engine,
    error_of,
    events_of,
    expected,
    gated,
    post,
    send_in_order,
    serving,
    text_of_chunks,
    text_of_response,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("one_thread")
slow = pytest.mark.slow


# --- large bodies ---------------------------------------------------------------------------------------------------


def test_too_long_a_body_is_413_whatever_length_it_claims():
    with serving(max_body=10_000) as server:
        fits, long = json.dumps(body("x" * 5000, 600)), json.dumps(body("x" * 10_000))
        json_type = {"Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions", "/pace"):
            for content in (long.encode(), (long[start : start + 999].encode() for start in range(0, len(long), 999))):
                response = httpx.post(server.url + path, content=content, headers=json_type)
                assert "at most 10000 bytes" in error_of((response.status_code, response.json()), 413)["message"]
        response = httpx.post(server.url + "/v1/completions", content=fits, headers=json_type)
        assert "context is 512" in error_of((response.status_code, response.json()), 400)["message"]

        # A body without end is not read to its end.
        endless = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        connection = RawConnection(server, endless + b"1000000000000\r\n\r\n" + b"x" * 20_000)
        assert connection.read_until(b"\r\n").startswith(b"HTTP/1.1 413")
        connection.close()
        assert post(server, **body(OWL, 2)).status_code == 200
        server.assert_empty()


def test_a_body_of_many_mistakes_is_refused_at_once():
    """An error for each of them would keep the event loop busy for seconds."""
    many = 20_000
    prompts = ([-1] * many, [""] * many, [[-1]] * many, [[]] * many, [1] * many + ["a"], [{"text": "x"}] * many)
    wrong = [(CompletionRequest, {"prompt": prompt}) for prompt in prompts]
    wrong += [(CompletionRequest, {"prompt": "a"} | {str(number): 1 for number in range(many)})]
    wrong += [(CompletionRequest, {"prompt": "a", "logit_bias": {str(number): "x" for number in range(many)}})]
    wrong += [(CompletionRequest, {"prompt": "a", "stop": [""] * many})]
    wrong += [(ChatRequest, {"messages": messages}) for messages in (
        [{"role": 1}] * many,
        [{"role": "user", "content": [{"type": "x"}] * many}],
        [{"role": "user", "content": "x"} | {str(number): 1 for number in range(many)}],
    )]  # fmt: skip
    for kind, request in wrong:
        with pytest.raises(ValueError) as caught:
            kind.model_validate(request)
        assert 1 <= caught.value.error_count() <= 20


# --- slow clients ---------------------------------------------------------------------------------------------------


@slow
def test_a_client_that_does_not_read_costs_other_requests_nothing():
    """Its outputs wait in the server; the engine does not wait."""
    with serving(embedded_engine(max_batch_size=4), limits=ConnectionLimits(send_buffer=4096)) as server:
        tasks = server.num_tasks()
        settings = body(OWL, 200, n=3, temperature=1, logprobs=20, ignore_eos=True, stream=True)
        deaf = RawConnection.posting(server, settings, receive_buffer=4096)
        wait_until(lambda: server.num_in_flight() == 3)
        for prompt in (OWL, MILLER, FOX):
            assert text_of_response(post(server, **body(prompt, 20)).json()) == expected(prompt, 20).text
        wait_until(lambda: server.num_in_flight() == 0)
        assert server.engine.running == [] and server.engine.block_manager.used == 0
        assert len(server.server.server_state.tasks) == 1, "the server is still sending"
        deaf.close()
        server.assert_empty()
        wait_until(lambda: server.num_tasks() <= tasks)


@slow
def test_a_client_that_reads_late_gets_everything():
    with serving() as server:
        connection = RawConnection.posting(server, body(OWL, 100, stream=True, logprobs=5), receive_buffer=4096)
        wait_until(lambda: server.num_in_flight() == 1)
        wait_until(lambda: server.num_in_flight() == 0)
        lines = connection.read_until(b"[DONE]").decode().splitlines()
        assert text_of_chunks(events_of(line[line.find("data: ") :] for line in lines)) == expected(OWL, 100).text
        connection.close()


# --- the event loop never waits -------------------------------------------------------------------------------------


@slow
def test_the_server_responds_to_everything_else_during_a_single_iteration():
    with gated() as (server, gate):
        send_in_order(server, body(OWL, 2))
        wait_until(lambda: gate.passes == 1)
        with httpx.Client(base_url=server.url) as client:
            for _ in range(30):
                assert client.get("/health").json() == {"status": "ok"}
                assert client.get("/v1/models").status_code == client.get("/metrics").status_code == 200
                assert client.post("/pace", json={"seconds": 0}).status_code == 200
                assert client.post("/v1/completions", json=body("")).status_code == 400
                assert client.post("/v1/completions", json=body(OWL, 600)).status_code == 400
        assert gate.passes == 1 and server.engine.trace.forward_passes == 0
        gate.open()


@slow
def test_the_server_responds_in_slow_motion():
    with serving(pace=2.0) as server:
        request = BackgroundRequest(server, **body(OWL, 2))
        wait_until(lambda: server.engine.steps == 1)
        responses = 0
        with httpx.Client(base_url=server.url) as client:
            while server.engine.steps == 1:
                responses += client.get("/health").status_code == 200
        assert responses >= 20, "in two seconds"
        server.thread.pace = 0
        assert request.outcome[0] == 200


def slow_validation(engine) -> tuple[list, threading.Event, threading.Event]:
    """Let the engine validate prompts only once the last event is set; return the prompts and (begun, proceed)."""
    validate, prompts, begun, proceed = engine.validator.validate, [], threading.Event(), threading.Event()

    def slow(prompt, params):
        if threading.current_thread().name.startswith("tokenizer"):
            prompts.append(prompt)
            begun.set()
            assert proceed.wait(PATIENCE)
        return validate(prompt, params)

    engine.validator.validate = slow
    return prompts, begun, proceed


@slow
def test_a_long_text_is_not_tokenized_on_the_event_loop():
    with gated(shut=False) as (server, _):
        _, begun, proceed = slow_validation(server.engine)
        request = BackgroundRequest(server, **body(OWL, 3))
        assert begun.wait(PATIENCE)
        for _ in range(20):
            assert httpx.get(server.url + "/health").status_code == 200
        assert server.num_in_flight() == 1, "its place is taken before any work is done for it"
        proceed.set()
        assert request.text == expected(OWL, 3).text


@slow
def test_refused_requests_are_not_even_tokenized():
    with gated(max_queue=1) as (server, gate):
        prompts, _, proceed = slow_validation(server.engine)
        chat = {"messages": [{"role": "user", "content": OWL}], "max_tokens": 2, "temperature": 0}
        requests = [BackgroundRequest(server, **body(OWL, 2)) for _ in range(6)]
        requests += [BackgroundRequest(server, "/v1/chat/completions", **chat) for _ in range(6)]
        wait_until(lambda: sum(request.response is not None for request in requests) == 9, "not 9 of 12 were refused")
        proceed.set()
        gate.open()
        assert sorted(request.outcome[0] for request in requests) == [200] * 3 + [429] * 9
        assert len(prompts) == 3
        server.assert_empty()


# --- all of it ------------------------------------------------------------------------------------------------------


@slow
def test_a_small_soak():
    figures = soak.run(requests=400, times_capacity=3.0, seed=3, restarts=1)
    assert figures.broken() == []
    ends = (figures.completed, figures.refused, figures.left, figures.unread, figures.cut_off)
    assert sum(ends) == 400 and min(ends) > 3, ends
    assert figures.restarts == 1 and figures.retried > 0
