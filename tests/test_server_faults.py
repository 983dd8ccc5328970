"""Under load and faults: whoever is not answered is told so, nobody else notices, and nothing is left over.

Seconds say little on a machine with other work. So the engine of most tests waits at a gate in the middle of its
forward pass, and what is counted is iterations.
"""

import json
import signal
import socket
import threading

import httpx
import pytest

from helpers.server import launch
from helpers.server.protocol import ChatRequest, CompletionRequest
from tests import soak
from tests.serving import (
    PATIENCE,
    Asking,
    Wire,
    body,
    embedded_engine,
    events_of,
    eventually,
    expected,
    gated,
    one_after_another,
    post,
    serving,
    text_of_chunks,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

OWL, MILLER, FOX = "Once upon a time", "There was once a poor miller called Jonas, and", "The quick brown fox"


def error_of(answer: tuple[int, dict | list], status: int) -> dict:
    """The error in an answer with this status, in OpenAI's format."""
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


def working(server) -> list[str]:
    """Whose rows the engine's last iteration computed."""
    return [slot.request_id for slot in server.engine.trace.iterations[-1].slots if slot.work in ("prefill", "decode")]


def accepted(server) -> int:
    return server.ask(lambda: server.thread.open)


def noticed(server, listeners: int) -> None:
    """Wait until the server has noticed that clients have gone, and has told the engine."""
    eventually(lambda: server.ask(lambda: len(server.thread._listeners)) == listeners, "nobody noticed that it left")


# --- a bounded queue ------------------------------------------------------------------------------------------------


def test_beyond_its_queue_the_server_refuses_before_any_header_of_a_stream():
    with gated(max_queue=3) as (server, gate):
        requests = one_after_another(server, *[body(OWL, 6, stream=n % 2 == 1) for n in range(5)])  # 2 rows, 3 wait
        passes = gate.passes
        for stream in (False, True):
            response = post(server, **body(OWL, 6, stream=stream))
            assert response.status_code == 429 and response.headers["content-type"] == "application/json"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        said = {"messages": [{"role": "user", "content": OWL}], "stream": True}
        assert post(server, "/v1/chat/completions", **said).status_code == 429
        assert accepted(server) == 5 and gate.passes == passes, "who is refused costs nothing"
        gate.open()
        for request in requests:
            status, answer = request.answer
            text = text_of_chunks(answer) if isinstance(answer, list) else answer["choices"][0]["text"]
            assert (status, text) == (200, expected(OWL, 6).text)
        assert post(server, **body(OWL, 6)).status_code == 200, "there is room again"
        server.settled()


def test_answers_count_not_requests():
    with gated(max_queue=3) as (server, gate):
        one_after_another(server, body([OWL, FOX], 6, n=2, temperature=1))
        assert post(server, **body([OWL, FOX], 2)).status_code == 429
        (last,) = one_after_another(server, body(OWL, 2))
        assert post(server, **body(OWL, 2)).status_code == 429
        gate.open()
        assert last.answer[0] == 200


def test_a_queue_of_no_places_takes_who_gets_a_row():
    with gated(max_queue=0) as (server, gate):
        requests = one_after_another(server, body(OWL, 2), body(OWL, 2))
        assert post(server, **body(OWL, 2)).status_code == 429
        gate.open()
        assert [request.answer[0] for request in requests] == [200, 200]


def test_priority_decides_who_leaves_the_queue_first():
    with gated(config={"policy": "priority", "max_batch_size": 1}) as (server, gate):
        first, late, soon = one_after_another(
            server, body(OWL, 1), body(FOX, 3, priority=9), body(MILLER, 3, priority=1)
        )
        eventually(lambda: gate.passes == 1)
        gate.allow()  # the first one ends, and the next pass begins
        assert first.answer[0] == 200
        gate.allow(3)
        assert soon.answer[1]["choices"][0]["text"] == expected(MILLER, 3).text and late.response is None
        gate.open()
        assert late.answer[1]["choices"][0]["text"] == expected(FOX, 3).text


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_too_long_a_body_is_refused_however_long_it_says_it_is():
    with serving(max_body=10_000) as server:
        fits, long = json.dumps(body("x" * 5000, 600)), json.dumps(body("x" * 10_000))
        json_type = {"Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions", "/pace"):
            for content in (long.encode(), (long[start : start + 999].encode() for start in range(0, len(long), 999))):
                response = httpx.post(server.url + path, content=content, headers=json_type)
                assert "10000 bytes at most" in error_of((response.status_code, response.json()), 413)["message"]
        response = httpx.post(server.url + "/v1/completions", content=fits, headers=json_type)
        assert "context is 512" in error_of((response.status_code, response.json()), 400)["message"]

        # One that never ends is not read to its end.
        endless = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        wire = Wire(server, endless + b"1000000000000\r\n\r\n" + b"x" * 20_000)
        assert wire.read_until(b"\r\n").startswith(b"HTTP/1.1 413")
        wire.close()
        assert post(server, **body(OWL, 2)).status_code == 200
        server.settled()


def test_a_body_of_nothing_but_mistakes_is_refused_at_once():
    """A complaint for each of them would keep the event loop busy for seconds."""
    many = 20_000
    prompts = ([-1] * many, [""] * many, [[-1]] * many, [[]] * many, [1] * many + ["a"], [{"text": "x"}] * many)
    wrong = [(CompletionRequest, {"prompt": prompt}) for prompt in prompts]
    wrong += [(CompletionRequest, {"prompt": "a"} | {str(number): 1 for number in range(many)})]
    wrong += [
        (CompletionRequest, {"prompt": "a", name: {str(n): "x" for n in range(many)}}) for name in ("logit_bias",)
    ]
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


def test_what_can_never_run_is_refused_in_the_fullest_of_times():
    with gated(max_queue=0, config={"num_blocks": 4}) as (server, gate):
        one_after_another(server, body(OWL, 2))
        for settings, message in (
            ({"max_tokens": 600}, "the model's context is 512"),
            ({"max_tokens": 100}, "need 7 blocks of 16 tokens, and this engine has 4 in all"),
            ({"n": 3, "temperature": 1}, "asks for 3 answers, and this server works on 2 at most"),
        ):
            response = post(server, **body(OWL) | settings)
            assert message in error_of((response.status_code, response.json()), 400)["message"]
        assert accepted(server) == 1, "the places of those that were refused are free"
        gate.open()
        server.settled()


# --- a client that goes away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_in_the_middle_frees_row_and_blocks_within_one_iteration(stream):
    with gated() as (server, gate):
        tasks = server.tasks()
        leaving = Wire.posting(server, body(MILLER, 100, stream=stream))
        eventually(lambda: accepted(server) == 1 and gate.passes == 1)
        stays, waits = one_after_another(server, body(OWL, 9), body(FOX, 4))
        gate.allow(2)  # both rows have a token, and the third iteration holds at the gate
        if stream:
            assert leaving.read_until(b"data: ").startswith(b"HTTP/1.1 200")
        left, stayed = server.engine.running
        assert working(server) == [left, stayed]
        leaving.close()
        noticed(server, 2)
        gate.allow()  # ends the iteration that was on its way; the next one has begun
        assert working(server) == [left, stayed]
        assert server.engine.running == [stayed, server.ask(lambda: list(server.thread._listeners))[1]]
        gate.allow()
        assert left not in working(server) and len(working(server)) == 2, "who waited has the row"
        tables = server.engine.execution.blocks.tables
        assert {answer.label for answer in tables} == set(server.engine.running)
        gate.open()
        assert stays.answer[1]["choices"][0]["text"] == expected(OWL, 9).text
        assert waits.answer[1]["choices"][0]["text"] == expected(FOX, 4).text
        server.settled()
        eventually(lambda: server.tasks() <= tasks, "tasks are left over")


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_the_queue_never_runs(stream):
    with gated(max_queue=2) as (server, gate):
        first, second = one_after_another(server, body(OWL, 6), body(MILLER, 6))
        leaving = [Wire.posting(server, body(FOX, 9, n=1, stream=stream)) for _ in range(2)]
        eventually(lambda: accepted(server) == 4)
        assert post(server, **body(OWL, 2)).status_code == 429
        for wire in leaving:
            wire.close()
        noticed(server, 2)
        gate.allow(2)
        eventually(lambda: accepted(server) == 2)
        assert server.engine.waiting == [] and len(server.engine.running) == 2, "there is room in the queue again"
        gate.open()
        for request, prompt in ((first, OWL), (second, MILLER)):
            assert request.answer[1]["choices"][0]["text"] == expected(prompt, 6).text
        server.settled()
        ran = {slot.request_id for one in server.engine.trace.iterations for slot in one.slots} - {None}
        assert len(ran) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_before_the_first_token_does_not_get_a_second(stream):
    with gated() as (server, gate):
        leaving = Wire.posting(server, body(OWL, 50, stream=stream, n=3, temperature=1))
        eventually(lambda: accepted(server) == 3 and gate.passes == 1)
        leaving.close()
        noticed(server, 0)
        gate.open()
        server.settled()
        assert server.engine.trace.output_tokens <= 1
        page = httpx.get(server.url + "/metrics").text
        assert 'engine_answers_total{reason="abort"} 3.0' in page
        assert 'engine_requests_total{status="499"} 1.0' in page


def test_a_client_that_does_not_read_costs_nobody_else_anything():
    """Its answers wait in the server; the engine does not."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is accepted here inherits it
    with serving(embedded_engine(max_batch_size=4), sockets=[listening]) as server:
        tasks = server.tasks()
        wanted = body(OWL, 200, n=3, temperature=1, logprobs=20, ignore_eos=True, stream=True)
        deaf = Wire.posting(server, wanted, receive_buffer=4096)
        eventually(lambda: accepted(server) == 3)
        for prompt in (OWL, MILLER, FOX):
            assert post(server, **body(prompt, 20)).json()["choices"][0]["text"] == expected(prompt, 20).text
        eventually(lambda: accepted(server) == 0)
        assert server.engine.running == [] and server.engine.execution.blocks.used == 0
        assert len(server.server.server_state.tasks) == 1, "it is still being sent"
        deaf.close()
        server.settled()
        eventually(lambda: server.tasks() <= tasks)


def test_a_client_that_reads_late_gets_everything():
    with serving() as server:
        wire = Wire.posting(server, body(OWL, 100, stream=True, logprobs=5), receive_buffer=4096)
        eventually(lambda: accepted(server) == 1)
        eventually(lambda: accepted(server) == 0)
        lines = wire.read_until(b"[DONE]").decode().splitlines()
        assert text_of_chunks(events_of(line[line.find("data: ") :] for line in lines)) == expected(OWL, 100).text
        wire.close()


# --- deadlines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_that_passes_in_the_queue_is_504(stream):
    with gated(deadline=PATIENCE) as (server, gate):
        first, second = one_after_another(server, body(OWL, 5), body(MILLER, 5))
        response = post(server, **body(FOX, 5, deadline=0.1, stream=stream))
        error = error_of((response.status_code, response.json()), 504)
        assert error["code"] == "deadline_passed" and "0.1 s" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        noticed(server, 2)
        gate.open()
        for request, prompt in ((first, OWL), (second, MILLER)):
            assert request.answer[1]["choices"][0]["text"] == expected(prompt, 5).text
        server.settled()
        assert 'status="504"} 1.0' in httpx.get(server.url + "/metrics").text


def test_a_deadline_that_passes_in_the_middle_of_a_stream_is_its_last_event():
    with gated(deadline=3) as (server, gate):
        request = Asking(server, **body(OWL, 50, stream=True))
        eventually(lambda: gate.passes == 1)
        gate.allow(2)
        status, chunks = request.answer
        assert status == 200 and len(chunks) == 3
        assert chunks[-1]["error"]["code"] == "deadline_passed" and "[DONE]" not in chunks
        assert text_of_chunks(chunks[:-1]) == expected(OWL, 2).text
        noticed(server, 0)
        gate.open()
        server.settled()
        assert gate.passes == 3, "the iteration that was on its way was its last"


def test_a_deadline_in_the_middle_of_a_whole_answer_is_504():
    with gated() as (server, gate):
        request = Asking(server, **body(OWL, 50, deadline=2))
        eventually(lambda: gate.passes == 1)
        gate.allow(2)
        assert error_of(request.answer, 504)
        gate.open()
        server.settled()


# --- faults of the engine -------------------------------------------------------------------------------------------


def test_an_exception_in_the_engine_fails_those_in_the_batch_and_nobody_else():
    with gated() as (server, gate):
        gate.faults = {2: RuntimeError("out of memory")}
        whole, streamed, waiting = one_after_another(server, body(OWL, 9), body(MILLER, 9, stream=True), body(FOX, 5))
        gate.open()
        error = error_of(whole.answer, 500)
        assert (error["type"], error["code"]) == ("server_error", "engine_failed")
        assert error["message"] == "RuntimeError: out of memory"
        status, chunks = streamed.answer
        assert status == 200 and chunks[-1] == {"error": error}, "its headers had been sent: an event"
        assert text_of_chunks(chunks[:-1]) == expected(MILLER, len(chunks) - 1).text
        assert waiting.answer[1]["choices"][0]["text"] == expected(FOX, 5).text
        for prompt in (OWL, MILLER):  # whose blocks may have been half written
            assert post(server, **body(prompt, 12)).json()["choices"][0]["text"] == expected(prompt, 12).text
        assert httpx.get(server.url + "/health").status_code == 200
        server.settled()
        assert 'engine_answers_total{reason="error"} 2.0' in httpx.get(server.url + "/metrics").text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_exception_before_the_first_token_of_a_stream_is_a_status(path):
    with gated(shut=False) as (server, gate):
        gate.faults = {0: ArithmeticError("no")}
        asked = {"prompt": OWL} if "chat" not in path else {"messages": [{"role": "user", "content": OWL}]}
        response = post(server, path, stream=True, **asked)
        assert error_of((response.status_code, response.json()), 500)["message"] == "ArithmeticError: no"
        assert post(server, **body(OWL, 3)).json()["choices"][0]["text"] == expected(OWL, 3).text
        server.settled()


def test_one_of_several_answers_that_fails_fails_the_request_and_frees_the_others():
    with gated(config={"max_batch_size": 3}) as (server, gate):
        (request,) = one_after_another(server, body(OWL, 50, n=3, temperature=1, stream=True))
        gate.allow(3)
        server.engine._running[1].sampler.choose = None  # not callable
        gate.open()
        assert "TypeError" in request.answer[1][-1]["error"]["message"]
        server.settled()
        assert server.engine.trace.output_tokens < 50


def test_a_policy_that_fails_ends_everybody_and_the_server_serves_on():
    with gated() as (server, gate):
        requests = one_after_another(server, *[body(OWL, 9, stream=n == 0) for n in range(4)])
        gate.allow(2)
        schedule = server.engine.scheduler.schedule

        def fails(*_):
            server.engine.scheduler.schedule = schedule
            raise LookupError("no plan")

        server.engine.scheduler.schedule = fails
        gate.open()
        status, chunks = requests[0].answer
        assert status == 200 and chunks[-1]["error"]["message"] == "LookupError: no plan"
        for request in requests[1:]:
            assert error_of(request.answer, 500)["message"] == "LookupError: no plan"
        server.settled()
        assert post(server, **body(OWL, 9)).json()["choices"][0]["text"] == expected(OWL, 9).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_leaves_nobody_waiting():
    with gated() as (server, gate):
        gate.faults = {2: SystemExit("the end")}
        running, streamed, waiting = one_after_another(server, body(OWL, 9), body(MILLER, 9, stream=True), body(FOX, 5))
        gate.open()
        assert "The engine has stopped: SystemExit: the end" in error_of(running.answer, 500)["message"]
        assert "The engine has stopped" in streamed.answer[1][-1]["error"]["message"]
        assert "The engine has stopped" in error_of(waiting.answer, 500)["message"]
        health = httpx.get(server.url + "/health")
        assert error_of((health.status_code, health.json()), 503)
        response = post(server, **body(OWL, 2, stream=True))
        assert "started anew" in error_of((response.status_code, response.json()), 500)["message"]
        assert httpx.get(server.url + "/metrics").status_code == 200
        assert accepted(server) == 0


# --- nobody waits for the model -------------------------------------------------------------------------------------


def test_during_a_single_iteration_the_server_answers_everything_else():
    with gated() as (server, gate):
        one_after_another(server, body(OWL, 2))
        eventually(lambda: gate.passes == 1)
        with httpx.Client(base_url=server.url) as client:
            for _ in range(30):
                assert client.get("/health").json() == {"status": "ok"}
                assert client.get("/v1/models").status_code == client.get("/metrics").status_code == 200
                assert client.post("/pace", json={"seconds": 0}).status_code == 200
                assert client.post("/v1/completions", json=body("")).status_code == 400
                assert client.post("/v1/completions", json=body(OWL, 600)).status_code == 400
        assert gate.passes == 1 and server.engine.trace.forward_passes == 0
        gate.open()


def test_in_slow_motion_too():
    with serving(pace=2.0) as server:
        request = Asking(server, **body(OWL, 2))
        eventually(lambda: server.engine.steps == 1)
        answers = 0
        with httpx.Client(base_url=server.url) as client:
            while server.engine.steps == 1:
                answers += client.get("/health").status_code == 200
        assert answers >= 20, "in two seconds"
        server.thread.pace = 0
        assert request.answer[0] == 200


def test_a_long_text_is_not_made_tokens_of_on_the_event_loop():
    with gated(shut=False) as (server, _):
        check, begun, go_on = server.engine.admission.check, threading.Event(), threading.Event()

        def slow(prompt, params):
            if threading.current_thread().name.startswith("tokenizing"):
                begun.set()
                assert go_on.wait(PATIENCE)
            return check(prompt, params)

        server.engine.admission.check = slow
        request = Asking(server, **body(OWL, 3))
        assert begun.wait(PATIENCE)
        for _ in range(20):
            assert httpx.get(server.url + "/health").status_code == 200
        assert accepted(server) == 1, "its place is taken before any work is done for it"
        go_on.set()
        assert request.answer[1]["choices"][0]["text"] == expected(OWL, 3).text


def test_no_work_is_done_for_those_that_are_refused():
    """Not even tokens are made of their texts, however many come at once."""
    with gated(max_queue=1) as (server, gate):
        check, checked, go_on = server.engine.admission.check, [], threading.Event()

        def slow(prompt, params):
            if threading.current_thread().name.startswith("tokenizing"):
                checked.append(prompt)
                assert go_on.wait(PATIENCE)
            return check(prompt, params)

        server.engine.admission.check = slow
        said = {"messages": [{"role": "user", "content": OWL}], "max_tokens": 2, "temperature": 0}
        requests = [Asking(server, **body(OWL, 2)) for _ in range(6)]
        requests += [Asking(server, "/v1/chat/completions", **said) for _ in range(6)]
        eventually(lambda: sum(request.response is not None for request in requests) == 9, "three places, nine refused")
        go_on.set()
        gate.open()
        assert sorted(request.answer[0] for request in requests) == [200] * 3 + [429] * 9
        assert len(checked) == 3
        server.settled()


# --- the end --------------------------------------------------------------------------------------------------------


def begun(server, *bodies: dict) -> list[Asking]:
    """Requests that have arrived in this order at a launched server, which has begun with the first ones."""
    requests = []
    for number, settings in enumerate(bodies, 1):
        requests.append(Asking(server, **settings))
        wanted = f"engine_answers_unfinished {number}.0"
        eventually(lambda wanted=wanted: wanted in httpx.get(server.url + "/metrics").text)
    eventually(lambda: iterations(server) >= 2)
    return requests


def iterations(server) -> float:
    return float(httpx.get(server.url + "/metrics").text.split("\nengine_iterations_total ")[1].split("\n")[0])


def test_who_was_accepted_is_answered_before_the_end_and_nobody_else_is_accepted():
    with launch("--rows", "2", "--pace", "0.05", "--grace", "60") as server:
        bodies = [body(OWL, 20), body(MILLER, 20, stream=True), body(OWL, 15, stream=True), body(MILLER, 15)]
        requests = begun(server, *bodies)  # two of them wait for a row
        watching = Asking(server, "/events", "GET")
        server.process.send_signal(signal.SIGTERM)
        refused = 0
        while server.process.poll() is None and refused < 3:  # new connections, or new requests on old ones
            try:
                refused += httpx.get(server.url + "/health").status_code == 503
            except httpx.TransportError:
                refused += 1
        assert refused == 3
        for request, settings in zip(requests, bodies, strict=True):
            status, answer = request.answer
            text = text_of_chunks(answer) if settings.get("stream") else answer["choices"][0]["text"]
            assert (status, text) == (200, expected(settings["prompt"], settings["max_tokens"]).text)
            assert not settings.get("stream") or answer[-1] == "[DONE]"
        watching.done()
        server.process.wait(PATIENCE)


@pytest.mark.parametrize("grace", ["0", "1"])
def test_whoever_cannot_be_answered_in_time_is_told_so(grace):
    """A server also ends when its launcher does, however that happens: its standard input ends then."""
    with launch("--rows", "2", "--pace", "0.2", "--grace", grace, "--max-queue", "9") as server:
        kinds = [{}, {"stream": True}, {}, {"stream": True}]  # the last two wait for a row
        requests = begun(server, *[body(OWL, 400, ignore_eos=True, **kind) for kind in kinds])
        eventually(lambda: requests[1].chunks, "the stream has not begun")
        if grace == "0":
            server.process.stdin.close()
        else:
            server.process.send_signal(signal.SIGTERM)
        for number, request in enumerate(requests):
            status, answer = request.answer
            if number == 1:  # its headers had been sent
                assert status == 200 and answer[-1]["error"]["code"] == "shutting_down" and len(answer) > 1
            else:
                assert error_of((status, answer), 503)["code"] == "shutting_down"
                assert int(request.response.headers["retry-after"]) >= 1
        server.process.wait(PATIENCE)


def test_a_server_with_nothing_to_do_ends_at_once():
    with serving() as server:
        assert post(server, **body(OWL, 2)).status_code == 200
        with httpx.Client(base_url=server.url) as idle:
            idle.get("/health")
            server.end()
        assert not server.thread.alive and not server.thread._thread.is_alive()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenizing")]


# --- a lot of everything --------------------------------------------------------------------------------------------


def test_a_small_soak():
    figures = soak.run(requests=300, times_capacity=3.0, seed=3)
    assert figures.wrong == [] and figures.left_over == {}
    assert figures.answered + figures.refused + figures.left == 300
    assert figures.answered > 10 and figures.refused > 10 and figures.left > 10
    assert figures.trace <= 1000 and figures.tasks_after <= figures.tasks_before
