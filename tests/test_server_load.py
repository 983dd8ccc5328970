"""A server under load: large bodies, slow clients and long prompts delay no other request, and leave nothing over."""

import json

import httpx
import pytest

from helpers.server.connections import ConnectionLimits
from helpers.server.protocol import ChatRequest, CompletionRequest
from tests.support.serving import (
    FOX,
    MILLER,
    OWL,
    RawConnection,
    body,
    embedded_engine,
    error_of,
    expected,
    gated,
    post,
    send_in_order,
    serving,
    text_of_response,
    wait_until,
)
from tests.tools import soak

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


# --- all of it ------------------------------------------------------------------------------------------------------


@slow
def test_a_small_soak():
    figures = soak.run(requests=400, times_capacity=3.0, seed=3, restarts=1)
    assert figures.broken() == []
    ends = (figures.completed, figures.refused, figures.left, figures.unread, figures.cut_off)
    assert sum(ends) == 400 and min(ends) > 3, ends
    assert figures.restarts == 1 and figures.retried > 0
