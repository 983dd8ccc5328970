"""The load generator measures servers whose pauses are known: its figures match them and leave out no waiting.

A pause is a lower bound of what a client can measure, however busy the machine is. Most bounds are therefore lower
ones, and upper bounds are far away.
"""

import asyncio
import json
import re
import signal
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from helpers.load_test import arrival_times, capacity, lengths, run_load, sweep, texts, token_ids
from helpers.load_test.__main__ import main
from helpers.load_test.client import ChunkReader
from helpers.request import Request
from tests.support.serving import PATIENCE, serving, wait_until

run_load = partial(run_load, timeout=PATIENCE)


class Stub:
    """An OpenAI-compatible server in a thread of its own; all of its tokens are "word ".

    Args:
        pause: seconds before each token.
        lanes: the number of concurrent requests; further requests queue.
        handle: a function that replaces `respond`; it takes the stub, the HTTP request and its JSON.

    Attributes:
        bodies: the JSON of all requests.
        gone: the number of clients that disconnected before the end of their response.
    """

    def __init__(self, pause=0.0, lanes=1000, handle=None):
        self.pause, self.handle = pause, handle or Stub.respond
        self.bodies, self.gone = [], 0
        self._lanes, self._loop = asyncio.Semaphore(lanes), asyncio.new_event_loop()

    def __enter__(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/{completions:.*}", self._post)
        self._server = TestServer(app)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._server.start_server(shutdown_timeout=0.1))
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    def __exit__(self, *_):
        self._run(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine):
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    async def _list(self, request):
        return web.json_response({"data": [{"id": "stub"}]})

    async def _post(self, request):
        body = await request.json()
        self.bodies.append(body)
        try:
            async with self._lanes:
                return await self.handle(self, request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise

    async def respond(self, request, body):
        response = await self.headers(request)
        count = body["max_tokens"]
        for number in range(count):
            await asyncio.sleep(self.pause)
            await self.say(response, "word ", "length" if number == count - 1 else None, "messages" in body)
        await self.event(response, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def headers(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def say(self, response, text, reason=None, chat=False):
        content = {"delta": {"content": text}} if chat else {"text": text}
        await self.event(response, {"choices": [{"index": 0, **content, "finish_reason": reason}]})

    async def event(self, response, chunk):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def refusal(status=429, **headers):
    return web.json_response({"error": {"message": "full"}}, status=status, headers=headers)


def some(count, max_tokens=1):
    return [(f"prompt {number}", max_tokens) for number in range(count)]


# --- the load --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0, 1, 3])
def test_gaps_have_the_stated_mean_and_variation_and_another_rate_the_same_pattern(cv):
    times = arrival_times(20001, rate=4, cv=cv, seed=7)
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, abs=1e-9)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)
    assert times == pytest.approx(2 * np.array(arrival_times(20001, rate=8, cv=cv, seed=7)))


def test_lengths_follow_their_distribution():
    assert lengths("fixed:32", 3) == [32, 32, 32]
    uniform = lengths("uniform:8-12", 5000)
    assert set(uniform) == {8, 9, 10, 11, 12} and np.mean(uniform) == pytest.approx(10, rel=0.02)
    exponential = lengths("exponential:64-1000", 5000)
    assert min(exponential) == 1 and np.mean(exponential) == pytest.approx(64.5, rel=0.05)
    lognormal = lengths("lognormal:40-160-10000", 5000)
    assert np.percentile(lognormal, [50, 95]) == pytest.approx([40.5, 160], rel=0.1)
    assert max(lengths("exponential:64-70", 1000)) == 70
    assert lengths("uniform:1-99", 50, 1) == lengths("uniform:1-99", 50, 1) != lengths("uniform:1-99", 50, 2)


def test_prompts_have_their_length_and_no_beginning_in_common():
    prompts = texts([40] * 50)
    assert {len(prompt.split()) for prompt in prompts} == {30}
    assert len({prompt[:40] for prompt in prompts}) == 50
    assert prompts == texts([40] * 50) != texts([40] * 50, seed=1)
    assert [len(ids) for ids in token_ids([1, 30, 7])] == [1, 30, 7]


# --- one response ----------------------------------------------------------------------------------------------------


def completion(text, reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def chat(delta, reason=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(output_tokens):
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": output_tokens}}


@pytest.mark.parametrize(
    ("chunks", "times", "tokens"),
    [
        ([completion("a"), completion("b", "length")], [0, 1], 2),  # the server does not count: one token per chunk
        ([completion("abc"), completion("de", "length"), usage(5)], [0, 1], 5),  # several tokens per chunk
        ([completion(""), completion("ö"), completion("", "stop"), usage(3)], [0, 1, 2], 3),  # half an ö; then EOS
        ([completion("a"), completion("", "stop"), usage(1)], [0], 1),  # the finish reason in a chunk of its own
        ([chat({"role": "assistant", "content": ""}), chat({"content": "a"}), chat({}, "stop"), usage(2)], [1, 2], 2),
        ([chat({"reasoning_content": "hm"}), chat({"content": "a"}, "stop"), usage(2)], [0, 1], 2),
    ],
)
def test_the_chunks_that_hold_tokens_count(chunks, times, tokens):
    reader = ChunkReader()
    for number, chunk in enumerate(chunks):
        reader.read(json.dumps(chunk), number)
    reader.end()
    assert (reader.times, reader.output_tokens) == (times, tokens)


# --- no coordinated omission -----------------------------------------------------------------------------------------


def test_latencies_grow_like_the_queue_of_a_slow_server_and_a_closed_loop_does_not_see_it():
    """The server runs one request at a time for `service` seconds; requests arrive regularly and twice as fast.

    The k-th request to finish (from 0) cannot finish before (k + 1) * service, and it is due at k * gap, so the least
    latencies follow by arithmetic. The user of the closed loop sends a request only when the server is idle, and finds
    it fast regardless of the load that users would have offered.
    """
    count, service, gap = 24, 0.025, 0.0125
    with Stub(pause=service, lanes=1) as stub:
        opened = run_load(stub.url, some(count), rate=1 / gap, cv=0)
        closed = run_load(stub.url, some(count), users=1)
    assert len(opened.ok) == len(closed.ok) == count
    queue = [(k + 1) * service - k * gap for k in range(count)]
    assert sum(opened.latencies("e2e")) >= 0.999 * sum(queue)
    assert opened.percentile("e2e", 100) >= 0.999 * queue[-1] > 12 * service
    assert min(closed.latencies("e2e")) >= 0.999 * service
    assert closed.percentile("e2e", 50) < opened.percentile("e2e", 50) / 2


def test_a_late_load_generator_includes_its_lag_and_reports_it(monkeypatch):
    """Each send blocks the event loop for 50 ms, so the last of five requests is sent at least 0.2 s late."""
    post = ClientSession.post

    def slow_post(*args, **kwargs):
        time.sleep(0.05)
        return post(*args, **kwargs)

    monkeypatch.setattr(ClientSession, "post", slow_post)
    with Stub() as stub:
        result = run_load(stub.url, some(5), rate=1000, cv=0)
    assert result.lag >= 0.19
    assert sorted(result.latencies("e2e"))[-1] >= 0.24
    assert "The load generator was up to" in str(result)


def test_requests_are_sent_when_they_are_due_however_slow_the_server_is():
    """The server responds once all requests have arrived: more than a hundred, aiohttp's default limit."""

    async def handle(stub, request, body):
        while len(stub.bodies) < 150:
            await asyncio.sleep(0.01)
        return await stub.respond(request, body)

    with Stub(handle=handle) as stub:
        result = run_load(stub.url, some(150), rate=1000)
    assert len(result.ok) == 150


def test_a_user_of_a_closed_loop_who_is_refused_waits_for_as_long_as_the_server_says():
    """Without this pause, a few users who are refused would use up all requests within moments."""

    async def handle(stub, request, body):
        return refusal(**{"Retry-After": "1.5"}) if len(stub.bodies) <= 2 else await stub.respond(request, body)

    with Stub(handle=handle) as stub:
        result = run_load(stub.url, some(4), users=2)
    assert [request.request_id for request in result.requests] == list(range(4))
    assert [request.status for request in result.requests] == ["refused", "refused", "ok", "ok"]
    assert min(request.sent for request in result.ok) >= 1.5  # without this header, it is a second


# --- what is sent, and what goes wrong -------------------------------------------------------------------------------


def test_a_request_is_what_openai_clients_send():
    with Stub() as stub:
        run_load(stub.url + "/v1/", [Request("Look", 3), ([7, 8], 2)], 100, cv=0, body={"temperature": 0})
        run_load(stub.url, [("Look", 3)], 1, chat=True)
    shared = {"model": "stub", "stream": True, "stream_options": {"include_usage": True}}
    assert {"prompt": "Look", "max_tokens": 3, "temperature": 0, **shared} in stub.bodies
    assert {"prompt": [7, 8], "max_tokens": 2, "temperature": 0, **shared} in stub.bodies
    assert {"messages": [{"role": "user", "content": "Look"}], "max_tokens": 3, **shared} in stub.bodies


def test_every_outcome_of_a_request_is_counted_and_no_request_is_sent_twice():
    messages = {
        "refused": "429: full",
        "error event": "the engine stopped",
        "hangs": "timed out after 2 s",
        "disconnects": "Client|Error",
        "ends": "broke off",
    }

    async def handle(stub, request, body):
        kind = body["prompt"]
        if kind == "refused":
            return refusal()
        response = await stub.headers(request)
        await stub.say(response, "word")
        if kind == "error event":
            await stub.event(response, {"error": {"message": "the engine stopped"}})
        if kind in ("ok", "hangs", "disconnects"):
            await response.write(b'data: {"choi')  # an event may arrive in parts
        await asyncio.sleep(PATIENCE if kind == "hangs" else 0.1)
        if kind == "disconnects":
            request.transport.close()
        if kind == "ok":
            await response.write(b'ces": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n')
        return response

    kinds = ["ok", *messages]
    with Stub(handle=handle) as stub:
        result = run_load(stub.url, [(kind, 5) for kind in kinds], rate=1000, timeout=2)
        wait_until(lambda: stub.gone == 1)  # a request that times out disconnects
    assert len(stub.bodies) == len(kinds)
    assert [request.status for request in result.requests] == ["ok", "refused", *["failed"] * 4]
    for request, words in zip(result.requests[1:], messages.values(), strict=True):
        assert re.search(words, request.error), request
    assert result.request_throughput == 1 / result.duration
    assert "6: 1 ok, 1 refused, 4 failed" in str(result) and "1 not completed: timed out after 2 s" in str(result)


def test_a_server_that_is_absent_or_requires_a_key_is_an_error():
    with serving(api_key="secret") as server:
        with pytest.raises(PermissionError, match="API key"):
            run_load(server.url, some(1), 1)
        assert len(run_load(server.url, some(1), 1, api_key="secret").ok) == 1
    with pytest.raises(ConnectionError, match="No server answers at"):
        run_load(server.url, some(1), 1)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_figures_are_the_servers_pauses():
    with Stub(pause=0.02) as stub:
        result = run_load(stub.url, some(6, max_tokens=5), rate=50, seed=5, limits={"e2e": 30, "ttft": 30})
    assert all(request.text == "word " * 5 and request.finish_reason == "length" for request in result.ok)
    assert 0.02 <= min(result.latencies("ttft")) < 2
    assert 0.1 <= min(result.latencies("e2e")) < 10
    assert len(result.latencies("itl")) == 6 * 4
    assert result.duration == max(request.ended for request in result.requests) >= 0.2
    assert result.output_throughput * result.duration == pytest.approx(30)
    assert result.goodput == result.request_throughput
    assert "6 ok" in str(result) and "with e2e <= 30 s, ttft <= 30 s (100% of all)" in str(result)


def test_a_sweep_of_a_server_with_two_lanes_finds_its_capacity_and_overload():
    """Each request takes 20 ms in one of two lanes: at most 100 requests per second on any machine."""
    with Stub(pause=0.02, lanes=2) as stub:
        most = capacity(stub.url, lambda number: some(6), progress=False)
        assert 0 < most <= 100
        slow, fast = sweep(stub.url, [most * 4, most / 4], lambda number: some(6), cv=0)
        found = sweep(stub.url, None, lambda number: some(6), cv=0)
    assert slow.rate == fast.rate / 16 == pytest.approx(most / 4)
    assert fast.percentile("e2e", 100) >= 3 * 0.02 - 5 / fast.rate
    assert len(found) == 7 and found[-1].rate == pytest.approx(8 * found[0].rate)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_measures_with_completions_chats_and_token_ids(capsys):
    with Stub() as stub:
        options = ["--url", stub.url, "--requests", "4", "--prompt", "fixed:40", "--output", "uniform:2-4"]
        assert main([*options, "--rate", "100", "--limit", "ttft=5"]) == 0
        assert main([*options, "--closed", "2", "--chat", "--body", '{"temperature": 1}']) == 0
        assert main([*options, "--rate", "100", "--token-ids"]) == 0
    completions, chats, ids = stub.bodies[:4], stub.bodies[4:8], stub.bodies[8:]
    assert {len(body["prompt"].split()) for body in completions} == {30}, "four tokens for three words"
    assert all(2 <= body["max_tokens"] <= 4 for body in stub.bodies)
    assert all(body["messages"] and body["temperature"] == 1 for body in chats)
    assert [len(body["prompt"]) for body in ids] == [40] * 4
    output = capsys.readouterr()
    assert "4: 4 ok" in output.out and "with ttft <= 5 s (100% of all)" in output.out and "2 users" in output.out
    assert output.err == ""


def test_the_command_line_sweeps_with_new_texts_of_the_same_lengths(capsys):
    with Stub(pause=0.001) as stub:
        assert main(["--url", stub.url, "--sweep", "50", "100", "--requests", "5", "--mix", "write"]) == 0
    first, second = stub.bodies[:5], stub.bodies[5:]
    for key, same in ("max_tokens", True), ("prompt", False):
        earlier, later = (sorted(body[key] for body in bodies) for bodies in (first, second))
        assert (earlier == later) is same
    assert capsys.readouterr().out.count("<- knee") == 1


@pytest.mark.parametrize(("status", "code"), [(429, 0), (500, 1)])
def test_a_failed_request_is_the_exit_status_and_a_refused_one_is_not(capsys, status, code):
    async def handle(stub, request, body):
        return refusal(status)

    with Stub(handle=handle) as stub:
        assert main(["--url", stub.url, "--rate", "50", "--requests", "5", "--output", "fixed:1"]) == code
    assert f"5 not completed: {status}: full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "1", "--closed", "2"], "--rate and --closed exclude each other"),
        (["--rate", "0"], "rate is a number of requests per second above 0"),
        (["--output", "gauss:5"], "There is no distribution 'gauss:5'; there are fixed:N, uniform:LOW-HIGH"),
        (["--prompt", "uniform:9-8"], "'uniform:9-8' is not uniform:LOW-HIGH in ascending whole numbers"),
        (["--limit", "ttft=soon"], "not 'ttft=soon'"),
        (["--model", "other"], "The server has no model 'other'; it has stub"),
    ],
)
def test_a_bad_setting_is_an_error_of_one_line_before_anything_is_sent(capsys, argv, message):
    with Stub() as stub, pytest.raises(SystemExit) as end:
        main(["--url", stub.url, *argv])
    (error,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and error.startswith("python -m helpers.load_test: ") and message in error
    assert stub.bodies == []


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_disconnects_and_exits():
    async def handle(stub, request, body):
        if len(stub.bodies) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.sleep(PATIENCE)

    with Stub(handle=handle) as stub:
        assert main(["--url", stub.url, "--closed", "3", "--token-ids"]) == 130
        wait_until(lambda: stub.gone == 3)
